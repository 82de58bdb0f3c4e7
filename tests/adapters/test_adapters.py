"""LoRA adapters and PEFT: each reads the adapters of the other, and the logits are the same."""

import json
import warnings

import peft
import pytest
import torch
import torch.multiprocessing
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.errors import CheckpointError, InputError
from ligermodels.layers.lora import initialize_lora, lora_modules
from tests.cases import CASES
from tests.layers.adapters import adapt
from tests.reference_model import reference_model, save_reference, tokens
from tests.test_round_trip import FAMILIES, bits, parameters_equal, reread, weights
from tests.vision.batches import GRIDS, batch_of, for_reference

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
LLAMA = CASES[FAMILIES["llama"]] | {"num_hidden_layers": 2, "tie_word_embeddings": True}


def logits(model, raw):
    return model.eval()(tokens(raw)).logits


def read_by_peft(raw, folder):
    """The reference model with the adapter, read by PEFT. A warning, such as for missing keys, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return peft.PeftModel.from_pretrained(reference_model(raw), folder)


def written_by_peft(raw, folder, **settings):
    """Writes a random adapter with PEFT; returns the reference model that has it."""
    model = peft.get_peft_model(reference_model(raw), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PEFT warns because there is no folder of the base model
        model.save_pretrained(folder)
    return model


def adapter_config(folder):
    return json.loads((folder / CONFIG).read_text())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a model."""
    folder = tmp_path_factory.mktemp("base")
    save_reference(LLAMA, folder)
    return folder


LATENT = ("deepseek_v3", "glm4_moe_lite")
DELTA_AND_ATTENTION = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "granitemoehybrid", "gpt_oss")


