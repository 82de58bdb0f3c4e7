"""QLoRA runs: of every kind they take the steps that they would take on the dequantised weights, to the bit."""

import itertools
import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.aliases import flag_of
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.layers.moe import QuantisedExperts
from ligermodels.layers.quantised import QuantisedLinear
from ligermodels.memory.model import count_parameters, training_memory
from ligermodels.training import TrainConfig, plan, train
from ligermodels.training.planning.contradictions import refuse_contradictions
from ligermodels.training.preparing import prepare
from ligermodels.training.settings.settings import config_of_run
from ligermodels.units import memory_size
from ligermodels.weights.module import named_weights
from tests.layers.test_quantised_formats import BLOCKS, changed, in_fp8, in_mxfp4
from tests.suites import quick
from tests.training.launching import losses as losses_of
from tests.training.small_models import save_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TEXTS = [f"The number {n} is followed by {n + 1}, and {2 * n} is its double." for n in range(60)]
LORA = {"lora_rank": 4, "steps": 2, "warmup": 0, "learning_rate": 1e-2, "eval_every": 9, "no_export": True}


EXPERTS = {
    "model_type": "qwen3_moe", "hidden_size": 64, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The base; `nf4`, the same as a checkpoint of bitsandbytes; `dense`, its dequantised weights."""
    path = tmp_path_factory.mktemp("runs")
    (path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    pairs = [{"prompt": f"{n} plus {n} is", "chosen": f" {2 * n}.", "rejected": f" {2 * n}? No."} for n in range(60)]
    (path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": pair["prompt"]}) for pair in pairs))
    (path / "rewards.py").write_text("def even(completion_ids, **columns):\n"
        "    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]\n")  # fmt: skip
    save_model(path / "base", TEXTS, hidden_size=64, intermediate_size=128)
    save_model(path / "experts", TEXTS, **EXPERTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ligermodels.load(path / "base", quantize="nf4")
        ligermodels.export(model, path / "nf4")
        ligermodels.export(model, path / "dense", dtype="float32")
    return path


@pytest.fixture(autouse=True)
def here(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def objectives(folder):
    pairs = {"data": (str(folder / "pairs.jsonl"),), "max_length": 64, "pairs": 8}
    return {
        "sft": {"data": (str(folder / "texts.jsonl"),), "sequence_length": 64, "batch_size": 4},
        "dpo": {"objective": "dpo", **pairs},
        "dpo, a model as reference": {"objective": "dpo", "reference": "model", **pairs},
        "grpo": {
            "objective": "grpo", "data": (str(folder / "prompts.jsonl"),), "prompts": 2, "generations": 4,
            "max_completion_length": 8, "beta": 0.1, "reward": (f"{folder / 'rewards.py'}:even",),
        },
    }  # fmt: skip


def losses(**settings):
    result = train(TrainConfig(**(LORA | settings)))
    return result.model, [record["loss"] for record in result.metrics if "loss" in record]


@pytest.mark.parametrize("name", quick(["sft", "dpo", "dpo, a model as reference", "grpo"], ["sft", "grpo"]))
def test_a_run_on_a_quantised_base_is_that_on_its_dequantised_weights(folder, name):
    settings = objectives(folder)[name]
    model, found = losses(model=str(folder / "base"), quantize="nf4", output="quantised", **settings)
    assert sum(isinstance(module, QuantisedLinear) for module in model.modules()) == 8
    assert len(found) == 2 and found[0] != found[1]
    assert found == losses(model=str(folder / "dense"), output="dense", **settings)[1]


def test_lora_trains_on_routed_experts_in_4_bits(folder):
    """Of a checkpoint that is quantised while it is read, stored in 4 bits, or has the dequantised weights."""
    settings = objectives(folder)["sft"] | {"lora_targets": ("all-linear", "experts"), "lora_export": "adapter"}
    base = folder / "experts"
    model = ligermodels.load(base, quantize="nf4")
    ligermodels.export(model, "nf4")
    with pytest.warns(UserWarning, match="dequantised"):
        ligermodels.export(model, "dense", dtype="float32")
    trained, found = losses(model=str(base), quantize="nf4", output="quantised", **settings)
    experts = trained.model.layers[0].mlp.experts
    assert isinstance(experts.base_layer, QuantisedExperts) and experts.down_proj.lora_B.abs().max() > 0
    assert found[0] != found[1]
    assert losses(model="dense", output="of dense", **settings)[1] == found
    assert losses(model="nf4", output="of stored", **settings)[1] == found


def test_a_base_that_is_stored_in_4_bits_needs_no_flag(folder):
    settings = objectives(folder)["sft"]
    expected = losses(model=str(folder / "base"), quantize="nf4", output="quantised", **settings)[1]
    assert losses(model=str(folder / "nf4"), output="stored", **settings)[1] == expected


LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128}


@pytest.mark.parametrize(
    ("scheme", "tied"), quick(itertools.product(["nf4", "fp8"], [False, True]), [("nf4", False), ("fp8", True)])
)
def test_all_weights_that_are_not_quantised_are_trained_as_a_whole(scheme, tied, folder):
    """Of a base that is quantised while it is read, that is stored so, and that has the dequantised weights."""
    base = save_model(Path("base"), TEXTS, **LLAMA, tie_word_embeddings=tied)
    model = ligermodels.load(base, quantize=scheme)
    ligermodels.export(model, "stored")
    with pytest.warns(UserWarning, match="dequantised"):
        ligermodels.export(model, "dense", dtype="float32")
    saved = ("embed_tokens", "norm") if tied else ("embed_tokens", "lm_head", "norm")
    settings = objectives(folder)["sft"] | {"modules_to_save": saved}
    trained, found = losses(model=str(base), quantize=scheme, output="quantised", **settings)
    assert trained.dtype == torch.float32 and trained.model.norm.weight.requires_grad
    assert losses(model="stored", quantize=scheme, output="of stored", **settings)[1] == found
    assert losses(model="dense", output="of dense", **settings)[1] == found


def test_a_base_of_which_some_tensors_are_not_quantised_trains_as_its_dequantised_weights(folder):
    mixed, q = Path(shutil.copytree(folder / "nf4", "mixed")), "model.layers.1.self_attn.q_proj.weight"
    tensors = load_file(mixed / "model.safetensors")
    of_q = [name for name in tensors if name.startswith(f"{q}.")]
    tensors[q] = load_file(folder / "dense" / "model.safetensors")[q]
    save_file({name: tensor for name, tensor in tensors.items() if name not in of_q}, mixed / "model.safetensors")
    settings = objectives(folder)["sft"]
    model, found = losses(model=str(mixed), output="of mixed", **settings)
    assert found == losses(model=str(folder / "nf4"), output="of nf4", **settings)[1]
    first, second = (layer.self_attn.qkv_proj.base_layer.weight for layer in model.model.layers)
    assert second.nbytes - first.nbytes > 3 * 64 * 64  # q_proj [64, 64] in fp32 instead of about half a byte each


def test_a_run_on_a_quantised_base_resumes_to_the_bit(folder):
    given = LORA | objectives(folder)["sft"] | {"checkpoint_every": 1, "output": "whole"}
    whole = train(TrainConfig(model=str(folder / "base"), quantize="nf4", **given))
    killed = shutil.copytree(whole.folder, "killed")
    shutil.rmtree(Path(killed, "checkpoints", "step-000002"))
    resumed = train(config_of_run(Path(killed)))
    expected, got = (dict(result.model.named_parameters()) for result in (whole, resumed))
    assert expected.keys() == got.keys() and all(torch.equal(expected[name], got[name]) for name in got)


def test_the_run_ends_with_an_adapter_that_the_base_takes(folder):
    given = LORA | objectives(folder)["sft"] | {"no_export": False, "lora_export": "adapter", "output": "run"}
    result = train(TrainConfig(model=str(folder / "base"), quantize="nf4", **given))
    again = ligermodels.load(folder / "base", quantize="nf4")
    ligermodels.load_adapter(again, result.exported)
    ids = torch.arange(7)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, result.model.eval()(ids).logits)
    assert ligermodels.generate(again, [[1, 2, 3]], max_new_tokens=4, temperature=0.0) == ligermodels.generate(
        result.model, [[1, 2, 3]], max_new_tokens=4, temperature=0.0
    )


SINKS = {
    "model_type": "gpt_oss", "hidden_size": 64, "head_dim": 16, "intermediate_size": 64, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
MXFP4 = in_mxfp4, {"quant_method": "mxfp4"}
FP8 = in_fp8(torch.bfloat16, ending="mlp.down_proj.weight"), BLOCKS


@pytest.mark.parametrize(("scheme", "fields", "format"), [("mxfp4", SINKS, MXFP4), ("fp8", LLAMA, FP8)])
def test_the_run_writes_untrained_weights_as_they_are_stored(scheme, fields, format, folder):
    """LoRA on one attention projection, merged, changes it alone, and config.json not at all."""
    base = save_model(Path("base"), TEXTS, **fields, dtype=torch.bfloat16)
    bits = changed(base, Path("bits"), *format)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, bits / name)
    given = LORA | objectives(folder)["sft"] | {"no_export": False, "dtype": "bfloat16", "lora_targets": ("q_proj",)}
    result = train(TrainConfig(model=str(bits), quantize=scheme, output="run", **given))
    got, before = (load_file(path / "model.safetensors") for path in (result.exported, bits))
    assert {name: x.dtype for name, x in got.items()} == {name: x.dtype for name, x in before.items()}
    merged = {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)}
    assert {name for name, x in got.items() if not torch.equal(x, before[name])} == merged
    configs = [json.loads((path / "config.json").read_text()) for path in (result.exported, bits)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"] == format[1]


def test_the_plan_counts_the_bytes_of_the_quantised_weights(folder):
    settings = LORA | objectives(folder)["sft"] | {"model": str(folder / "base"), "output": "run"}
    dense, quantised = (plan(TrainConfig(**settings, **more)) for more in ({}, {"quantize": "nf4"}))
    assert quantised.parameters == dense.parameters and quantised.flops == dense.flops
    model = ligermodels.load(folder / "base", quantize="nf4")
    linears = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    saved = sum(4 * linear.weight.numel() - linear.weight.nbytes for linear in linears)
    assert dense.memory.weights - quantised.memory.weights == saved
    largest = max(linear.weight.numel() for linear in linears)
    assert quantised.memory.block - dense.memory.block == 4 * largest
    again = training_memory(model.float(), 1, 8, torch.float32)
    assert again.gradients == 0 and again.weights == sum(parameter.nbytes for parameter in model.parameters())
    assert count_parameters(model) == count_parameters(ligermodels.load(folder / "base"))


def test_a_generation_gathers_what_is_sharded(folder):
    """Half of the bytes and all that are gathered, or each of them once."""
    config = TrainConfig(model=str(folder / "base"), quantize="nf4", **LORA | objectives(folder)["grpo"])
    run = prepare(config, World(torch.device("cpu"), 0, 2))
    sharded, replicated = (
        run.objective.phases(run.model, run.estimate(checkpointed_blocks=0, replicate_quantised=each))["generate"]
        for each in (False, True)
    )
    assert sharded - replicated == sum(p.nbytes for p in run.model.parameters() if p.dtype == torch.uint8) // 2 > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "qwen2"}, "--quantize nf4: qwen2 is a family with new weights"),
        ({"model": "a/b", "data": ("x",)}, "--quantize nf4: quantised weights cannot be trained in full; add --lora-"),
        ({"model": "a/b", "data": ("x",), "lora_rank": 4, "float8": True, "compile": True}, "--float8 multiplies"),
    ],
)  # fmt: skip
def test_what_cannot_be_quantised_is_refused_before_anything_is_read(settings, message):
    with pytest.raises(InputError, match=message):
        refuse_contradictions(TrainConfig(quantize="nf4", **settings))


def test_a_base_in_fp8_trains_as_its_dequantised_weights_and_as_a_checkpoint_in_fp8(folder):
    settings = objectives(folder)["sft"] | {"lora_targets": ("all-linear", "experts")}
    model = ligermodels.load(folder / "experts", quantize="fp8")
    ligermodels.export(model, "stored")
    with pytest.warns(UserWarning, match="dequantised"):
        ligermodels.export(model, "dense", dtype="float32")
    expected = losses(model="dense", output="of dense", **settings)[1]
    assert losses(model=str(folder / "experts"), quantize="fp8", output="quantised", **settings)[1] == expected
    trained, found = losses(model="stored", quantize="fp8", output="of stored", **settings)
    assert found == expected and isinstance(trained.model.layers[0].mlp.experts.base_layer, QuantisedExperts)
    planned = plan(TrainConfig(model="stored", quantize="fp8", output="planned", **(LORA | settings))).memory
    bits = sum(p.nbytes for p in model.parameters() if p.dtype == torch.uint8)
    dense = sum(w.numel() for w in named_weights(model).values() if not isinstance(w, torch.Tensor))
    without = plan(TrainConfig(model="stored", output="without", **(LORA | settings))).memory
    assert without.weights - planned.weights == 4 * dense - bits > 0.7 * 4 * dense


def test_what_a_checkpoint_does_not_have_in_mxfp4_is_refused(folder):
    settings = objectives(folder)["sft"] | LORA | {"model": str(folder / "base"), "quantize": "mxfp4"}
    with pytest.raises(InputError, match="quantize mxfp4: keeps what a checkpoint has in MXFP4"):
        plan(TrainConfig(**settings))


def test_routed_experts_in_4_bits_are_not_distributed(folder):
    settings = {"lora_rank": 4, "quantize": "nf4", "expert_parallel": 2} | objectives(folder)["sft"]
    with pytest.raises(InputError, match=r"^--expert-parallel 2: routed experts in few bits are not distributed"):
        prepare(TrainConfig(model=str(folder / "experts"), **settings), World(torch.device("cpu"), 0, 2))


def test_weights_that_are_stored_in_4_bits_are_not_trained_in_full(folder):
    settings = objectives(folder)["sft"]
    with pytest.raises(InputError, match=r"are stored in 4 bits, which cannot be trained in full: add --lora-rank 16"):
        plan(TrainConfig(model=str(folder / "nf4"), **settings))


def flags_of(settings):
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in settings.items()}
    return [text for name, given in values.items() for text in (flag_of(name), *map(str, given))]


def test_two_ranks_share_the_bytes_of_the_base_or_have_all_of_them(folder, launcher):
    """The plan says which; losses are those of one process. A run that resumes with the other choice is bit-exact."""
    base = save_model(launcher.folder / "six-layers", TEXTS, **EXPERTS, num_hidden_layers=6)
    settings = LORA | objectives(folder)["sft"] | {"model": str(base), "quantize": "nf4"}
    settings |= {"lora_targets": ("all-linear", "experts"), "no_export": False, "lora_export": "adapter"}
    expected = losses(output="one", **settings)[1]
    del settings["no_export"]
    flags = [*flags_of(settings), "--checkpoint-every", "1"]
    sharded = launcher.succeed(*flags, "--output", "sharded", ranks=2)
    whole = launcher.succeed(10**12, *flags, "--output", "whole", ranks=2, module="tests.training.train_with_memory")
    assert re.search(r"chosen: quantised weights, [\d.]+ KiB: sharded over 2 ranks\n", sharded.stdout)
    assert re.search(r"chosen: quantised weights, [\d.]+ KiB: whole on every rank, never gathered\n", whole.stdout)
    found = losses_of(launcher.folder / "sharded")
    assert found == pytest.approx(expected, rel=1e-5) and losses_of(launcher.folder / "whole") == found
    adapter = (launcher.folder / "sharded" / "adapter" / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(launcher.folder / "whole" / "checkpoints" / "step-000002")
    shutil.rmtree(launcher.folder / "whole" / "adapter")
    launcher.succeed("--resume", "whole", ranks=2)
    assert (launcher.folder / "whole" / "adapter" / "adapter_model.safetensors").read_bytes() == adapter


LOSSES = {"loss", "validation_loss"}
RUNS = [("sft", "experts"), ("dpo", "base"), ("grpo", "base")]


@pytest.mark.parametrize(("name", "base"), quick(RUNS, RUNS[:1]))
def test_offloaded_weights_change_no_bit_of_a_run_its_validations_and_its_export(name, base, folder):
    given = LORA | objectives(folder)[name] | {"model": str(folder / base), "quantize": "nf4"}
    given |= {"activation_checkpointing": "full", "eval_every": 1, "no_export": False}
    given |= {"lora_targets": ("all-linear", "experts")} if base == "experts" else {}
    with pytest.warns(UserWarning, match="dequantised"):
        usual = train(TrainConfig(**given, output="usual"))
        offloaded = train(TrainConfig(**given, offload=("weights",), output="offloaded"))
    assert [block.offloaded_weights is None for block in usual.model.blocks] == [True, True]
    held = offloaded.model.blocks[0].offloaded_weights[0]
    assert sorted(held.held) == [0, 1] and all(memory.any() for memory in held.on_host)
    runs = offloaded, usual
    found, expected = ([record[key] for record in run.metrics for key in LOSSES & record.keys()] for run in runs)
    assert found == expected and len(found) == 5 and len({*found}) > 2
    (a,), (b,) = (run.exported.glob("*.safetensors") for run in runs)
    assert a.read_bytes() == b.read_bytes()


def test_the_plan_counts_offloaded_weights_on_the_host_and_two_blocks_of_them_on_the_device(folder):
    given = LORA | objectives(folder)["sft"] | {"model": str(folder / "base"), "quantize": "nf4", "output": "run"}
    configs = (TrainConfig(**given, activation_checkpointing="full", offload=offload) for offload in ((), ("weights",)))
    usual, offloaded = (prepare(config, World(torch.device("cpu"))) for config in configs)
    memory, model = offloaded.plan.memory, offloaded.model
    model.offload_weights("cpu")
    held = model.blocks[0].offloaded_weights[0]
    assert memory.host == sum(map(len, held.on_host)) > 0 == usual.plan.memory.host
    on_device = sum(p.nbytes for name, p in model.named_parameters() if not name.endswith("_bytes"))
    assert memory.weights == on_device + held.buffers.nbytes == usual.plan.memory.weights
    assert f"{memory_size(memory.host)} of them quantised weights" in offloaded.plan.text()
