"""Rotary position embedding (RoPE): cos and sin for given positions, with every supported frequency scaling.

R is the rotated part of head_dim, inv_freq[j] = theta^(-2j/R), angle = position * inv_freq. All of it is in fp32,
whatever the model's dtype: with frequencies rounded to bf16 the error grows with the position.
Sources: RoPE https://arxiv.org/abs/2104.09864, YaRN https://arxiv.org/abs/2309.00071, LongRoPE
https://arxiv.org/abs/2402.13753, Llama 3.1's scaling from its reference implementation.
"""

import math

import torch
from torch import Tensor, nn

from ligermodels.configs.rope import QueryScale, Rope
from ligermodels.errors import ConfigError


class RotaryEmbedding(nn.Module):
    """cos and sin at given positions, with frequencies that are fixed when the model is built."""

    inv_freq: Tensor
    axes: Tensor | None

    def __init__(self, rope: Rope, head_dim: int, max_position_embeddings: int) -> None:
        super().__init__()
        self.rope = rope
        self.rotary_dim = rope.rotary_dim(head_dim)
        self.max_position_embeddings = max_position_embeddings
        self.attention_factor = attention_factor(rope, max_position_embeddings)
        self.register_buffer("inv_freq", self.initial_frequencies(), persistent=False)
        self.register_buffer("axes", self.initial_axes(), persistent=False)

    def initial_frequencies(self) -> Tensor:
        """inv_freq as built: [R / 2], or [2, R / 2] for LongRoPE."""
        return SCALINGS[self.rope.rope_type](self.rope, self.rotary_dim, self.max_position_embeddings)

    def initial_axes(self) -> Tensor | None:
        """int64 [R / 2], of each rotated pair the axis of the positions that it turns with; None if there is one."""
        axes = self.rope.position_axes
        return torch.tensor(axes, device="cpu") if axes else None

    def _apply(self, fn, recurse=True):
        """Recomputes the buffers on the model's device: .to(bfloat16) would round inv_freq, to_empty() lose both."""
        super()._apply(fn, recurse)
        device, axes = self.inv_freq.device, self.initial_axes()
        self.inv_freq = self.initial_frequencies().to(device)
        self.axes = None if axes is None else axes.to(device)
        return self

    def frequencies(self, position_ids: Tensor, lengths: Tensor | None) -> Tensor:
        """The frequencies [R / 2], or [B or 1, T or 1, R / 2] if they depend on the sequence. See `forward`."""
        return self.inv_freq.to(position_ids.device)  # on the CPU while the model is on the meta device

    @torch.no_grad()
    def forward(self, position_ids: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """position_ids [B or 1, T] int, or [axes, B or 1, T] -> cos, sin [B * T or T, R / 2] fp32.

        With several axes each rotated pair takes the position along its own; without, all take the same.
        lengths: [B or 1, T], of each token's sequence; None if a row of the call is a sequence up to its last position.
        """
        position = position_ids[..., None]
        if position_ids.ndim == 3 and self.axes is not None:
            position = position_ids.movedim(0, -1)[..., self.axes.to(position_ids.device)]  # [B, T, R / 2]
        angle = (position.float() * self.frequencies(position_ids, lengths)).flatten(0, 1)
        return angle.cos() * self.attention_factor, angle.sin() * self.attention_factor


class DynamicRotaryEmbedding(RotaryEmbedding):
    """Dynamic NTK scaling: theta grows with the length of the sequence beyond max_position_embeddings."""

    def frequencies(self, position_ids: Tensor, lengths: Tensor | None) -> Tensor:
        factor, trained = self.rope.factor_or_one, self.max_position_embeddings
        length = lengths_of_sequences(position_ids, lengths).clamp_min(trained).float()
        stretch = (factor * length / trained - (factor - 1)) ** (self.rotary_dim / (self.rotary_dim - 2))
        return (self.rope.rope_theta * stretch) ** -exponents(self.rotary_dim, length.device)


class LongRotaryEmbedding(RotaryEmbedding):
    """LongRoPE: the long factors apply to all tokens of a sequence that is longer than the trained length."""

    def frequencies(self, position_ids: Tensor, lengths: Tensor | None) -> Tensor:
        short, long = self.inv_freq.to(position_ids.device)
        trained = self.rope.original_max_position_embeddings or self.max_position_embeddings
        return torch.where(lengths_of_sequences(position_ids, lengths) <= trained, short, long)


def lengths_of_sequences(position_ids: Tensor, lengths: Tensor | None) -> Tensor:
    """[B or 1, T or 1, 1]: `lengths`, or without them up to the last position of each row."""
    return (position_ids.amax(-1, keepdim=True) + 1 if lengths is None else lengths)[..., None]


@torch.no_grad()
def query_scale(scale: QueryScale, position_ids: Tensor) -> Tensor:
    """position_ids [B or 1, T] -> the factor of the queries, [B or 1, T, 1, 1] fp32."""
    passed = torch.floor(position_ids / scale.length)
    return (1 + scale.beta * torch.log(1 + passed))[:, :, None, None]


def rotary_embedding(rope: Rope, head_dim: int, max_position_embeddings: int) -> RotaryEmbedding:
    """The module for a rotary embedding. Raises ConfigError if its scaling gives frequencies that are not finite."""
    kinds = {"dynamic": DynamicRotaryEmbedding, "longrope": LongRotaryEmbedding}
    try:
        rotary = kinds.get(rope.rope_type, RotaryEmbedding)(rope, head_dim, max_position_embeddings)
        finite = math.isfinite(rotary.attention_factor) and bool(rotary.inv_freq.isfinite().all())
    except (ArithmeticError, ValueError):  # for example, YaRN divides by log(rope_theta), which may be 0
        finite = False
    if not finite:
        raise ConfigError(f"config.json: rope_scaling of type {rope.rope_type!r} gives frequencies that are not finite")
    return rotary


def exponents(rotary_dim: int, device: str | torch.device = "cpu") -> Tensor:
    """2j / R for j = 0 … R/2 - 1, fp32."""
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim


def default_frequencies(rope: Rope, rotary_dim: int, max_position_embeddings: int) -> Tensor:
    """theta^(-2j/R), without scaling."""
    return 1.0 / rope.rope_theta ** exponents(rotary_dim)


def axial_frequencies(rope: Rope, rotary_dim: int, max_position_embeddings: int) -> Tensor:
    """Rows and columns of an image, each with the frequencies of half a head: theta^(-4j/R), twice."""
    return default_frequencies(rope, rotary_dim // 2, max_position_embeddings).repeat(2)


def axial_shared_frequencies(rope: Rope, rotary_dim: int, max_position_embeddings: int) -> Tensor:
    """Rows and columns of an image take turns at the frequencies of a head: theta^(-2j/R) for even j, then for odd."""
    return default_frequencies(rope, rotary_dim, max_position_embeddings).view(-1, 2).T.flatten()


def linear_frequencies(rope: Rope, rotary_dim: int, max_position_embeddings: int) -> Tensor:
    """Position interpolation: all wavelengths are stretched by the factor."""
    return default_frequencies(rope, rotary_dim, max_position_embeddings) / rope.factor_or_one


def llama3_frequencies(rope: Rope, rotary_dim: int, max_position_embeddings: int) -> Tensor:
    """Stretches long wavelengths by the factor, keeps short ones, interpolates between them."""
    inv_freq = default_frequencies(rope, rotary_dim, max_position_embeddings)
    trained = rope.original_max_position_embeddings or max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    keep = (trained / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * inv_freq / rope.factor_or_one + keep * inv_freq


def yarn_frequencies(rope: Rope, rotary_dim: int, max_position_embeddings: int) -> Tensor:
    """YaRN: stretches frequencies below beta_slow rotations over the trained length, keeps those above beta_fast."""
    inv_freq = default_frequencies(rope, rotary_dim, max_position_embeddings)
    trained = rope.original_max_position_embeddings or max_position_embeddings

    def dimension_of(rotations: float) -> float:
        return rotary_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0, 1)
    return inv_freq / rope.factor_or_one * ramp + inv_freq * (1 - ramp)


def longrope_frequencies(rope: Rope, rotary_dim: int, max_position_embeddings: int) -> Tensor:
    """LongRoPE: short and long frequencies [2, R / 2], with a factor for each rotated pair."""
    factors = torch.tensor([rope.short_factor, rope.long_factor], dtype=torch.float32, device="cpu")
    return default_frequencies(rope, rotary_dim, max_position_embeddings) / factors


def proportional_frequencies(rope: Rope, rotary_dim: int, max_position_embeddings: int) -> Tensor:
    """Returns a head's frequencies: the first pairs, a share of partial_rotary_factor, as without scaling; else 0."""
    inv_freq = default_frequencies(rope, rotary_dim, max_position_embeddings) / rope.factor_or_one
    inv_freq[int(rope.partial_rotary_factor * rotary_dim // 2) :] = 0.0
    return inv_freq


def attention_factor(rope: Rope, max_position_embeddings: int) -> float:
    """The attention temperature of YaRN and LongRoPE, a factor of cos and sin; 1 for other scalings."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    trained = rope.original_max_position_embeddings or max_position_embeddings
    factor = rope.factor or max_position_embeddings / trained
    if rope.rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.mscale, factor) / yarn_mscale(rope.mscale_all_dim, factor)
    return yarn_mscale(1.0, factor)


def yarn_mscale(scale: float, factor: float) -> float:
    """How YaRN raises the attention temperature for a context that is `factor` times as long."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def score_factor(rope: Rope) -> float:
    """What DeepSeek multiplies the attention scores with, where the rotated part of a head is not all of it."""
    if rope.rope_type == "default" or not rope.mscale_all_dim:
        return 1.0
    return yarn_mscale(rope.mscale_all_dim, rope.factor_or_one) ** 2


SCALINGS = {
    "default": default_frequencies,
    "linear": linear_frequencies,
    "dynamic": default_frequencies,
    "llama3": llama3_frequencies,
    "yarn": yarn_frequencies,
    "longrope": longrope_frequencies,
    "proportional": proportional_frequencies,
    "axial": axial_frequencies,
    "axial_shared": axial_shared_frequencies,
}
