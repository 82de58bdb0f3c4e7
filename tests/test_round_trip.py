"""Loading and exporting preserves all bytes and fields, and the reference implementation reads the exported folder.

transformers 4 cannot be installed beside version 5. Its requirements are checked on the files: the tensor names, which
version 5 writes too, and the old config fields, from which alone ligermodels and transformers 5 must read the same
model.
"""

import itertools
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import ligermodels
from ligermodels.architectures import ARCHITECTURES
from ligermodels.errors import CheckpointError, InputError
from ligermodels.weights.exporting import export_weights
from ligermodels.weights.files import tensor_hashes
from ligermodels.weights.mapping import plan_pieces
from tests.cases import CASES
from tests.reference_model import auto_class, reference_model, save_reference, tokens
from tests.suites import few_of_each_switch, quick

FAMILIES = {raw["model_type"]: name for name, raw in reversed(CASES.items())}  # the first case of each model_type
# An export fills these if they are null.
MAY_BE_FILLED = ("rope_theta", "rope_scaling", "rope_local_base_freq")
# The file's rope_type, possibly with a former name; and what concerns images alone.
NOT_IN_OLD_ROPES = ("type", "mrope_section", "mrope_interleaved")
NEW_FIELDS = (
    "rope_parameters",
    "dtype",
    "num_local_experts",
)  # not known to transformers 4 in every family


def weights(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def bits(folder):
    """The tensors of a folder by their name, as raw bytes with dtype and shape."""
    return {
        name: (x.dtype, x.shape, x.contiguous().view(torch.uint8).numpy().tobytes())
        for name, x in weights(folder).items()
    }


def config(folder):
    return json.loads((folder / "config.json").read_text())


def reread(folder, dtype=torch.float32):
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=dtype, **eager)


def parameters_equal(model, other):
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    return all(name == same and torch.equal(a, b) for (name, a), (same, b) in pairs)


