"""The same rows give the same losses, gradient norms and weights, however ranks and micro-batches share them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ligermodels.errors import InputError
from ligermodels.training import parallel
from ligermodels.training.parallel import World
from tests.training.worker import train

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def config(model_type, tied):
    return {
        "model_type": model_type, "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": tied,
    }  # fmt: skip


def torchrun(ranks, *command, folder=ROOT, interpret=False):
    """Runs a script or module under torchrun on the CPU, in `folder`; interpret: by the kernels, interpreted."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": str(int(interpret)),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [*launcher, *command]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


def two_workers(tmp_path, interpret=False, **settings):
    worker = "-m", "tests.training.worker", str(tmp_path / "r.pt"), json.dumps(settings)
    done = torchrun(2, *worker, interpret=interpret)
    assert done.returncode == 0, done.stderr[:4000]
    return torch.load(tmp_path / "r.pt")


def assert_same_run(got, expected):
    torch.testing.assert_close(got["losses"], expected["losses"], rtol=2e-6, atol=0)
    torch.testing.assert_close(got["norms"], expected["norms"], rtol=1e-5, atol=0)
    assert got["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        # Adam's first steps divide each gradient by its own size: rounding counts where a gradient is all but zero.
        torch.testing.assert_close(
            got["weights"][name], weight, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("model_type, tied", [("llama", False), ("qwen2", True), ("mixtral", False)])
def test_two_ranks_train_as_one_process_does(model_type, tied, tmp_path, on_cpu):
    model = config(model_type, tied)
    alone = train(model)
    assert alone["losses"][-1] < alone["losses"][0]
    assert_same_run(two_workers(tmp_path, model=model, micro_batch_size=1, recompute=tied), alone)


def test_two_ranks_train_lora_through_fused_nodes_as_one_process_does_without_them(tmp_path, on_cpu):
    settings = {"model": config("llama", tied=False), "steps": 2, "lora": True}
    alone = train(**settings)
    assert min(alone["norms"]) > 1e-3
    assert_same_run(two_workers(tmp_path, interpret=True, **settings), alone)


@pytest.mark.parametrize("recompute", [False, True])
def test_accumulation_and_recomputation_change_nothing_under_uneven_masks(recompute, on_cpu):
    model = config("qwen2", tied=True)
    assert_same_run(train(model, micro_batch_size=1, recompute=recompute), train(model))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(5, 4)
        self.model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.lm_head = nn.Linear(4, 5, bias=False)


def test_weights_tied_across_blocks_are_refused_and_within_the_root_allowed():
    model = Blocks()
    model.lm_head.weight = model.model.embed_tokens.weight
    parallel.refuse_ties_between_units(model)
    model.model.layers[1].weight = model.model.layers[0].weight
    with pytest.raises(InputError, match=r"layers\.1\.weight is tied to model\.layers\.0\.weight"):
        parallel.refuse_ties_between_units(model)


def test_without_torchrun_there_is_nothing_to_sum_or_shard():
    model, x = Blocks(), torch.tensor(3.0)
    parallel.shard(model, World(CPU), torch.float32)
    assert parallel.units(model) == []
    assert parallel.total(x) == 3.0 and parallel.total(x) is not x
