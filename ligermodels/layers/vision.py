"""The image side of a multimodal checkpoint, kept so that the whole checkpoint can be written back.

Parameters only, under the names and in the shapes of SigLIP (https://arxiv.org/abs/2303.15343): the models here read
text. They are frozen, because nothing computes with them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ligermodels.configs.fields import checked
from ligermodels.errors import ConfigError
from ligermodels.layers.norm import RMSNorm

DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "vision_use_head": True,
}


def read_vision_config(raw: Mapping[str, Any]) -> dict[str, int]:
    """The sizes in a multimodal config.json's vision_config. Raises ConfigError."""
    vision = raw.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ConfigError(f"config.json: vision_config is {vision!r}; must be an object")
    sizes = {name: checked(name, vision.get(name, default), type(default)) for name, default in DEFAULTS.items()}
    if sizes["vision_use_head"]:
        raise ConfigError("config.json: vision_config: vision_use_head must be false; a head is not supported")
    return sizes


class SiglipAttention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(hidden, hidden) for _ in range(4))


class SiglipMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, intermediate)
        self.fc2 = nn.Linear(intermediate, hidden)


class SiglipLayer(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.self_attn = SiglipAttention(hidden)
        self.mlp = SiglipMLP(hidden, intermediate)


class SiglipTower(nn.Module):
    """`vision_model`: patch and position embeddings, encoder, final norm."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        hidden, patch = sizes["hidden_size"], sizes["patch_size"]
        layers = (SiglipLayer(hidden, sizes["intermediate_size"]) for _ in range(sizes["num_hidden_layers"]))
        self.vision_model = nn.ModuleDict(
            {
                "embeddings": nn.ModuleDict(
                    {
                        "patch_embedding": nn.Conv2d(sizes["num_channels"], hidden, patch, patch),
                        "position_embedding": nn.Embedding((sizes["image_size"] // patch) ** 2, hidden),
                    }
                ),
                "encoder": nn.ModuleDict({"layers": nn.ModuleList(layers)}),
                "post_layernorm": nn.LayerNorm(hidden),
            }
        )
        self.requires_grad_(False)


class SiglipProjector(nn.Module):
    """From the tower's width to the text model's."""

    def __init__(self, sizes: Mapping[str, int], hidden_size: int) -> None:
        super().__init__()
        self.mm_input_projection_weight = nn.Parameter(torch.empty(sizes["hidden_size"], hidden_size))
        self.mm_soft_emb_norm = RMSNorm(sizes["hidden_size"], eps=1e-6, offset=1.0)
        self.requires_grad_(False)