class Saved:
    """A case, the reference model, the folder where it is saved, and our model as loaded from there."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        self.reference = save_reference(CASES[name], folder)
        self.model = ligermodels.load(folder)


@pytest.fixture(scope="module", params=quick(few_of_each_switch(CASES), FAMILIES.values()))
def saved(request, tmp_path_factory):
    """Each case, for one test after the other; none changes it."""
    return Saved(request.param, tmp_path_factory.mktemp("saved"))


def test_an_export_equals_the_loaded_checkpoint(saved, tmp_path):
    ligermodels.export(saved.model, tmp_path / "out")

    assert tensor_hashes(tmp_path / "out") == tensor_hashes(saved.folder)
    assert bits(tmp_path / "out") == bits(saved.folder)
    assert includes(config(tmp_path / "out"), config(saved.folder))
    exported, original = map(read_by_version_5, (tmp_path / "out", saved.folder))
    assert includes(exported, original, may_be_filled=(*MAY_BE_FILLED, "dtype"))
    if saved.name in FAMILIES.values():  # in the other cases too, the same bytes and fields are the same model
        read, input_ids = reread(tmp_path / "out"), tokens(CASES[saved.name])
        assert parameters_equal(read, saved.reference)
        expected = saved.reference(input_ids).logits
        torch.testing.assert_close(read(input_ids).logits, expected)  # their memory alignment differs


def test_a_config_of_transformers_5_gives_the_same_model(saved, tmp_path):
    """save_pretrained writes rope_parameters, layer_types and dtype. An export adds the old fields, which alone give
    the same configuration; none to families that only transformers 5 has."""
    shutil.copytree(saved.folder, tmp_path / "new")
    saved.reference.config.save_pretrained(tmp_path / "new")
    new = config(tmp_path / "new")
    new_model, input_ids = ligermodels.load(tmp_path / "new"), tokens(CASES[saved.name])
    assert torch.equal(saved.model(input_ids).logits, new_model(input_ids).logits)

    ligermodels.export(new_model, tmp_path / "out")
    written = config(tmp_path / "out")
    assert includes(written, new)
    folders = [tmp_path / "new", tmp_path / "out"]
    if saved.name.startswith("gemma4"):
        assert not {"rope_theta", "rope_scaling"} & written.get("text_config", written).keys()
    else:
        folders.append(check_old_fields(new, written, new_model, tmp_path / "stripped"))
    expected, *read = map(read_by_version_5, folders)
    assert all(includes(values, expected) for values in read)


def check_old_fields(new, written, model, folder):
    """Writes the fields of an export that transformers 4 knows to a folder, and returns it."""
    text = new.get("text_config", new)
    assert "rope_parameters" in text and not {"rope_theta", "rope_scaling", "torch_dtype"} & text.keys()
    assert {"rope_theta", "rope_scaling"} <= written.get("text_config", written).keys()
    assert written["torch_dtype"] == written["dtype"] == "float32"
    old_fields = without_new_fields(written)
    assert type(model.config).from_dict(old_fields) == model.config
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(old_fields))
    return folder


def read_by_version_5(folder):
    """The fields as read by transformers 5, without those that it ignores."""
    fields = AutoConfig.from_pretrained(folder).to_dict()
    for part in (fields, fields.get("text_config", {})):
        for key in NOT_IN_OLD_ROPES:
            part.get("rope_parameters", {}).pop(key, None)
    return fields | {"_name_or_path": None}


def includes(values, others, may_be_filled=MAY_BE_FILLED):
    """Whether a config and its sub-configurations have all fields of another, with the same values."""
    for key, other in others.items():
        if key.endswith("_config") and other is not None:
            assert includes(values[key], other, may_be_filled)
        elif other is not None or key not in may_be_filled:
            assert values[key] == other, key
    return True


def without_new_fields(raw):
    """The fields that transformers 4 knows. num_local_experts is an old name too if there is no num_experts."""
    unknown = [key for key in NEW_FIELDS if key != "num_local_experts" or "num_experts" in raw]
    old = {key: value for key, value in raw.items() if key not in unknown}
    return {key: without_new_fields(value) if isinstance(value, dict) else value for key, value in old.items()}


def exported_from_version_5(raw, tmp_path):
    """The config.json of the export of a folder that save_pretrained wrote."""
    reference_model(raw).save_pretrained(tmp_path / "new")
    ligermodels.export(ligermodels.load(tmp_path / "new"), tmp_path / "out")
    return config(tmp_path / "out")


def with_rope(family, **scaling):
    raw = {
        key: value for key, value in CASES[FAMILIES[family]].items() if key not in ("rope_scaling", "rope_parameters")
    }
    return raw | scaling


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "attention_factor": 1.25}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"rope_theta": 700.0, "rope_scaling": None}),
        ("llama", {"rope_theta": 700.0, "rope_scaling": LINEAR}),
        ("glm", {"rope_theta": 700.0, "rope_scaling": None, "partial_rotary_factor": 0.5}),
        ("glm4", {"rope_theta": 700.0, "rope_scaling": None, "partial_rotary_factor": 0.5}),
        ("gemma3_text", {"rope_theta": 700.0, "rope_scaling": LINEAR, "rope_local_base_freq": 90.0}),
        ("olmo3", {"rope_theta": 700.0, "rope_scaling": YARN}),
    ],
)
def test_an_export_has_the_rope_fields_of_transformers_4(family, fields, tmp_path):
    written = exported_from_version_5(with_rope(family, **json.loads(json.dumps(fields))), tmp_path)
    assert {key: written[key] for key in fields} == fields


def test_the_scaling_of_phi3_has_exactly_the_three_keys_of_transformers_4(tmp_path):
    """Its reader checks the number of keys. original_max_position_embeddings is at the top level."""
    raw = with_rope("phi3", original_max_position_embeddings=8, max_position_embeddings=32)
    pairs = raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"]) // 2
    factors = {"short_factor": [1.0 + 0.1 * j for j in range(pairs)], "long_factor": [2.0 + j for j in range(pairs)]}
    written = exported_from_version_5(
        raw | {"partial_rotary_factor": 1.0, "rope_scaling": {"type": "longrope"} | factors}, tmp_path
    )
    assert written["rope_scaling"] == {"type": "longrope"} | factors
    assert written["original_max_position_embeddings"] == 8


def test_an_export_of_qwen3_moe_has_the_number_of_experts_for_transformers_4(tmp_path):
    raw = CASES[FAMILIES["qwen3_moe"]]
    written = exported_from_version_5(raw, tmp_path)
    assert written["num_experts"] == written["num_local_experts"] == raw["num_experts"]


def test_the_text_config_of_an_export_has_the_rope_fields_of_transformers_4(tmp_path):
    raw = CASES[FAMILIES["gemma3"]]
    fields = {"rope_theta": 700.0, "rope_scaling": LINEAR, "rope_local_base_freq": 90.0}
    raw = raw | {"text_config": raw["text_config"] | json.loads(json.dumps(fields))}
    written = exported_from_version_5(raw, tmp_path)
    assert written["text_config"].items() >= (fields | {"torch_dtype": "float32"}).items()
    assert written["vision_config"]["torch_dtype"] == "float32"


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_sharded_half_precision_checkpoint_survives_the_round_trip(family, tmp_path):
    dtype = torch.float16 if family == "llama" else torch.bfloat16
    raw = CASES[FAMILIES[family]]
    reference = reference_model(raw, dtype)
    reference.save_pretrained(tmp_path / "in", max_shard_size="40KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    model = ligermodels.load(tmp_path / "in")
    others = (x.dtype for name, x in model.named_parameters() if name not in model.fp32_tensors())
    assert {*others} == {dtype}
    export_weights(model, tmp_path / "out", source=tmp_path / "in", max_shard_size=40_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert bits(tmp_path / "out") == bits(tmp_path / "in")
    assert parameters_equal(reread(tmp_path / "out", dtype), reference)


def layouts(model):
    return model.weight_rules(), *model.other_weight_rules()


SPELLINGS = [
    (family, number)
    for family in ARCHITECTURES
    for number in range(len(layouts(ligermodels.create(CASES[FAMILIES[family]], device="meta"))))
]


@pytest.mark.parametrize(("family", "number"), SPELLINGS)
def test_every_spelling_that_is_read_is_written_back(family, number, tmp_path):
    model = ligermodels.create(CASES[FAMILIES[family]])
    model.loaded_rules = layouts(model)[number]
    ligermodels.export(model, tmp_path / "in")
    loaded = ligermodels.load(tmp_path / "in")
    assert parameters_equal(loaded, model) and loaded.loaded_rules == layouts(model)[number]
    ligermodels.export(loaded, tmp_path / "out")
    assert bits(tmp_path / "out") == bits(tmp_path / "in")
    assert config(tmp_path / "out") == config(tmp_path / "in")


@pytest.mark.parametrize(("family", "number"), SPELLINGS)
def test_a_missing_tensor_is_named_in_the_spelling_of_the_folder(family, number, tmp_path):
    model = ligermodels.create(CASES[FAMILIES[family]])
    model.loaded_rules = layouts(model)[number]
    ligermodels.export(model, tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    stored = load_file(file)
    name = sorted(stored)[len(stored) // 2]
    del stored[name]
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf": 1 missing: {re.escape(name)}; download it again, or "):
        ligermodels.load(tmp_path)


def test_families_with_several_spellings_have_other_names_in_each(tmp_path):
    assert {family for family, number in SPELLINGS if number} == {
        *("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "gemma3", "mistral3", "olmoe", "glm4_moe"),
        *("deepseek_v3", "glm4_moe_lite", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "lfm2_moe", "mllama", "granitemoehybrid", "llava"),
        "paligemma",
    }
    for family in {family for family, number in SPELLINGS if number}:
        model = ligermodels.create(CASES[FAMILIES[family]], device="meta")
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        names = [{(piece.tensor, piece.shape) for piece in plan_pieces(shapes, rules)} for rules in layouts(model)]
        assert all(a != b for a, b in itertools.combinations(names, 2)), family


@pytest.mark.parametrize(
    "family",
    [
        *("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "gemma3", "mistral3", "olmoe", "glm4_moe", "deepseek_v3"),
        *("glm4_moe_lite", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "qwen2_vl", "qwen2_5_vl", "lfm2_moe"),
        *("mllama", "granitemoehybrid", "llava"),
        "paligemma",
    ],
)
def test_the_in_memory_names_of_transformers_5_load_the_same_model_and_are_kept(family, tmp_path):
    """save_pretrained(save_original_format=False) writes stacked experts and other prefixes."""
    reference = save_reference(CASES[FAMILIES[family]], tmp_path / "hub")
    reference.save_pretrained(tmp_path / "memory", save_original_format=False)
    stored, names = weights(tmp_path / "memory"), reference.state_dict().keys()
    assert stored.keys() <= names and stored.keys() != weights(tmp_path / "hub").keys()
    model = ligermodels.load(tmp_path / "memory")
    assert parameters_equal(model, ligermodels.load(tmp_path / "hub"))
    ligermodels.export(model, tmp_path / "out")
    assert bits(tmp_path / "out") == bits(tmp_path / "memory")
    assert parameters_equal(reread(tmp_path / "out"), reference)


@pytest.mark.parametrize("text", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("tower", ["vision_tower.", "vision_tower.vision_model."])
@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_a_model_keeps_its_names_under_either_prefix_with_and_without_vision_model(family, text, tower, tmp_path):
    save_reference(CASES[FAMILIES[family]], tmp_path / "in")
    expected = ligermodels.load(tmp_path / "in")
    outer = "model." if text.startswith("model.") else ""
    renamed = {}
    for name, x in weights(tmp_path / "in").items():
        if name.startswith("language_model.model."):
            name = text + name.removeprefix("language_model.model.")
        elif name.startswith("vision_tower."):
            name = outer + tower + name.removeprefix("vision_tower.").removeprefix("vision_model.")
        elif name == "language_model.lm_head.weight":
            name = "lm_head.weight" if outer else name
        else:
            name = outer + name
        renamed[name] = x
    save_file(renamed, tmp_path / "in" / "model.safetensors")
    model = ligermodels.load(tmp_path / "in")
    assert parameters_equal(model, expected)
    ligermodels.export(model, tmp_path / "out")
    assert bits(tmp_path / "out") == bits(tmp_path / "in")


def test_glm4_moe_keeps_its_fp32_bias_and_the_layer_behind_the_last_one(tmp_path):
    """In a bf16 checkpoint. The bias stays fp32 in the model, whatever its dtype."""
    reference = reference_model(CASES["glm4_moe"], torch.bfloat16)
    reference.save_pretrained(tmp_path / "in")
    stored = weights(tmp_path / "in")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    stored[name] = torch.randn(12)
    stored |= {
        f"model.layers.3.{x}": torch.randn(5, 7).bfloat16() for x in ("eh_proj.weight", "shared_head.norm.weight")
    }
    save_file(stored, tmp_path / "in" / "model.safetensors")
    model = ligermodels.load(tmp_path / "in")
    assert torch.equal(model.state_dict()[name], stored[name]) and model.dtype == torch.bfloat16
    assert not any(".3." in name for name in model.state_dict())
    ligermodels.export(model, tmp_path / "out")
    assert bits(tmp_path / "out") == bits(tmp_path / "in")
    model.to(torch.float16).to(torch.bfloat16)
    assert torch.equal(model.state_dict()[name], stored[name])
    save_file(stored | {"model.layers.4.x": torch.zeros(1)}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(InputError, match=r"1 unexpected: model\.layers\.4\.x"):
        ligermodels.load(tmp_path / "in")


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_models_with_states_keep_fp32_tensors_and_layers_of_further_tokens(name, tmp_path):
    """In a bf16 checkpoint: A_log and the norm behind the rule in fp32, mtp.* and the image side not computed."""
    reference_model(CASES[name], torch.bfloat16).save_pretrained(tmp_path / "in")
    stored = weights(tmp_path / "in")
    wide = [key for key in stored if key.endswith(("A_log", "linear_attn.norm.weight"))]
    stored |= {key: torch.randn(stored[key].shape) for key in wide}
    stored |= {f"mtp.{x}": torch.randn(5, 7).bfloat16() for x in ("fc.weight", "layers.0.self_attn.q_proj.weight")}
    save_file(stored, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    model = ligermodels.load(tmp_path / "in")
    assert model.dtype == torch.bfloat16 and len(wide) == 4
    assert not any("mtp" in key or "visual" in key for key in model.state_dict())
    ligermodels.export(model, tmp_path / "out")
    assert bits(tmp_path / "out") == bits(tmp_path / "in")
    changed = next(block.mixer for block in model.model.layers if hasattr(block.mixer, "A_log"))
    with torch.no_grad():
        changed.A_log += 1e-3  # less than bf16 can add
    for dtype in (None, torch.bfloat16):  # training exports in the compute dtype
        ligermodels.export(model, tmp_path / "changed", dtype=dtype, overwrite=True)
        before, after = weights(tmp_path / "in"), weights(tmp_path / "changed")
        assert before.keys() == after.keys()
        (key,) = (key for key in before if not torch.equal(after[key], before[key]))
        assert key.endswith("0.linear_attn.A_log")
        assert torch.equal(after[key], before[key] + 1e-3) and after[key].dtype == torch.float32


@pytest.mark.parametrize("name", ["qwen3_next", "granitemoehybrid"])
def test_a_trained_fp32_tensor_is_written_in_the_dtype_that_the_file_has(name, tmp_path):
    """Here bf16, of which none is copied: values are rounded once, in the export."""
    reference_model(CASES[name], torch.bfloat16).save_pretrained(tmp_path / "in")
    model = ligermodels.load(tmp_path / "in")
    with torch.no_grad():
        for parameter in model.fp32_parameters():
            parameter += 1e-3
    stored = {key: x.float() + 1e-3 for key, x in weights(tmp_path / "in").items() if key in model.fp32_tensors()}
    for dtype, wanted in ((None, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)):
        ligermodels.export(model, tmp_path / "out", dtype=dtype, overwrite=True)
        written = weights(tmp_path / "out")
        assert len(stored) == 4 and {x.dtype for x in written.values()} == {wanted}
        assert all(torch.equal(written[key], x.to(wanted)) for key, x in stored.items())


def test_an_fp8_checkpoint_has_the_values_that_the_reference_reads(tmp_path):
    """By tensor, as Ministral 3 is published."""
    raw = CASES["ministral3"] | {"dtype": "bfloat16"}
    reference_model(raw, torch.bfloat16).save_pretrained(tmp_path)
    stored = weights(tmp_path)
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        stored[f"{name}_scale_inv"] = scale = stored[name].float().abs().max() / 448
        stored[name.replace("weight", "activation_scale")] = torch.tensor(0.5)
        stored[name] = (stored[name].float() / scale).to(torch.float8_e4m3fn)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    fp8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": True}
    fp8["modules_to_not_convert"] = ["lm_head"]
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": fp8}))
    model, reference = ligermodels.load(tmp_path), reread(tmp_path, torch.bfloat16)
    state = {name: value for name, value in reference.state_dict().items() if "activation_scale" not in name}
    packed = ligermodels.create(CASES["ministral3"], dtype=torch.bfloat16)
    packed.load_state_dict(state)
    assert parameters_equal(model, packed)
