"""Presets have the sizes of published models."""

import json
from pathlib import Path

import pytest

import ligermodels
from ligermodels.architectures import ARCHITECTURES

DATA = Path(__file__).parent.parent / "data"
FROM_A_CHECKPOINT = {"gemma4", "qwen3_5", "qwen3_5_moe"}
PUBLISHED = {
    "gemma:2b": "google--gemma-2b",
    "gemma3:4b": "google--gemma-3-4b-it",
    "gemma3:27b": "google--gemma-3-27b-it",
    "gemma3_text:1b": "google--gemma-3-1b-it",
    "gemma4_text:e2b": "google--gemma-4-E2B-it",
    "lfm2:1.2b": "LiquidAI--LFM2-1.2B",
    "lfm2_moe:8b-a1b": "LiquidAI--LFM2-8B-A1B",
    "llama:135m": "HuggingFaceTB--SmolLM2-135M",
    "llama:1b": "meta-llama--Llama-3.2-1B",
    "llama:3b": "meta-llama--Llama-3.2-3B-Instruct",
    "llama:2-7b": "meta-llama--Llama-2-7b-hf",
    "llama:8b": "meta-llama--Meta-Llama-3-8B",
    "llama:70b": "meta-llama--Llama-3.1-70B-Instruct",
    "llava:7b": "llava-hf--llava-1.5-7b-hf",
    "ministral3:123b": "mistralai--Devstral-2-123B-Instruct-2512",
    "mistral:7b": "mistralai--Mistral-7B-v0.3",
    "mistral:nemo-12b": "mistralai--Mistral-Nemo-Base-2407",
    "mistral:24b": "mistralai--Devstral-Small-2507",
    "mistral3:24b": "mistralai--Mistral-Small-3.1-24B-Instruct-2503",
    "mixtral:8x22b": "mistralai--Mixtral-8x22B-v0.1",
    "mllama:11b": "meta-llama--Llama-3.2-11B-Vision-Instruct",
    "mllama:90b": "meta-llama--Llama-3.2-90B-Vision-Instruct",
    "olmo2:1b": "allenai--OLMo-2-0425-1B",
    "olmo2:7b": "allenai--OLMo-2-1124-7B",
    "phi3:mini": "microsoft--Phi-3-mini-4k-instruct",
    "qwen3_vl:2b": "Qwen--Qwen3-VL-2B-Instruct",
    "qwen3_vl:4b": "Qwen--Qwen3-VL-4B-Instruct",
}
COUNTS = {  # of presets whose config.json is not at hand
    # All of Qwen/Qwen3.5-4B, without its image side and the layer that predicts a further token.
    "qwen3_5_text:4b": 4_659_865_088 - 333_514_240 - 120_599_552,
    "gemma4_text:e4b": 7_463_013_376,  # what transformers 5.23.0 builds with these sizes
}


def fields(model_type, raw):
    """The fields of a config.json, with those of its image side."""
    config = ARCHITECTURES[model_type].Config.from_dict(raw)
    vision = vars(config.vision) | {"tie_word_embeddings": None} if hasattr(config, "vision") else {}
    parts = {"text": vars(config), "vision": vision}
    apart = "raw", "model_type"  # a text model is published in files of another type
    return {(part, name): of for part, all_of in parts.items() for name, of in all_of.items() if name not in apart}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_fields_of_the_published_config(preset):
    model_type, _, size = preset.partition(":")
    raw = json.loads((DATA / f"configs/{PUBLISHED[preset]}.json").read_text())
    assert fields(model_type, ARCHITECTURES[model_type].SIZES[size]) == fields(raw["model_type"], raw)


@pytest.mark.parametrize("preset", COUNTS)
def test_a_preset_has_the_published_number_of_parameters(preset):
    model_type, _, size = preset.partition(":")
    model = ligermodels.create(model_type, size=size, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[preset]


def test_all_model_types_have_presets_but_three_whose_text_models_have():
    assert {name for name, architecture in ARCHITECTURES.items() if not architecture.SIZES} == FROM_A_CHECKPOINT
    assert all(f"{name}_text" in ARCHITECTURES for name in FROM_A_CHECKPOINT)
