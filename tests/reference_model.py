"""The reference implementation as the oracle: tiny random models of it, every parameter re-randomised."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion


def reference_model(raw: dict[str, Any], dtype: torch.dtype = torch.float32) -> nn.Module:
    """The reference implementation of a config, nothing of it fused, no parameter left at the value it starts with."""
    with TemporaryDirectory() as folder:  # read from a file, as users do
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        config = AutoConfig.from_pretrained(folder)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **eager)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.3 * noise)
    return model.to(dtype).eval()


def save_reference(raw: dict[str, Any], folder: Path) -> nn.Module:
    """Writes the reference model's checkpoint, with config.json just as the case has it."""
    model = reference_model(raw)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw, indent=2))
    return model


def hub_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The reference's weights under their Hub names, which differ from those it has in memory."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return {
        name.replace("vision_tower.", "vision_tower.vision_model."): value
        for name, value in revert_weight_conversion(model, state).items()
    }


def tokens(raw: dict[str, Any], batch: int = 2, length: int = 23, seed: int = 3) -> Tensor:
    """Token ids [batch, length], the padding id among them."""
    text = raw.get("text_config", raw)
    ids = torch.randint(3, text["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))
    if "pad_token_id" in text and length > 5:
        ids[0, 5] = text["pad_token_id"]
    return ids


def labels_of(input_ids: Tensor) -> Tensor:
    """input_ids with some positions unsupervised."""
    labels = input_ids.clone()
    labels[0, :4] = -100
    labels[-1, -2:] = -100
    return labels
