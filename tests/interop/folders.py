"""Exports a new tiny model of a family, as `ligermodels train` exports one: with a tokenizer trained here."""

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ligermodels
from ligermodels.architectures import ARCHITECTURES
from ligermodels.hub.models import read_preset_or_config
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data.embedded_stories import vocabulary_texts
from ligermodels.training.data.run_tokenizer import save_tokenizer, train_tokenizer
from tests.cases import CASES

VOCABULARY = 1024  # of the tiny presets


@functools.cache
def new_tokenizer() -> Tokenizer:
    return train_tokenizer(vocabulary_texts(), VOCABULARY)


def tiny_model(family: str, **changes: Any) -> CausalLM:
    """The family's tiny preset with two layers, or where there is none, its first test case, with these changes.

    No parameter has its initial value. The second layer has full attention: transformers generates with no other cache.
    """
    if not ARCHITECTURES[family].SIZES:
        sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
        model = ligermodels.create(
            {**CASES[family], "text_config": {**CASES[family]["text_config"], **sizes, **changes}}
        )
    else:
        raw, _ = read_preset_or_config(family, "tiny")
        if "layer_types" in raw:
            raw["layer_types"] = raw["layer_types"][:2]
        if "linear_num_key_heads" in raw:
            raw["full_attention_interval"] = 2
        model = ligermodels.create({**raw, "num_hidden_layers": 2, **changes})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.2 * noise if parameter.ndim == 1 else 0.05 * noise)
    return model.eval()


def export_with_tokenizer(model: CausalLM, folder: Path, also: Callable[[Path], None] | None = None) -> Path:
    """Exports the model with the new tokenizer, or the tokenizer files that `also` writes; returns the folder."""
    ligermodels.export(model, folder, also=also or partial(save_tokenizer, new_tokenizer()))
    return folder
