"""GGUF files of trained models become folders with the weights, settings and tokens that the originals have."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import ligermodels
from tests.real.conftest import MODELS
from tests.real.conversion import converted

# What the models' config.json on the Hub have.
SETTINGS = {
    "smollm2": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "vocab_size": 49152,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 1,
    },
    "gemma3": {
        "model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "rms_norm_eps": 1e-6,
        "vocab_size": 262144, "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 512,
        "final_logit_softcapping": None, "attn_logit_softcapping": None, "bos_token_id": 2,
        "layer_types": 3 * [*5 * ["sliding_attention"], "full_attention"],
    },
}  # fmt: skip
THETAS = {"smollm2": {"": 1e5}, "gemma3": {"full_attention": 1e6, "sliding_attention": 1e4}}
PARAMETERS = {"smollm2": 134_515_008, "gemma3": 268_098_176}


@pytest.mark.parametrize("name", MODELS)
def test_all_tensors_have_the_bits_of_an_independent_conversion(name, folder_of, gguf_of):
    found, expected = load_file(folder_of(name) / "model.safetensors"), converted(gguf_of(name))
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []
    assert sum(tensor.numel() for tensor in found.values()) == PARAMETERS[name]


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_the_settings_of_the_original(name, folder_of):
    config = AutoConfig.from_pretrained(folder_of(name)).to_dict()
    assert {key: config[key] for key in SETTINGS[name]} == SETTINGS[name]
    ropes = config["rope_parameters"]
    found = {kind: (ropes[kind] if kind else ropes)["rope_theta"] for kind in THETAS[name]}
    assert found == THETAS[name]


@pytest.mark.parametrize("name", MODELS)
def test_load_export_of_an_untouched_model_gives_back_every_file_byte_for_byte(name, folder_of, tmp_path):
    folder = folder_of(name)
    ligermodels.export(ligermodels.load(folder), tmp_path / "out")
    assert content(tmp_path / "out") == content(folder)


def content(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
