"""A checkpoint onto the GPU, one provider a process: time, rate, growth of the host's memory, bytes read.

    python -m benchmarks.loading FOLDER                              a checkpoint of any family
    python -m benchmarks.loading FOLDER --generate llama-3-8b        one of that shape in bf16, made there first

A provider is a function from a folder to what it put on the GPU, tensors by their Hub names; what there is to import was
imported, by loading a tiny checkpoint, before it is timed. It runs with the files in the page cache and after they were
dropped from it; the disk's share of what it read is in its row. What arrived is compared with the files by a hash of
every tensor. Memory is what no file backs (RssAnon, RssShmem), sampled every few milliseconds, and pinned memory.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from benchmarks import results
from benchmarks.train_step import MODELS
from ligermodels import hub
from ligermodels.weights.files import DTYPES, INDEX_FILE, read_header
from ligermodels.weights.mapping import plan

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FILES = 4
TINY = MODELS["llama-3-8b"] | {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
BLOCK = 16 * 2**20
THREADS = 8


def ligermodels(folder: Path) -> dict[str, Tensor]:
    import ligermodels

    model = ligermodels.load(folder, dtype=torch.bfloat16, device="cuda")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    pieces = plan({name: parameter.shape for name, parameter in parameters.items()}, model.weight_rules())
    return {piece.tensor: parameters[piece.parameter][piece.index].view(piece.shape) for piece in pieces}


def transformers(folder: Path) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_cuda}


def safetensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file, device="cuda").items()}


def read_and_copy(folder: Path) -> dict[str, Tensor]:
    """The fastest plain thing: threads read files as bytes, a block each, into two pinned buffers in turn, copied from asynchronously."""
    stream, free = torch.cuda.Stream(), SimpleQueue()
    for _ in range(2 * THREADS):
        free.put((torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()))

    def move(file, target, start):
        buffer, copied = free.get()
        copied.synchronize()
        part = target[start : start + BLOCK]
        with file.open("rb", buffering=0) as opened:
            opened.seek(start)
            assert opened.readinto(buffer.numpy()[: len(part)]) == len(part)
        with torch.cuda.stream(stream):
            part.copy_(buffer[: len(part)], non_blocking=True)
            copied.record()
        free.put((buffer, copied))

    files = {file: torch.empty(file.stat().st_size, dtype=torch.uint8, device="cuda") for file in weight_files(folder)}
    with ThreadPoolExecutor(THREADS) as pool:
        blocks = [(file, data, start) for file, data in files.items() for start in range(0, len(data), BLOCK)]
        list(pool.map(move, *zip(*blocks)))
    stream.synchronize()
    return tensors_of(files)


def read_and_copy_plainly(folder: Path) -> dict[str, Tensor]:
    """One thread, a file at a time."""
    files = {}
    for file in weight_files(folder):
        files[file] = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).cuda()
    return tensors_of(files)


PROVIDERS = {
    "ligermodels": ligermodels,
    "read and copy, 8 threads, pinned": read_and_copy,
    "read and copy, plainly": read_and_copy_plainly,
    "safetensors.load_file": safetensors,
    "transformers": transformers,
}


def tensors_of(files: dict[Path, Tensor]) -> dict[str, Tensor]:
    """The tensors in the bytes of whole files."""
    found = {}
    for file, data in files.items():
        begin = 8 + int.from_bytes(data[:8].tolist(), "little")
        for name, stored in read_header(file).items():
            size = torch.Size(stored.shape).numel() * stored.dtype.itemsize
            found[name] = data[begin + stored.begin :][:size].view(stored.dtype).view(stored.shape)
    return found


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def generate(raw: dict, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """A checkpoint of the configuration's shape, in FILES files of about equal size. Its data is one random block over and over, at
    another phase in every tensor, so that tensors and rows that trade places are noticed."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw | {"torch_dtype": str(dtype).removeprefix("torch.")}))
    model = hub.create(raw, device="meta")
    pieces = plan({name: parameter.shape for name, parameter in model.named_parameters()}, model.weight_rules())
    sizes = [torch.Size(piece.shape).numel() * dtype.itemsize for piece in pieces]
    shards: list[dict] = [{} for _ in range(FILES)]
    for piece, size, end in zip(pieces, sizes, itertools.accumulate(sizes), strict=True):
        shards[(end - 1) * FILES // sum(sizes)][piece.tensor] = (piece.shape, size)
    files = [f"model-{number:05d}-of-{FILES:05d}.safetensors" for number in range(1, FILES + 1)]
    random = torch.randn(2**24 + 4099, generator=torch.Generator().manual_seed(0)).mul(0.02).to(dtype).view(torch.uint8)
    with ThreadPoolExecutor(FILES) as pool:
        phases = [random.roll(8192 * number) for number in range(FILES)]
        list(pool.map(lambda file, shard, data: write_shard(folder / file, shard, dtype, data), files, shards, phases))
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}))


