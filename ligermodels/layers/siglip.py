"""The vision tower of a multimodal checkpoint, kept so that an export can write the whole checkpoint back.

The modules hold parameters only, with the names and shapes of SigLIP (https://arxiv.org/abs/2303.15343). They have no
forward, because the models here take text only, and their parameters are frozen. Must not know files or any family.
"""

from collections.abc import Mapping

import torch
from torch import nn

from ligermodels.layers.norm import RMSNorm


class SiglipAttention(nn.Module):
    """The four projections of self-attention."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(hidden, hidden) for _ in range(4))


class SiglipMLP(nn.Module):
    """The two linears of the feed-forward layer."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, intermediate)
        self.fc2 = nn.Linear(intermediate, hidden)


class SiglipLayer(nn.Module):
    """One encoder layer."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.self_attn = SiglipAttention(hidden)
        self.mlp = SiglipMLP(hidden, intermediate)


class SiglipTower(nn.Module):
    """`vision_model`: patch and position embeddings, encoder, final norm. sizes: from `read_siglip_sizes`."""

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
    """The projection from the width of the vision tower to that of the text model."""

    def __init__(self, sizes: Mapping[str, int], hidden_size: int) -> None:
        super().__init__()
        self.mm_input_projection_weight = nn.Parameter(torch.empty(sizes["hidden_size"], hidden_size))
        self.mm_soft_emb_norm = RMSNorm(sizes["hidden_size"], eps=1e-6, offset=1.0)
        self.requires_grad_(False)