@pytest.mark.parametrize(
    ("family", "targets"),
    # PEFT 0.21 gives the experts of these adapters too, if dense layers or shared experts have projections of the same
    # names.
    [(family, "all-linear") for family in FAMILIES if family not in ("glm4_moe", "qwen3_next", *LATENT)]
    + [("qwen3_next", DELTA_AND_ATTENTION)]
    + [(family, ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]) for family in LATENT]
    + [(family, ["all-linear", "experts"]) for family in WITH_EXPERTS],
)
def test_peft_and_the_merged_export_give_the_logits_of_our_adapter(family, targets, tmp_path):
    raw = CASES[FAMILIES[family]]
    save_reference(raw, tmp_path / "in")
    model = adapt(ligermodels.load(tmp_path / "in"), targets=targets)
    unchanged = [parameter.clone() for parameter in model.parameters()]
    expected, other = logits(model, raw), ligermodels.load(tmp_path / "in")
    assert (expected - logits(other, raw)).abs().max() > 1e-2

    ligermodels.export_adapter(model, tmp_path / "adapter")
    # Logits reach 13; merged weights are rounded.
    torch.testing.assert_close(logits(read_by_peft(raw, tmp_path / "adapter"), raw), expected, rtol=1e-4, atol=1e-3)
    ligermodels.load_adapter(other, tmp_path / "adapter")
    assert parameters_equal(other, model) and torch.equal(logits(other, raw), expected)

    ligermodels.export(model, tmp_path / "merged")
    assert all(map(torch.equal, model.parameters(), unchanged))
    assert bits(tmp_path / "merged").keys() == bits(tmp_path / "in").keys()
    torch.testing.assert_close(logits(reread(tmp_path / "merged"), raw), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("targets", [["vision"], ["all-linear", "vision"]], ids="-".join)
@pytest.mark.parametrize("name", ["qwen2_vl", "llava"])
def test_peft_gives_the_logits_of_an_adapter_of_the_tower(name, targets, tmp_path):
    """And has as many adapted modules: the reference has no other module that fits."""
    save_reference(CASES[name], tmp_path / "in")
    model = adapt(ligermodels.load(tmp_path / "in"), targets=targets).eval()
    batch = batch_of(name, [[2, GRIDS[1], 3]])
    ligermodels.export_adapter(model, tmp_path / "adapter")
    theirs = read_by_peft(CASES[name], tmp_path / "adapter").eval()
    with torch.no_grad():
        expected, unadapted = (m(**batch).logits for m in (model, ligermodels.load(tmp_path / "in").eval()))
        found = theirs(**for_reference(name, batch)).logits
    assert (expected - unadapted).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    stored = load_file(tmp_path / "adapter" / TENSORS)
    assert len(stored) == sum("lora_" in key for key, _ in theirs.named_parameters())


Q_PROJ = "model.layers.1.self_attn.q_proj"
VARIANTS = {
    "all-linear": (LLAMA, {"target_modules": "all-linear", "r": 3, "lora_alpha": 5}),
    "two of three packed": (LLAMA, {"target_modules": ["q_proj", "v_proj"], "r": 4}),
    "rank-stabilised": (LLAMA, {"target_modules": ["k_proj", "up_proj"], "r": 3, "use_rslora": True}),
    "gaussian": (LLAMA, {"target_modules": ["o_proj"], "init_lora_weights": "gaussian"}),
    "a pattern": (LLAMA, {"target_modules": r".*\.1\.self_attn\.[qk]_proj"}),
    "one layer": (LLAMA, {"target_modules": ["down_proj", "q_proj"], "layers_to_transform": [1]}),
    "all but": (LLAMA, {"target_modules": ["down_proj", "q_proj"], "exclude_modules": ["0.self_attn.q_proj"]}),
    "ranks and alphas": (
        LLAMA,
        {
            "target_modules": ["q_proj", "o_proj", "down_proj"],
            "r": 4,
            "rank_pattern": {"down_proj": 2, "^" + Q_PROJ: 5},
            "alpha_pattern": {Q_PROJ: 3, "q_proj": 7},
            "use_rslora": True,
        },
    ),
    "stored packed": (CASES[FAMILIES["phi3"]], {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "mlp stored packed": (CASES[FAMILIES["glm"]], {"target_modules": ["q_proj", "gate_up_proj"]}),
    "below language_model": (
        CASES[FAMILIES["gemma3"]],
        {"target_modules": r".*language_model.*\.(q_proj|down_proj)", "rank_pattern": {"down_proj": 2}},
    ),
    "routed experts": (
        CASES[FAMILIES["qwen3_moe"]],
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "r": 3,
        },
    ),
    "routed experts alone": (
        CASES[FAMILIES["mixtral"]],
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "r": 3},
    ),
    "shared expert": (CASES[FAMILIES["qwen2_moe"]], {"target_modules": ["v_proj", "shared_expert.up_proj"]}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_written_by_peft_gives_the_same_logits_and_is_exported_unchanged(variant, tmp_path):
    raw, settings = VARIANTS[variant]
    save_reference(raw, tmp_path / "in")
    theirs = written_by_peft(raw, tmp_path / "adapter", **settings)
    model = ligermodels.load(tmp_path / "in")
    before = logits(model, raw)
    ligermodels.load_adapter(model, tmp_path / "adapter")
    expected = logits(theirs, raw)
    assert (expected - before).abs().max() > 1e-2
    torch.testing.assert_close(logits(model, raw), expected, rtol=1e-4, atol=1e-4)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }

    ligermodels.export_adapter(model, tmp_path / "again")
    torch.testing.assert_close(logits(read_by_peft(raw, tmp_path / "again"), raw), expected, rtol=1e-4, atol=1e-4)
    stored, again = (load_file(tmp_path / folder / TENSORS) for folder in ("adapter", "again"))
    if variant != "below language_model":  # PEFT stores it under the in-memory names of transformers 5
        assert stored.keys() == again.keys()
    assert sorted(x.sum().item() for x in stored.values()) == sorted(x.sum().item() for x in again.values())


def test_the_configuration_has_the_fields_of_peft_and_names_the_base_model(base, tmp_path):
    model = ligermodels.load(base)
    ligermodels.add_lora(model, rank=4, alpha=6.0, dropout=0.25, targets=("v_proj", "down_proj"))
    model.source = tmp_path / "hub" / "models--meta-llama--Llama-2" / "snapshots" / "0a1b"
    ligermodels.export_adapter(model, tmp_path / "out")
    config = adapter_config(tmp_path / "out")
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "meta-llama/Llama-2",
        "r": 4,
        "lora_alpha": 6,
        "lora_dropout": 0.25,
        "bias": "none",
        "target_modules": ["down_proj", "v_proj"],
    }
    assert expected.items() <= config.items() and isinstance(config["lora_alpha"], int)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {CONFIG, TENSORS}
    read = peft.PeftConfig.from_pretrained(tmp_path / "out")
    assert (read.r, read.lora_alpha, read.lora_dropout, read.target_modules) == (4, 6, 0.25, {"down_proj", "v_proj"})


def test_a_merged_weight_is_rounded_once(base, tmp_path):
    """Compared with W + alpha / r B A in float64, for every projection of a bf16 model."""
    model = adapt(ligermodels.load(base, dtype=torch.bfloat16), dtype=torch.float32)
    ligermodels.export(model, tmp_path / "out")
    ligermodels.export_adapter(model, tmp_path / "adapter")
    old, new, adapter = weights(base), weights(tmp_path / "out"), load_file(tmp_path / "adapter" / TENSORS)
    scale = adapter_config(tmp_path / "adapter")["lora_alpha"] / 4
    changed = 0
    for name, weight in new.items():
        exact = old[name].bfloat16().double()
        a, b = (adapter.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight") for x in "AB")
        if a is not None:
            exact = exact + scale * b.double() @ a.double()
            changed += 1
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, exact.bfloat16()), name
    assert changed == 2 * 7


def test_exporting_a_merged_model_does_not_change_the_model(base, tmp_path):
    for dtype in (torch.float64, torch.float16):
        model = adapt(ligermodels.load(base, dtype=dtype))
        unchanged = [parameter.clone() for parameter in model.parameters()]
        ligermodels.export(model, tmp_path / str(dtype))
        assert all(map(torch.equal, model.parameters(), unchanged))


def test_an_adapter_keeps_its_dtype_and_the_model_its_mode(base, tmp_path):
    model = adapt(ligermodels.load(base, dtype=torch.bfloat16), dtype=torch.float32, dropout=0.5)
    assert not any(layer.dropout_active for layer in lora_modules(model))  # a loaded model is in evaluation mode
    ligermodels.export_adapter(model, tmp_path / "adapter")
    other = ligermodels.load(base, dtype=torch.bfloat16)
    ligermodels.load_adapter(other, tmp_path / "adapter")
    assert parameters_equal(model, other)
    assert {layer.lora_A.dtype for layer in lora_modules(other)} == {torch.float32}
    assert {layer.dropout for layer in lora_modules(other)} == {0.5} and not any(
        layer.dropout_active for layer in lora_modules(other)
    )


def change_config(folder, **fields):
    (folder / CONFIG).write_text(json.dumps(adapter_config(folder) | fields))


def change_tensors(folder, change):
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)


Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
EXPERT = "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora is True; is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"1 missing: base_model\.model\.lm_head\.weight"),
        ({"modules_to_save": ["k_proj"]}, "modules_to_save: 'k_proj' is neither the embedding nor the head nor a norm"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head'; must be a list of names"),
        ({"bias": "all"}, "bias is 'all'; must be 'none'"),
        ({"unknown_field": 3}, "unknown_field is 3; is not supported"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; must be 'LORA'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'; it changes the base"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'; must be true or false"),
        ({"lora_dropout": 1.0}, "lora_dropout is 1.0; must be"),
        ({"r": "4"}, "r is '4'; must be"),
        ({"lora_alpha": True}, "lora_alpha is True; must be"),
        ({"r": 2.5}, r"r is 2\.5; must be a whole number above zero"),
        ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern is .*; its values must be whole numbers above zero"),
        ({"lora_alpha": 1e308, "use_rslora": True}, "lora_alpha gives .*q_proj a scale that is not finite in float32"),
        ({"lora_alpha": 1e300}, "lora_alpha gives .*q_proj a scale that is not finite in float32"),
        ({"alpha_pattern": {"(a+)+$": 4}}, "alpha_pattern is .*patterns are not supported"),
        ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern is .*must be numbers above zero"),
        ({"alpha_pattern": {"q_proj": 3}}, "must give the same values to .*q_proj, .*k_proj, .*v_proj:"),
        ({"target_modules": None}, "target_modules is None; must be"),
        ({"r": 5}, r"28 of the wrong shape: .*q_proj\.lora_A\.weight is \[4, 48\] instead of \[5, 48\]"),
    ],
)
def test_an_unsupported_setting_of_an_adapter_is_refused_by_name(base, tmp_path, fields, message):
    model = ligermodels.load(base)
    ligermodels.export_adapter(adapt(ligermodels.load(base)), tmp_path / "adapter")
    change_config(tmp_path / "adapter", **fields)
    with pytest.raises(CheckpointError, match=message) as caught:
        ligermodels.load_adapter(model, tmp_path / "adapter")
    assert str(tmp_path / "adapter") in str(caught.value) and "\n" not in str(caught.value)
    assert not any(lora_modules(model)) and all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop(Q_A), f"1 missing: {Q_A}"),
        (lambda x: [x.pop(name) for name in list(x) if "layers.1.self_attn.v_proj" in name], "2 missing: .*layers.1"),
        (
            lambda x: x.update({Q_A: x[Q_A][:, 1:].clone()}),
            r"1 of the wrong shape: .*q_proj.* \[4, 47\] instead of \[4, 48\]",
        ),
        (lambda x: x.update({Q_A: x[Q_A].int()}), "1 not floating point: .*q_proj.*int32"),
        (
            lambda x: x.update({EXPERT: x[Q_A].clone()}),
            f"1 neither of a projection .*: {EXPERT}",
        ),
        (
            lambda x: x.update({"base_model.model.lm_head.weight": x[Q_A].clone()}),
            "1 neither of a projection .*lm_head",
        ),
        (lambda x: x.clear(), "14 missing|28 missing"),
    ],
)
def test_an_error_names_all_tensors_that_do_not_fit(base, tmp_path, change, message):
    model = ligermodels.load(base)
    ligermodels.export_adapter(adapt(ligermodels.load(base)), tmp_path / "adapter")
    change_tensors(tmp_path / "adapter", change)
    with pytest.raises(CheckpointError, match=message) as caught:
        ligermodels.load_adapter(model, tmp_path / "adapter")
    assert str(tmp_path / "adapter" / TENSORS) in str(caught.value)
    assert not any(lora_modules(model))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_with_a_value_that_is_not_finite_is_refused(base, tmp_path, value):
    ligermodels.export_adapter(adapt(ligermodels.load(base)), tmp_path / "adapter")
    change_tensors(tmp_path / "adapter", lambda x: x[Q_A][1, 3:4].fill_(value))
    with pytest.raises(CheckpointError, match=f"tensor {Q_A} has values that are not finite in float"):
        ligermodels.load_adapter(ligermodels.load(base), tmp_path / "adapter")