def write_shard(file: Path, shard: dict[str, tuple[tuple[int, ...], int]], dtype: torch.dtype, data: Tensor) -> None:
    header: dict = {"__metadata__": {"format": "pt"}}
    total = 0
    for name, (shape, size) in shard.items():
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [total, total + size]}
        total += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    view = data.numpy().data
    with file.open("wb", buffering=0) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, total, len(view)):
            stream.write(view[: total - start])
        os.fsync(stream.fileno())


def fingerprint(tensor: Tensor) -> int:
    """The sum of its 64-bit words, each times an odd number of its own, modulo 2^64."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    words = F.pad(data, (0, -len(data) % 8)).view(torch.int64)
    return int((words * (2 * torch.arange(len(words), device=words.device) + 1)).sum())


def fingerprints(folder: Path) -> dict[str, int]:
    """Of what the files hold, by the safetensors library's own reading."""
    found = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt", device="cuda") as opened:
            found |= {name: fingerprint(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118
    return found


class HostMemory:
    """How much more memory than on entry this process came to hold that no file backs, bytes. Pinned memory is added, although
    it may be among the rest: an upper bound."""

    def __enter__(self) -> "HostMemory":
        self.before, self.peak, self.ended = self.now(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.thread.join()

    def watch(self) -> None:
        while not self.ended.wait(0.003):
            self.peak = max(self.peak, self.now() - self.before)

    def now(self) -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        resident = sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
        return resident + torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)


def read_so_far() -> dict[str, int]:
    """Bytes this process has read: by system calls (a memory map's are not counted), and from disks."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read": int(counts["rchar"]), "from disk": int(counts["read_bytes"])}


def measure(provider: str, folder: Path) -> dict:
    """One row; runs in a process of its own, whose memory and first-time costs are its own."""
    load = PROVIDERS[provider]
    with tempfile.TemporaryDirectory() as tiny:
        generate(TINY, Path(tiny) / "tiny")
        load(Path(tiny) / "tiny")
    torch.cuda.synchronize()
    before = read_so_far()
    with HostMemory() as memory:
        start = time.perf_counter()
        tensors = load(folder)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    size = sum(tensor.nbytes for tensor in tensors.values())
    return (
        {
            "seconds": round(seconds, 3),
            "gb_per_s": round(size / seconds / 1e9, 2),
            "host_mib": round(memory.peak / 2**20),
            "gpu_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }
        | {
            f"gb_{what.replace(' ', '_')}": round((count - before[what]) / 1e9, 2)
            for what, count in read_so_far().items()
        }
        | {"fingerprints": {name: fingerprint(tensor) for name, tensor in tensors.items()}}
    )


def warm(folder: Path) -> None:
    buffer = bytearray(BLOCK)
    for file in weight_files(folder):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def drop(folder: Path) -> None:
    """From the page cache."""
    for file in weight_files(folder):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


CACHES = {"warm": warm, "cold": drop}


def row_of(provider: str, cache: str, folder: Path, expected: dict[str, int]) -> dict:
    CACHES[cache](folder)
    command = [sys.executable, "-m", "benchmarks.loading", str(folder), "--row", provider]
    result = subprocess.run(command, capture_output=True, text=True)
    row = {"provider": provider, "cache": cache}
    if result.returncode:
        return row | {"error": result.stderr.strip().splitlines()[-1][:200]}
    measured = json.loads(result.stdout.splitlines()[-1])
    found = measured.pop("fingerprints")
    wrong = [name for name in expected if found.get(name) != expected[name]]
    return row | measured | ({"error": f"{len(wrong)} tensors differ, such as {wrong[0]}"} if wrong else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--generate", choices=MODELS, help="make the checkpoint first, in a new folder")
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder for the dated JSON file")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--row", metavar="PROVIDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(args.row, args.folder)))
        return
    if args.generate:
        generate(MODELS[args.generate], args.folder)
    expected = fingerprints(args.folder)
    rows = []
    for cache in args.caches:
        for provider in args.providers:
            rows.append(row_of(provider, cache, args.folder, expected))
            print(rows[-1], flush=True)
    settings = {"checkpoint": args.generate or args.folder.name, "files": len(weight_files(args.folder))}
    size = sum(file.stat().st_size for file in weight_files(args.folder))
    print(results.save(args.output, "loading", results.environment() | settings | {"bytes": size, "rows": rows}))


if __name__ == "__main__":
    main()
