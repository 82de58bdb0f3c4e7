"""The same rows give the same losses, gradient norms and weights for any split into ranks and micro-batches."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing import start_processes

import ligermodels
from ligermodels import distributed
from ligermodels.architectures import ARCHITECTURES
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.kernels import launch
from ligermodels.memory.model import training_memory
from ligermodels.training.parallel import fsdp
from tests.forking import rank_environments
from tests.training.launching import TIMEOUT, losses
from tests.training.parallel import worker
from tests.training.parallel.worker import train, whole

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def config(model_type, tied):
    return {
        "model_type": model_type, "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": tied,
    }  # fmt: skip


WORKER = "tests.training.parallel.worker"


def forked(launcher, ranks, tmp_path, runs):
    launcher.succeed(tmp_path / "r.pt", json.dumps(runs), ranks=ranks, module=WORKER)
    return torch.load(tmp_path / "r.pt")


def under_torchrun(ranks, tmp_path, runs, **variables):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", WORKER, tmp_path / "r.pt", json.dumps(runs)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=environment | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return torch.load(tmp_path / "r.pt")


def assert_same_run(got, expected, name="", atol=1e-4):
    torch.testing.assert_close(got["losses"], expected["losses"], rtol=2e-6, atol=0, msg=lambda m: f"{name}: {m}")
    torch.testing.assert_close(got["norms"], expected["norms"], rtol=1e-5, atol=0, msg=lambda m: f"{name}: {m}")
    assert got["weights"].keys() == expected["weights"].keys()
    for parameter, weight in expected["weights"].items():
        # Adam's first steps divide each gradient by its magnitude, so rounding matters for gradients close to zero.
        torch.testing.assert_close(
            got["weights"][parameter], weight, rtol=1e-4, atol=atol, msg=lambda m, n=parameter: f"{name}, {n}: {m}"
        )


LATENTS = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
SHARED_KEYS = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "head_dim": 8, "global_head_dim": 16, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 4,
    "rope_parameters": None, "rope_theta": None,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "full_attention_interval": 2, "head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {
    "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8,
    "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24,
}  # fmt: skip
DELTA_EXPERTS = config("qwen3_next", False) | DELTA | EXPERTS | {"shared_expert_intermediate_size": 24}
SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 6}
SHORT_CONV = config("lfm2", True) | {"full_attn_idxs": [1]}
MAMBA_EXPERTS = config("granitemoehybrid", True) | MAMBA
KEYS_READ_LATER = config("gemma4_text", True) | SHARED_KEYS
SELECTIVE = {"checkpointed_blocks": None, "kept_tensors": None}
HALF = {"dtype": "bfloat16"}
RUNS = {  # name: (settings of both runs, further settings of the run on two ranks)
    "untied": ({"model": config("llama", False)}, {}),
    "tied, activation checkpointing": ({"model": config("qwen2", True)}, {"checkpointed_blocks": 1}),
    "tiles of tokens": ({"model": config("llama", False), "checkpointed_blocks": 2, "tile_tokens": 10}, {}),
    "experts, no reshard after forward": ({"model": config("mixtral", False)}, {"reshard_after_forward": False}),
    "bf16 on fp32 parameters": ({"model": config("llama", False)} | HALF, {"checkpointed_blocks": 2}),
    "bf16 on bf16 parameters": ({"model": config("llama", False), "param_dtype": "bfloat16"} | HALF, {}),
    "latent attention": ({"model": config("deepseek_v3", False) | LATENTS}, {"checkpointed_blocks": 1}),
    "sinks, experts with biases": ({"model": config("gpt_oss", False) | SINKS}, {"checkpointed_blocks": 1}),
    "gated delta rule, experts, bf16 on fp32 parameters": (
        {"model": DELTA_EXPERTS} | HALF,
        {"reshard_after_forward": False},
    ),
    "short convolutions": ({"model": SHORT_CONV}, {"checkpointed_blocks": 2}),
    "Mamba-2, experts": ({"model": MAMBA_EXPERTS}, {"checkpointed_blocks": 1}),
    "Mamba-2, bf16 on bf16 parameters": (
        {"model": config("granitemoehybrid", False) | MAMBA | {"num_local_experts": 0}, "param_dtype": "bfloat16"}
        | HALF,
        {},
    ),
    "selective checkpointing": ({"model": config("llama", False), "steps": 2}, SELECTIVE),
    "compiled, selective checkpointing": (
        {"model": config("llama", False), "steps": 2},
        SELECTIVE | {"compiled": True},
    ),
    "keys that other layers read, per-layer embeddings": (
        {"model": KEYS_READ_LATER, "steps": 4},  # after which its loss is lower
        {"checkpointed_blocks": 3},
    ),
    "fp32 LoRA on bf16 experts": (
        {"model": config("mixtral", False), "lora": "float32"} | HALF,
        {"checkpointed_blocks": 1},
    ),
    "fp32 LoRA and embedding on a bf16 base": (
        {"model": config("llama", False), "lora": "float32", "saved": ["embed_tokens", "lm_head", "norm"]} | HALF,
        {},
    ),
    "fp32 LoRA and a tied embedding on a bf16 base": (
        {"model": config("qwen2", True), "lora": "float32", "saved": ["lm_head"]} | HALF,
        {"checkpointed_blocks": 1},
    ),
}


def test_two_ranks_train_like_one_process(launcher, tmp_path, on_cpu):
    """One process computes the micro-batches of both ranks in turn. A sum of two numbers does not depend on order."""
    shared = [common | only | {"accumulate": 1, "batch_size": 2} for common, only in RUNS.values()]
    for (name, (common, _)), got in zip(RUNS.items(), forked(launcher, 2, tmp_path, shared), strict=True):
        alone = train(accumulate=2, batch_size=2, **common)
        assert alone["losses"][-1] < alone["losses"][0], name
        assert_same_run(got, alone, name)
        wide = {parameter for parameter, weight in got["weights"].items() if weight.dtype == torch.float32}
        if common.get("param_dtype") == "bfloat16":
            assert {parameter.rpartition(".")[2] for parameter in wide} == (
                {"A_log", "D"} if "Mamba" in name else set()
            )


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_a_quantised_base_trains_alike_sharded_replicated_and_in_one_process(model_type, launcher, tmp_path, on_cpu):
    """A rank has half of its bytes, or all."""
    model = config(model_type, False) | {"hidden_size": 64, "intermediate_size": 64}
    targets = ["all-linear", "experts"] if model_type == "mixtral" else ["all-linear"]
    common = {"model": model, "quantised": "nf4", "lora": "float32", "targets": targets} | HALF
    split = common | {"batch_size": 2, "accumulate": 1, "checkpointed_blocks": 1}
    sharded, replicated = forked(launcher, 2, tmp_path, [split, split | {"replicate_quantised": True}])
    assert sharded["losses"] == replicated["losses"] and sharded["norms"] == replicated["norms"]
    assert all(torch.equal(sharded["weights"][name], value) for name, value in replicated["weights"].items())
    alone = train(accumulate=2, batch_size=2, **common)
    assert alone["losses"][-1] < alone["losses"][0]
    assert_same_run(replicated, alone)
    assert alone["quantised bytes"] == replicated["quantised bytes"] == 2 * sharded["quantised bytes"] > 0


@pytest.mark.parametrize("name", [name for name, architecture in ARCHITECTURES.items() if "tiny" in architecture.SIZES])
def test_no_block_returns_a_view_because_fsdp_would_warn_about_it_on_every_rank(name):
    model = ligermodels.create(name, size="tiny")
    views = []
    for block in model.model.layers:
        block.register_forward_hook(lambda _, inputs, out: views.extend(x._is_view() for x in out[:2] if x is not None))
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert len(views) >= len(model.model.layers) and not any(views)


def test_four_ranks_with_two_replicas_train_like_one_process(launcher, tmp_path, on_cpu):
    model = config("llama", tied=False)
    alone = train(model, batch_size=8)
    settings = {"model": model, "batch_size": 1, "accumulate": 2, "dp_replicate": 2}
    assert_same_run(forked(launcher, 4, tmp_path, [settings])[0], alone)


def train_by_kernels(rank, environments, output, runs):
    os.environ |= environments[rank]
    launch.interpreting = True
    worker.main(output, runs)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_two_ranks_with_fused_autograd_nodes_train_like_one_process_without_them(tmp_path, on_cpu):
    """The ranks are forked from this process, whose kernels are those of the interpreter."""
    model = {"model": config("llama", tied=False), "steps": 2}
    runs = {"in full": model, "LoRA": model | {"lora": "float32"}}
    _store, environments = rank_environments(2)
    arguments = environments, tmp_path / "r.pt", [{"batch_size": 1} | settings for settings in runs.values()]
    start_processes(train_by_kernels, arguments, nprocs=2, start_method="fork")
    for (name, settings), got in zip(runs.items(), torch.load(tmp_path / "r.pt"), strict=True):
        alone = train(batch_size=2, **settings)
        assert min(alone["norms"]) > 1e-3
        assert_same_run(got, alone, name, atol=1e-3)  # a twentieth of the change of a weight in two steps


@pytest.mark.parametrize("checkpointed_blocks", [0, 1])
def test_gradient_accumulation_and_activation_checkpointing_change_nothing_with_uneven_masks(
    checkpointed_blocks, on_cpu
):
    model = config("qwen2", tied=True)
    accumulated = train(model, batch_size=1, accumulate=4, checkpointed_blocks=checkpointed_blocks)
    assert_same_run(accumulated, train(model, batch_size=4))


@pytest.mark.parametrize(
    "raw", [config("llama", False), DELTA_EXPERTS, MAMBA_EXPERTS], ids=lambda raw: raw["model_type"]
)
def test_one_process_computes_in_bf16_with_fp32_parameters(raw, on_cpu):
    """Its first gradients are those of parameters rounded to bf16, stored in fp32; some are not rounded, as A_log."""
    model = ligermodels.create(raw, device="meta")
    estimate = training_memory(model, 1, 32, torch.bfloat16)
    fsdp.shard(model, World(CPU), torch.bfloat16)
    assert training_memory(model, 1, 32, torch.bfloat16) == estimate  # an out-of-memory error estimates again
    model.to_empty(device="cpu")
    model.initialize(1)
    rounded = ligermodels.create(raw, device="cpu")
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
    ("param_dtype", "lora", "compute_dtype", "reduce_dtype"),
    [
        ("float32", None, "bfloat16", "float32"),
        ("bfloat16", None, "bfloat16", "bfloat16"),
        ("bfloat16", None, "float32", "float32"),
        ("bfloat16", "float32", "bfloat16", "float32"),
    ],
)
def test_gradients_are_reduced_in_the_wider_of_compute_and_parameter_dtype(
    param_dtype, lora, compute_dtype, reduce_dtype
):
    model = ligermodels.create(config("llama", False), dtype=getattr(torch, param_dtype), device="meta")
    if lora:
        ligermodels.add_lora(model, rank=2, dtype=getattr(torch, lora))
    policy = fsdp.mixed_precision(model, getattr(torch, compute_dtype))
    assert (policy.param_dtype, policy.reduce_dtype) == (getattr(torch, compute_dtype), getattr(torch, reduce_dtype))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(5, 4)
        self.model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.lm_head = nn.Linear(4, 5, bias=False)

    @property
    def blocks(self):
        return list(self.model.layers)

    def replicated_parameters(self):
        return []


def test_weights_tied_across_blocks_are_rejected_and_a_tied_head_is_allowed():
    model = Blocks()
    model.lm_head.weight = model.model.embed_tokens.weight
    fsdp.check_no_ties_between_units(model)
    model.model.layers[1].weight = model.model.layers[0].weight
    with pytest.raises(InputError, match=r"layers\.1\.weight is tied to model\.layers\.0\.weight"):
        fsdp.check_no_ties_between_units(model)


def test_a_dp_replicate_that_does_not_divide_the_ranks_is_rejected_with_advice():
    assert fsdp.dp_shard_size(World(CPU, 0, 6), 3) == 2
    with pytest.raises(InputError) as error:
        fsdp.dp_shard_size(World(CPU), 2)
    assert str(error.value) == (
        "--dp-replicate 2 does not divide the number of ranks, 1: lower it, or start a multiple of 2 ranks, such as "
        "torchrun --nproc-per-node 2"
    )


def test_without_torchrun_nothing_is_summed_or_sharded():
    model, x = Blocks(), torch.tensor(3.0)
    fsdp.shard(model, World(CPU), torch.float32)
    assert fsdp.fsdp_modules(model) == []
    assert distributed.total(x) == 3.0 and distributed.total(x) is not x


HSDP = ["--steps", 3, "--batch-size", 8, "--sequence-length", 64, "--checkpoint-every", 2]


def test_two_hosts_meet_and_share_the_folder_of_a_run(launcher):
    """As docs/clusters.md starts them: each torchrun is a host, which keeps a replica of the model on one rank."""
    folder = launcher.folder
    with socket.create_server(("localhost", 0)) as free:
        endpoint = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint", endpoint, "--local-addr=localhost", ROOT / "train.py"]
    command += ["--model", "qwen2", "--data", "own.txt", *HSDP, "--dp-replicate", 2, "--output", "two-hosts"]
    command = [str(word) for word in command]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "XDG_CACHE_HOME": str(folder)}
    environment |= {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    hosts = [
        subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    said = [host.communicate(timeout=TIMEOUT) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    assert sorted(file.name for file in (folder / "two-hosts/checkpoints/step-000002").glob("rank-*")) == [
        f"rank-{rank:05}.safetensors" for rank in range(2)
    ]
    resume = json.loads((folder / "two-hosts/run.json").read_text())["resume"]
    assert resume == shlex.join(["torchrun", *command[3:10], "--resume", "two-hosts"])
    launcher.succeed("--model", "qwen2", "--data", "own.txt", *HSDP, "--output", "alone")
    torch.testing.assert_close(losses(folder / "two-hosts"), losses(folder / "alone"), rtol=1e-5, atol=0)
