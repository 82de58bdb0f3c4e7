"""Rotary position embedding: from positions to cos and sin, for every scaling of the frequencies.

R is head_dim or the part of it that is rotated, inv_freq[j] = theta^(-2j/R), angle = position * inv_freq, all in fp32
whatever the model's dtype: rounding the frequencies to bf16 is an error that grows with the position. Must not know
which model asks.
Sources: RoPE https://arxiv.org/abs/2104.09864, YaRN https://arxiv.org/abs/2309.00071, LongRoPE
https://arxiv.org/abs/2402.13753, Llama 3.1's scaling as its reference has it.
"""

import math

import torch
from torch import Tensor, nn

from ligermodels.configs.rope import Rope
from ligermodels.errors import ConfigError


class RotaryEmbedding(nn.Module):
    """cos and sin of the angles at given positions; the frequencies are fixed when the model is built."""

    inv_freq: Tensor

    def __init__(self, rope: Rope, head_dim: int, max_position_embeddings: int) -> None:
        super().__init__()
        self.rope = rope
        self.rotary_dim = int(head_dim * rope.partial_rotary_factor)
        self.max_position_embeddings = max_position_embeddings
        self.attention_factor = attention_factor(rope, max_position_embeddings)
        self.register_buffer("inv_freq", self.fresh_frequencies(), persistent=False)

    def fresh_frequencies(self) -> Tensor:
        return SCALINGS[self.rope.rope_type](self.rope, self.rotary_dim, self.max_position_embeddings)

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
        factor, trained = self.rope.stretch, self.max_position_embeddings
        length = (position_ids.max() + 1).clamp_min(trained).float()
        stretch = (factor * length / trained - (factor - 1)) ** (self.rotary_dim / (self.rotary_dim - 2))
        return (self.rope.rope_theta * stretch) ** -exponents(self.rotary_dim, length.device)


class LongRotaryEmbedding(RotaryEmbedding):
    """LongRoPE: the long factors for a call that goes beyond the trained length, for all of its positions."""

    def frequencies(self, position_ids: Tensor) -> Tensor:
        short, long = self.inv_freq
        trained = self.rope.original_max_position_embeddings or self.max_position_embeddings
        return torch.where(position_ids.max() < trained, short, long)


def rotary_embedding(rope: Rope, head_dim: int, max_position_embeddings: int) -> RotaryEmbedding:
    """Raises ConfigError where the numbers of a scaling give no frequencies."""
    kinds = {"dynamic": DynamicRotaryEmbedding, "longrope": LongRotaryEmbedding}
    try:
        rotary = kinds.get(rope.rope_type, RotaryEmbedding)(rope, head_dim, max_position_embeddings)
        finite = math.isfinite(rotary.attention_factor) and bool(rotary.inv_freq.isfinite().all())
    except (ArithmeticError, ValueError):  # such as the logarithm of a rope_theta of 1, by which YaRN divides
        finite = False
    if not finite:
        raise ConfigError(f"config.json: rope_scaling of type {rope.rope_type!r} gives frequencies that are not finite")
    return rotary


def exponents(rotary_dim: int, device: str | torch.device = "cpu") -> Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim


def default(rope: Rope, rotary_dim: int, max_position_embeddings: int) -> Tensor:
    return 1.0 / rope.rope_theta ** exponents(rotary_dim)


def linear(rope: Rope, rotary_dim: int, max_position_embeddings: int) -> Tensor:
    return default(rope, rotary_dim, max_position_embeddings) / rope.stretch


def llama3(rope: Rope, rotary_dim: int, max_position_embeddings: int) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    inv_freq = default(rope, rotary_dim, max_position_embeddings)
    trained = rope.original_max_position_embeddings or max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    keep = (trained / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * inv_freq / rope.stretch + keep * inv_freq


def yarn(rope: Rope, rotary_dim: int, max_position_embeddings: int) -> Tensor:
    """Frequencies that turn less than beta_slow times in training are stretched, those above beta_fast kept."""
    inv_freq = default(rope, rotary_dim, max_position_embeddings)
    trained = rope.original_max_position_embeddings or max_position_embeddings

    def dimension_of(rotations: float) -> float:
        return rotary_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0, 1)
    return inv_freq / rope.stretch * ramp + inv_freq * (1 - ramp)


def longrope(rope: Rope, rotary_dim: int, max_position_embeddings: int) -> Tensor:
    """Each pair has factors of its own, short and long ones: [2, R / 2]."""
    factors = torch.tensor([rope.short_factor, rope.long_factor], dtype=torch.float32, device="cpu")
    return default(rope, rotary_dim, max_position_embeddings) / factors


def attention_factor(rope: Rope, max_position_embeddings: int) -> float:
    """The temperature of YaRN and LongRoPE, multiplied into cos and sin."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    trained = rope.original_max_position_embeddings or max_position_embeddings
    factor = rope.factor or max_position_embeddings / trained
    if rope.rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0

    def mscale(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


SCALINGS = {
    "default": default,
    "linear": linear,
    "dynamic": default,
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
}
