# From a checkout: docker build -t ligermodels . && docker run --gpus all --shm-size 8g -it ligermodels
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

# Triton compiles its launchers, against Python's headers.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# ubuntu, the image's own user.
USER 1000:1000
RUN python3 -m venv /home/ubuntu/venv
ENV PATH=/home/ubuntu/venv/bin:$PATH
COPY --chown=1000:1000 . /home/ubuntu/ligermodels
WORKDIR /home/ubuntu/ligermodels
RUN pip install --no-cache-dir -c constraints.txt -e ".[train,images,gguf,completion]"
CMD ["bash"]
