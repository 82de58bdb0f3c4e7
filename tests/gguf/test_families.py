"""Each family as a GGUF file and back: settings and weights, and what transformers makes of the same file."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

import ligermodels
from ligermodels.configs.base import Config
from ligermodels.errors import CheckpointError, InputError
from ligermodels.training.data.run_tokenizer import save_tokenizer
from ligermodels.weights.gguf.writing import ropes_in_effect, windows
from tests.gguf.files import FAMILIES, family_model, write_model
from tests.interop.folders import new_tokenizer, tiny_model

OFFSET_NORMS = ("gemma", "gemma2", "gemma3_text")
# What transformers 5.23 reads, with the sizes that it takes from its defaults and not from the file. It knows no other
# of the families, or under other names: gpt-oss under some that no converter writes.
KNOWN_TO_TRANSFORMERS = {
    **{family: {} for family in ("llama", "qwen2", "gemma2", "gemma3_text", "phi3")},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"head_dim": 128, "moe_intermediate_size": 768},
}
EQUAL_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "activation",
                "embedding_scale", "logit_scale", "logit_softcap", "max_position_embeddings")  # fmt: skip


def settings(config: Config):
    return {name: getattr(config, name) for name in EQUAL_FIELDS}, ropes_in_effect(config), windows(config)


def as_stored(name: str, tensor: torch.Tensor, family: str, dtype: torch.dtype) -> torch.Tensor:
    """What a file with matrices in `dtype` has: norms in fp32, of some families with 1 added."""
    if family in OFFSET_NORMS and name.endswith("norm.weight"):
        return (tensor + 1) - 1
    is_matrix = tensor.ndim > 1 and not name.endswith((".bias", "_bias")) and ".gate.weight" not in name
    return tensor.to(dtype).float() if is_matrix else tensor


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gguf_type", ["f32", "f16"])
def test_a_model_comes_back_from_gguf_bit_for_bit(tmp_path, family, gguf_type):
    model = family_model(family)
    loaded = ligermodels.load(write_model(model, tmp_path, gguf_type), dtype="float32")
    assert settings(loaded.config) == settings(model.config)
    dtype = {"f32": torch.float32, "f16": torch.float16}[gguf_type]
    expected = {name: as_stored(name, x, family, dtype) for name, x in model.state_dict().items()}
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("family", KNOWN_TO_TRANSFORMERS)
def test_transformers_reads_the_same_weights_from_the_file_and_from_its_export(tmp_path, family):
    model = tiny_model(family, **(FAMILIES[family] | KNOWN_TO_TRANSFORMERS[family]))
    file = write_model(model, tmp_path, "f32")
    ligermodels.export(ligermodels.load(file), tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    direct = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    expected, found = direct.state_dict(), exported.state_dict()
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]
    assert exported.config.model_type == direct.config.model_type


def test_an_export_is_a_whole_folder(tmp_path):
    file = write_model(family_model("llama"), tmp_path, "q8_0")
    model = ligermodels.load(file)
    assert model.dtype == torch.bfloat16  # values in blocks have no dtype of their own
    ligermodels.export(model, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja",
    }  # fmt: skip
    again = ligermodels.load(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}


def test_a_dtype_and_a_format_in_bits_can_be_asked_for(tmp_path):
    model = family_model("llama")
    file = write_model(model, tmp_path, "f16")
    assert ligermodels.load(file).dtype == torch.float16
    assert ligermodels.load(file, dtype="bfloat16").dtype == torch.bfloat16
    ligermodels.export(ligermodels.load(file, dtype="float32"), tmp_path / "out")
    nf4 = [
        dict(ligermodels.load(x, dtype="float32", quantize="nf4").named_parameters()) for x in (file, tmp_path / "out")
    ]
    assert all(torch.equal(nf4[0][name].data, nf4[1][name].data) for name in nf4[0])


LOST = {
    "norm_topk_prob": ("qwen3_moe", {"norm_topk_prob": False}),
    "sliding_window or layer_types": ("gemma3_text", {"sliding_window_pattern": 2}),
    "query_pre_attn_scalar": ("gemma2", {"query_pre_attn_scalar": 8}),
    "rope_scaling or rope_parameters": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "hidden_act": ("qwen3", {"hidden_act": "gelu"}),
}


@pytest.mark.parametrize("field", LOST)
def test_a_setting_that_gguf_cannot_say_is_refused_by_name(tmp_path, field):
    family, changes = LOST[field]
    with pytest.raises(InputError, match=f"config.json: ([a-z_, ]+, )?{field}: GGUF cannot say it for {family}"):
        write_model(tiny_model(family, **(FAMILIES[family] | changes)), tmp_path)
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_family_without_gguf_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match="model_type 'exaone4' is not written as GGUF; supported: gemma, gemma2"):
        write_model(tiny_model("exaone4"), tmp_path)


def test_an_architecture_that_is_not_supported_is_named(tmp_path):
    content = write_model(family_model("llama"), tmp_path).read_bytes()
    (tmp_path / "model.gguf").write_bytes(content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    with pytest.raises(
        CheckpointError, match=r"general.architecture 'mamba' is not supported as GGUF; supported: llama"
    ):
        ligermodels.load(tmp_path / "model.gguf")


def test_a_merged_adapter_is_written(tmp_path):
    model = family_model("llama")
    ligermodels.add_lora(model, rank=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    ligermodels.export(model, tmp_path / "merged", also=partial(save_tokenizer, new_tokenizer()))
    merged, loaded = ligermodels.load(tmp_path / "merged"), ligermodels.load(write_model(model, tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(merged.parameters(), loaded.parameters(), strict=True))
    base = family_model("llama").state_dict()
    assert not torch.equal(
        base["model.layers.0.mlp.down_proj.weight"], loaded.state_dict()["model.layers.0.mlp.down_proj.weight"]
    )


def test_a_value_too_large_for_f16_is_refused(tmp_path):
    model = family_model("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e5
    with pytest.raises(InputError, match=r"output.weight: has a value of 100000.0, too large for f16; choose bf16"):
        write_model(model, tmp_path, "f16")
    assert not list(tmp_path.glob("*.gguf*"))
    assert ligermodels.load(write_model(model, tmp_path, "bf16")).lm_head.weight[0, 0].item() == 99840.0
