"""Rotary position embedding: from positions to cos and sin, for every scaling of the frequencies.

R = head_dim, inv_freq[j] = theta^(-2j/R), angle = position * inv_freq, all in fp32 whatever the model's dtype:
rounding the frequencies to bf16 is an error that grows with the position. Must not know which model asks.
Sources: RoPE https://arxiv.org/abs/2104.09864, YaRN https://arxiv.org/abs/2309.00071, Llama 3.1's scaling as its
reference has it.
"""

import math

import torch
from torch import Tensor, nn

from ligermodels.layers.config import Config, Rope


class RotaryEmbedding(nn.Module):
    """cos and sin of the angles at given positions; the frequencies are fixed when the model is built."""

    inv_freq: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.rope = config.rope
        self.head_dim = config.head_dim
        self.max_position_embeddings = config.max_position_embeddings
        self.attention_factor = attention_factor(config.rope) if config.rope.rope_type == "yarn" else 1.0
        self.register_buffer("inv_freq", self.fresh_frequencies(), persistent=False)

    def fresh_frequencies(self) -> Tensor:
        return SCALINGS[self.rope.rope_type](self.rope, self.head_dim, self.max_position_embeddings)

    def _apply(self, fn, recurse=True):
        """Follows the model to its device but stays fresh: .to(bfloat16) would round it, to_empty() lose it."""
        super()._apply(fn, recurse)
        device = self.inv_freq.device
        self.inv_freq = self.fresh_frequencies().to(device)
        return self

    def frequencies(self, position_ids: Tensor) -> Tensor:
        return self.inv_freq

    @torch.no_grad()
    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids [B or 1, T] int -> cos, sin [B * T or T, R / 2] fp32."""
        angle = position_ids.reshape(-1, 1).float() * self.frequencies(position_ids)
        return angle.cos() * self.attention_factor, angle.sin() * self.attention_factor


class DynamicRotaryEmbedding(RotaryEmbedding):
    """NTK-aware scaling of theta by the longest position of the call, once that passes max_position_embeddings."""

    def frequencies(self, position_ids: Tensor) -> Tensor:
        factor, trained = self.rope.factor, self.max_position_embeddings
        length = (position_ids.max() + 1).clamp_min(trained).float()
        stretch = (factor * length / trained - (factor - 1)) ** (self.head_dim / (self.head_dim - 2))
        return (self.rope.rope_theta * stretch) ** -exponents(self.head_dim, length.device)


def rotary_embedding(config: Config) -> RotaryEmbedding:
    return DynamicRotaryEmbedding(config) if config.rope.rope_type == "dynamic" else RotaryEmbedding(config)


def exponents(head_dim: int, device: str | torch.device = "cpu") -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim


def default(rope: Rope, head_dim: int, max_position_embeddings: int) -> Tensor:
    return 1.0 / rope.rope_theta ** exponents(head_dim)


def linear(rope: Rope, head_dim: int, max_position_embeddings: int) -> Tensor:
    return default(rope, head_dim, max_position_embeddings) / rope.factor


def llama3(rope: Rope, head_dim: int, max_position_embeddings: int) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    inv_freq = default(rope, head_dim, max_position_embeddings)
    trained = rope.original_max_position_embeddings or max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    keep = (trained / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * inv_freq / rope.factor + keep * inv_freq


def yarn(rope: Rope, head_dim: int, max_position_embeddings: int) -> Tensor:
    """Frequencies that turn less than beta_slow times in training are stretched, those above beta_fast kept."""
    inv_freq = default(rope, head_dim, max_position_embeddings)
    trained = rope.original_max_position_embeddings or max_position_embeddings

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0, 1)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


def attention_factor(rope: Rope) -> float:
    """YaRN's temperature, multiplied into cos and sin."""

    def mscale(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


SCALINGS = {"default": default, "linear": linear, "dynamic": default, "llama3": llama3, "yarn": yarn}
