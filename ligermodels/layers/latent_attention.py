"""Multi-head latent attention (MLA): keys and values are projections of one latent per token, which a cache keeps.

Of a token: queries [q_nope | q_rope] of each head, a latent c of L elements, and a key k_rope of R that all heads
share. Head h has the key [W_k c | k_rope] and the value W_v c. RoPE rotates q_rope and k_rope alone.
Training and prefill compute these keys and values. A decode step moves W_k to the query and W_v to the output,
    score = (W_kᵀ q_nope) · c + q_rope · k_rope        out = W_v Σ p c
so that what is cached, L + R elements a token, is read as one key of all heads, and its first L columns as the value.
Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434.
"""

import torch
from torch import Tensor, nn

from ligermodels.configs.features import LatentAttentionConfig
from ligermodels.configs.rope import FULL_ATTENTION
from ligermodels.generation.cache import LayerCache, PerToken
from ligermodels.kernels.attention.attention import packed_attention_name
from ligermodels.kernels.attention.rope import rope_
from ligermodels.layers.fused import apply_linear, effective_weight, norm_then_linear
from ligermodels.layers.inputs import Positions
from ligermodels.layers.mixer import Mixer
from ligermodels.layers.norm import PreNorm, RMSNorm
from ligermodels.layers.rope import score_factor

LATENT_NORM_EPS = 1e-6  # whatever the config's rms_norm_eps is


class LatentAttention(Mixer):
    """Multi-head latent attention with N + R dimensions of each query and key head, V of each value head.

    Weights: qkv_a_proj [Q + L + R, hidden], the rows of the queries' latent first, then c, then k_rope; without a
    latent of the queries these are the queries, Q = H (N + R). q_b_proj [H (N + R), Q]; kv_b_proj [H (N + V), L], the
    key's rows of a head before its value's; o_proj [hidden, H V].
    """

    name_in_block = "self_attn"
    scales_queries = False
    sinks = None

    def __init__(self, config: LatentAttentionConfig) -> None:
        super().__init__()
        rope, bias = config.ropes[FULL_ATTENTION], config.attention_bias
        self.hidden_size = config.hidden_size
        self.num_heads = heads = config.num_attention_heads
        self.nope_size, self.rope_size, self.value_size = (
            config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim,
        )  # fmt: skip
        self.latent_size = latent = config.kv_lora_rank
        self.head_dim = self.nope_size + self.rope_size
        self.scale = self.head_dim**-0.5 * score_factor(rope)
        self.interleaved = config.rope_interleave
        self.dropout = config.attention_dropout
        self.query_input_size = config.query_input_size
        self.qkv_a_proj = nn.Linear(config.hidden_size, self.query_input_size + latent + self.rope_size, bias=bias)
        self.q_a_layernorm = self.q_b_proj = None
        if config.q_lora_rank is not None:
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * self.head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(latent, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(latent, heads * (self.nope_size + self.value_size), bias=False)
        self.o_proj = nn.Linear(heads * self.value_size, config.hidden_size, bias=bias)

    def forward(
        self, norm: PreNorm | None, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        packed, residual = norm_then_linear(norm, self.qkv_a_proj, x, residual)
        q, latent, k_rope = packed.split([self.query_input_size, self.latent_size, self.rope_size], -1)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            q, _ = norm_then_linear(PreNorm(self.q_a_layernorm), self.q_b_proj, q, None)
        q, k_rope = self.rotate(q.unflatten(-1, (self.num_heads, self.head_dim)), k_rope, positions)
        if cache is None:
            kv, _ = norm_then_linear(PreNorm(self.kv_a_layernorm), self.kv_b_proj, latent, None)
            dropout = self.dropout if self.training else 0.0
            out = positions.sequences.attend(q, *self.keys_and_values(kv, k_rope), scale=self.scale, dropout=dropout)
        else:
            latents = torch.cat([self.kv_a_layernorm(latent)[:, :, None], k_rope], -1)
            out = cache.attend_latents(q, latents, positions.position_ids, self, scale=self.scale)
        return apply_linear(self.o_proj, out.flatten(2)), residual

    def rotate(self, q: Tensor, k_rope: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """q [B, T, H, N + R] and k_rope [B, T, R] -> both with their last R rotated, k_rope as [B, T, 1, R]."""
        q_nope, q_rope = q.split([self.nope_size, self.rope_size], -1)
        heads = torch.cat([q_rope.flatten(2), k_rope], -1)
        # The key's is one more head, so that one launch rotates all; there are no values.
        rotated, _, _ = rope_(heads, *positions.angles[FULL_ATTENTION], self.num_heads + 1, 0, self.interleaved)
        q_rope, k_rope = rotated.split([self.num_heads, 1], 2)
        return torch.cat([q_nope, q_rope], -1), k_rope

    def keys_and_values(self, kv: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """kv [B, T, H (N + V)] and k_rope [B, T, 1, R] -> k [B, T, H, N + R], v [B, T, H, V]."""
        heads = kv.unflatten(-1, (self.num_heads, self.nope_size + self.value_size))
        k_nope, v = heads.split([self.nope_size, self.value_size], -1)
        return torch.cat([k_nope, k_rope.expand(-1, -1, self.num_heads, -1)], -1), v

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Cached latents [B, S, 1, L + R] -> k [B, S, H, N + R], v [B, S, H, V]."""
        latent, k_rope = latents.split([self.latent_size, self.rope_size], -1)
        return self.keys_and_values(apply_linear(self.kv_b_proj, latent[:, :, 0]), k_rope)

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [B, T, H, N + R] -> queries of the latents, [B, T, H, L + R]."""
        q_nope, q_rope = q.split([self.nope_size, self.rope_size], -1)
        keys, _ = self.head_weights()
        return torch.cat([torch.einsum("bthn,hnl->bthl", q_nope, keys), q_rope], -1)

    def restore(self, out: Tensor) -> Tensor:
        """Weighted latents [B, T, H, L] -> weighted values [B, T, H, V]."""
        _, values = self.head_weights()
        return torch.einsum("bthl,hvl->bthv", out, values)

    def head_weights(self) -> tuple[Tensor, Tensor]:
        """W_k [H, N, L] and W_v [H, V, L]."""
        sizes = [self.nope_size, self.value_size]
        heads = effective_weight(self.kv_b_proj, self.latent_size).unflatten(0, (self.num_heads, sum(sizes)))
        keys, values = heads.split(sizes, 1)
        return keys, values

    def kept(self) -> PerToken:
        return PerToken(self.latent_size + self.rope_size, None)

    @property
    def score_width(self) -> int:
        return self.num_heads * (self.head_dim + self.value_size)

    @property
    def output_size(self) -> int:
        return self.num_heads * self.value_size

    def implementation(self, device: torch.device, dtype: torch.dtype) -> str:
        return packed_attention_name(device, dtype, max(self.head_dim, self.value_size), None)
