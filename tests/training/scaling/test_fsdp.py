"""The same rows give the same losses, gradient norms and weights, however ranks and micro-batches share them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ligermodels
from ligermodels import distributed
from ligermodels.architectures import ARCHITECTURES
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.memory import training_memory
from ligermodels.training.scaling import fsdp
from tests.training.scaling.worker import train, whole

ROOT = Path(__file__).parents[3]
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


def workers(ranks, tmp_path, runs, interpret=False):
    worker = "-m", "tests.training.scaling.worker", str(tmp_path / "r.pt"), json.dumps(runs)
    done = torchrun(ranks, *worker, interpret=interpret)
    assert done.returncode == 0, done.stderr[:4000]
    return torch.load(tmp_path / "r.pt")


def assert_same_run(got, expected, name="", atol=1e-4):
    torch.testing.assert_close(got["losses"], expected["losses"], rtol=2e-6, atol=0, msg=lambda m: f"{name}: {m}")
    torch.testing.assert_close(got["norms"], expected["norms"], rtol=1e-5, atol=0, msg=lambda m: f"{name}: {m}")
    assert got["weights"].keys() == expected["weights"].keys()
    for parameter, weight in expected["weights"].items():
        # Adam's first steps divide each gradient by its own size: rounding counts where a gradient is all but zero.
        torch.testing.assert_close(
            got["weights"][parameter], weight, rtol=1e-4, atol=atol, msg=lambda m, n=parameter: f"{name}, {n}: {m}"
        )


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    distributed.stop()


HALF = {"dtype": "bfloat16", "steps": 3}
RUNS = {  # name: what both do, what only the two ranks do
    "untied": ({"model": config("llama", False)}, {}),
    "tied, recomputed": ({"model": config("qwen2", True)}, {"recomputed": 1}),
    "compiled": ({"model": config("llama", False), "steps": 2}, {"compiled": True, "recomputed": 1}),
    "experts, kept gathered": ({"model": config("mixtral", False)}, {"keep_gathered": True}),
    "bf16 on fp32 masters": ({"model": config("llama", False)} | HALF, {"recomputed": 2}),
    "bf16 without masters": ({"model": config("llama", False), "stored": "bfloat16"} | HALF, {}),
    "fp32 LoRA on bf16 experts": ({"model": config("mixtral", False), "lora": "float32"} | HALF, {"recomputed": 1}),
    "fp32 LoRA on a bf16 base": ({"model": config("llama", False), "lora": "float32"} | HALF, {}),
}


def test_two_ranks_train_as_one_process_does(tmp_path, on_cpu):
    """One process takes the two ranks' micro-batches one after the other: sums of two numbers have no order."""
    shared = [common | only | {"accumulate": 1, "batch_size": 2} for common, only in RUNS.values()]
    for (name, (common, _)), got in zip(RUNS.items(), workers(2, tmp_path, shared), strict=True):
        alone = train(accumulate=2, batch_size=2, **common)
        assert alone["losses"][-1] < alone["losses"][0], name
        assert_same_run(got, alone, name)


@pytest.mark.parametrize("name", [name for name, architecture in ARCHITECTURES.items() if "tiny" in architecture.SIZES])
def test_no_block_returns_a_view_of_which_fsdp_would_warn_on_every_rank(name):
    model = ligermodels.create(name, size="tiny")
    views = []
    for block in model.model.layers:
        block.register_forward_hook(lambda _, inputs, out: views.extend(x._is_view() for x in out[:2]))
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert len(views) == 2 * len(model.model.layers) and not any(views)


def test_four_ranks_on_two_copies_train_as_one_process_does(tmp_path, on_cpu):
    model = config("llama", tied=False)
    alone = train(model, batch_size=8)
    assert_same_run(workers(4, tmp_path, [{"model": model, "batch_size": 1, "accumulate": 2, "replicas": 2}])[0], alone)


def test_two_ranks_train_through_fused_nodes_as_one_process_does_without_them(tmp_path, on_cpu):
    model = {"model": config("llama", tied=False), "steps": 2}
    runs = {"in full": model, "LoRA": model | {"lora": "float32"}}
    sharded = workers(2, tmp_path, [{"batch_size": 2} | settings for settings in runs.values()], interpret=True)
    for (name, settings), got in zip(runs.items(), sharded, strict=True):
        alone = train(batch_size=4, **settings)
        assert min(alone["norms"]) > 1e-3
        assert_same_run(got, alone, name, atol=1e-3)  # a twentieth of what two steps move a weight


@pytest.mark.parametrize("recomputed", [0, 1])
def test_accumulation_and_recomputation_change_nothing_under_uneven_masks(recomputed, on_cpu):
    model = config("qwen2", tied=True)
    assert_same_run(train(model, batch_size=1, accumulate=4, recomputed=recomputed), train(model, batch_size=4))


def test_one_process_computes_in_bf16_on_fp32_weights(on_cpu):
    """Its first gradients are, in fp32, those of the weights rounded to bf16."""
    model = ligermodels.create(config("llama", tied=False), device="meta")
    needs = training_memory(model, 1, 32, torch.bfloat16)
    fsdp.shard(model, World(CPU), torch.bfloat16)
    assert training_memory(model, 1, 32, torch.bfloat16) == needs  # asked again when memory was not enough
    model.to_empty(device="cpu")
    model.initialize(1)
    rounded = ligermodels.create(config("llama", tied=False), device="cpu")
    rounded.load_state_dict({name: whole(parameter) for name, parameter in model.named_parameters()})
    rounded.bfloat16()
    ids = torch.arange(32)[None]
    for each in (model, rounded):
        each(ids, ids).loss.backward()
    for (name, got), expected in zip(model.named_parameters(), rounded.parameters(), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(
            whole(got.grad), expected.grad.float(), rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("stored", "lora", "computed", "summed"),
    [
        ("float32", None, "bfloat16", "float32"),
        ("bfloat16", None, "bfloat16", "bfloat16"),
        ("bfloat16", None, "float32", "float32"),
        ("bfloat16", "float32", "bfloat16", "float32"),
    ],
)
def test_gradients_are_summed_in_what_is_computed_in_or_trained_in_whichever_is_wider(stored, lora, computed, summed):
    model = ligermodels.create(config("llama", False), dtype=getattr(torch, stored), device="meta")
    if lora:
        ligermodels.add_lora(model, rank=2, dtype=getattr(torch, lora))
    policy = fsdp.precision(model, getattr(torch, computed))
    assert (policy.param_dtype, policy.reduce_dtype) == (getattr(torch, computed), getattr(torch, summed))


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
    fsdp.refuse_ties_between_units(model)
    model.model.layers[1].weight = model.model.layers[0].weight
    with pytest.raises(InputError, match=r"layers\.1\.weight is tied to model\.layers\.0\.weight"):
        fsdp.refuse_ties_between_units(model)


def test_ranks_that_copies_cannot_share_are_refused_with_how_to_start_more():
    assert fsdp.shards_of(World(CPU, 0, 6), 3) == 2
    with pytest.raises(InputError) as error:
        fsdp.shards_of(World(CPU), 2)
    assert str(error.value) == (
        "--dp-replicate 2 does not divide the number of ranks, 1: lower it, or start 2 or a multiple of them, as by "
        "torchrun --nproc-per-node 2"
    )


def test_without_torchrun_there_is_nothing_to_sum_or_shard():
    model, x = Blocks(), torch.tensor(3.0)
    fsdp.shard(model, World(CPU), torch.float32)
    assert fsdp.units(model) == []
    assert distributed.total(x) == 3.0 and distributed.total(x) is not x