def test_a_pickled_adapter_is_not_read(base, tmp_path):
    ligermodels.export_adapter(adapt(ligermodels.load(base)), tmp_path / "adapter")
    (tmp_path / "adapter" / TENSORS).rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin: pickles can run code and are not read; save it as"):
        ligermodels.load_adapter(ligermodels.load(base), tmp_path / "adapter")


def test_a_model_with_lora_accepts_only_an_adapter_with_the_same_settings(base, tmp_path):
    model = adapt(ligermodels.load(base))
    ligermodels.export_adapter(model, tmp_path / "adapter")
    same, other = ligermodels.load(base), ligermodels.load(base)
    ligermodels.add_lora(same, rank=4, alpha=6.0, dropout=0.1)
    ligermodels.load_adapter(same, tmp_path / "adapter")
    assert parameters_equal(same, model) and {layer.dropout for layer in lora_modules(same)} == {0.1}
    ligermodels.add_lora(other, rank=4, alpha=7.0)
    with pytest.raises(
        CheckpointError, match=r"already has different LoRA: on model\.layers\.0\.mlp\.down_proj.* 1\.75"
    ):
        ligermodels.load_adapter(other, tmp_path / "adapter")


def test_exporting_without_lora_and_loading_on_the_meta_device_are_errors(base, tmp_path):
    with pytest.raises(InputError, match="no LoRA to export"):
        ligermodels.export_adapter(ligermodels.load(base), tmp_path / "out")
    ligermodels.export_adapter(adapt(ligermodels.load(base)), tmp_path / "out")
    with pytest.raises(ValueError, match="meta device"):
        ligermodels.load_adapter(ligermodels.create(LLAMA, device="meta"), tmp_path / "out")


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_ranks_write_the_same_files_as_one_process_and_both_raise_errors(base, launcher, tmp_path):
    model, new = adapt(ligermodels.load(base)), ligermodels.load(base)
    ligermodels.export_adapter(model, tmp_path / "adapter")
    ligermodels.export(model, tmp_path / "merged", dtype=torch.bfloat16, max_shard_size="20KB")
    ligermodels.add_lora(new, rank=4, alpha=6.0)
    initialize_lora(new, torch.Generator().manual_seed(1))
    ligermodels.export_adapter(new, tmp_path / "new-alone")
    (tmp_path / "file").touch()
    launcher.succeed(base, tmp_path, ranks=2, module="tests.adapters.sharded_adapters")

    assert bits(tmp_path / "base-2") == bits(base)
    assert files(tmp_path / "new") == files(tmp_path / "new-alone")
    assert files(tmp_path / "adapter-2") == files(tmp_path / "adapter")
    assert files(tmp_path / "merged-2") == files(tmp_path / "merged")
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    for name, message in {
        "adapter": "exists and is not an empty folder",
        "below-a-file": "not written: Not a directory",
        "too-large": "holds values larger than torch.float16's largest",
    }.items():
        messages = {(tmp_path / f"{rank}-{name}").read_text() for rank in (0, 1)}
        assert len(messages) == 1 and message in messages.pop()
    assert not (tmp_path / "too-large").exists() and not list(tmp_path.glob("*.tmp-*"))
