"""The blocks of Gemma and of Gemma 2, which the text models of PaliGemma have too, and what Gemma 4 alone has.

Gemma 4 has normed values, keys that later layers read, per-layer embeddings, a router with a norm.
Per-layer embeddings: each block reads a vector of its own for each token, beside the residual stream. For layer l of L
and token t with embedding x_t:
    e = table[t], scaled        j = norm(projection(x_t) / sqrt(H))        each of L vectors
    (j_l + e_l) / sqrt(2)       the input of layer l
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.configs.base import Config
from ligermodels.configs.gemma4 import Gemma4Config
from ligermodels.configs.text_models import Gemma2Config, GemmaConfig
from ligermodels.generation.cache import BlockCache, LayerCache, PerToken
from ligermodels.kernels.activations.gated_activation import gated_activation
from ligermodels.kernels.attention.rope import rope_
from ligermodels.kernels.decoding.cache_write import write_cache
from ligermodels.kernels.moe.experts import route
from ligermodels.kernels.norms.rms_norm import rms_norm
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import BlockOutput, DecoderLayer, SandwichLayer
from ligermodels.layers.decoder import Decoder
from ligermodels.layers.fused import apply_linear, norm_then_linear, qk_norm_then_rope
from ligermodels.layers.inputs import Positions
from ligermodels.layers.mixer import AttentionMixer, Mixer
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.moe import MoE, Router
from ligermodels.layers.norm import PreNorm, RMSNorm, hidden_norm


def gemma_block(config: GemmaConfig) -> DecoderLayer:
    return DecoderLayer(config, Attention(config, **config.attention_biases), GatedMLP(config))


def gemma2_block(config: Gemma2Config, index: int) -> SandwichLayer:
    """The block number `index`; every other one has a sliding window."""
    attention = Attention(
        config, **config.attention_biases, window=config.window(index), scale=config.attention_scale,
        softcap=config.attn_logit_softcapping,
    )  # fmt: skip
    return SandwichLayer(config, attention, GatedMLP(config))


class NormedHeadsAttention(AttentionMixer):
    """Grouped-query attention with an RMSNorm over each query, key and value head; that of values has no weight.

    Weights: qkv_proj, the rows of all query heads first, then all keys, then all values; o_proj [H, Hq D].

    head_dim, num_key_value_heads: D and Hkv, in which layers may differ.
    window: number of keys that a query attends to, including its own; None for all earlier ones.
    rope: key of `config.ropes`, the rotary embedding of queries and keys.
    keys_are_values: the values are the keys before norm and RoPE, and have no rows in qkv_proj.
    is_read: whether later layers read the keys and values.
    """

    scale = 1.0

    def __init__(
        self, config: Config, *, head_dim: int, num_key_value_heads: int, window: int | None, rope: str,
        keys_are_values: bool = False, is_read: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden_size = config.hidden_size
        self.num_heads, self.num_key_value_heads = config.num_attention_heads, num_key_value_heads
        self.head_dim, self.window, self.rope = head_dim, window, rope
        self.keys_are_values, self.is_read = keys_are_values, is_read
        self.dropout, self.eps = config.attention_dropout, config.rms_norm_eps
        bias = config.attention_bias
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.packed_heads) * head_dim, bias=bias)
        self.q_norm = RMSNorm(head_dim, self.eps)
        self.k_norm = RMSNorm(head_dim, self.eps)
        self.o_proj = nn.Linear(self.num_heads * head_dim, config.hidden_size, bias=bias)

    def forward(
        self, norm: PreNorm | None, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        """x, residual [B, T, H] -> (output [B, T, H], residual stream x + residual [B, T, H])."""
        qkv, residual = norm_then_linear(norm, self.qkv_proj, x, residual)
        if self.keys_are_values:
            qkv = torch.cat([qkv, qkv[..., self.num_heads * self.head_dim :]], -1)
        heads, angles = (self.num_heads, self.num_key_value_heads), positions.angles[self.rope]
        q, k, v = qk_norm_then_rope(self.q_norm, self.k_norm, qkv, angles, *heads, False, None)
        v = rms_norm(v, v.new_ones(self.head_dim), self.eps)
        options: dict[str, Any] = {"scale": self.scale, "window": self.window}
        if cache is None:
            if self.is_read:
                assert positions.read_later is not None
                positions.read_later.of_type[self.rope] = k, v
            out = positions.sequences.attend(q, k, v, dropout=self.dropout if self.training else 0.0, **options)
        else:
            if cache.slots is not None:
                write_cache(k, v, cache.slots)
            out = cache.attend(q, k, v, positions.position_ids, is_read=self.is_read, **options)
        return apply_linear(self.o_proj, out.flatten(2)), residual

    @property
    def packed_heads(self) -> tuple[int, ...]:
        """The heads that qkv_proj packs: of queries, keys and values."""
        packed = self.num_heads, self.num_key_value_heads, self.num_key_value_heads
        return packed[:2] if self.keys_are_values else packed


class ReadingAttention(AttentionMixer):
    """Attention of normed query heads over the keys and values of the last layer before it with the same `rope` that
    has its own.

    Weights: q_proj [Hq D, H]; o_proj [H, Hq D]. source: the index of that layer; other arguments as those of
    `NormedHeadsAttention`.
    """

    scale = 1.0

    def __init__(self, config: Config, *, head_dim: int, window: int | None, rope: str, source: int) -> None:
        super().__init__()
        self.hidden_size, self.num_heads = config.hidden_size, config.num_attention_heads
        self.head_dim, self.window, self.rope, self.source = head_dim, window, rope, source
        self.dropout = config.attention_dropout
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * head_dim, bias=config.attention_bias)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(self.num_heads * head_dim, config.hidden_size, bias=config.attention_bias)

    def forward(
        self, norm: PreNorm | None, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        """x, residual [B, T, H] -> (output [B, T, H], residual stream x + residual [B, T, H]).

        cache: that of the layer `source`.
        """
        q, residual = norm_then_linear(norm, self.q_proj, x, residual)
        q = self.q_norm(q.unflatten(-1, (self.num_heads, self.head_dim))).flatten(2)
        q, _, _ = rope_(q, *positions.angles[self.rope], self.num_heads, 0)  # neither keys nor values
        options: dict[str, Any] = {"scale": self.scale, "window": self.window}
        if cache is None:
            assert positions.read_later is not None
            k, v = positions.read_later.of_type[self.rope]
            out = positions.sequences.attend(q, k, v, dropout=self.dropout if self.training else 0.0, **options)
        else:
            out = cache.attend_again(q, positions.position_ids, **options)
        return apply_linear(self.o_proj, out.flatten(2)), residual

    def kept(self) -> PerToken:
        """Nothing of its own."""
        return PerToken(0, self.window)


def gemma4_attention(config: Gemma4Config, index: int) -> NormedHeadsAttention | ReadingAttention:
    """Builds the attention of block `index`: with keys of its own, or with those of an earlier layer."""
    rope, source = config.layer_type(index), config.source(index)
    head_dim, window = config.rope_head_dim(rope), config.window(index)
    if source is not None:
        return ReadingAttention(config, head_dim=head_dim, window=window, rope=rope, source=source)
    return NormedHeadsAttention(
        config, head_dim=head_dim, num_key_value_heads=config.key_value_heads(index), window=window, rope=rope,
        keys_are_values=config.keys_are_values(index), is_read=config.is_read(index),
    )  # fmt: skip


class NormedRouter(Router):
    """Router that norms the residual stream itself, and multiplies each expert's routing weight by a learnt number,
    per_expert_weight [E]."""

    norms_input = True

    def __init__(self, config: Config, num_experts: int) -> None:
        super().__init__(config, num_experts)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.per_expert_weight = nn.Parameter(torch.ones(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x) * x.shape[-1] ** -0.5, self.weight)

    def choose(self, logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
        weight, index = route(logits, k, normalize)
        return weight * self.per_expert_weight[index], index


class LayerInputLayer(SandwichLayer):
    """Sandwich norms; then, with a per-layer input e, x = x + norm(projection(activation(gate(x)) * e)); then the whole
    residual stream times a number.

    layer_scalar [1]: that number, a buffer.
    moe: routed experts beside the MLP, each with norms of its own; None for the MLP alone.
    layer_input_size: elements of its input for each token; 0 for none.
    """

    layer_scalar: Tensor
    stored_buffers: ClassVar = {"layer_scalar": 1.0}

    def __init__(self, config: Config, mixer: Mixer, mlp: GatedMLP, *, moe: MoE | None, layer_input_size: int) -> None:
        super().__init__(config, mixer, mlp)
        self.activation = config.activation
        self.register_buffer("layer_scalar", torch.ones(1))
        self.moe = moe
        if moe is not None:
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = (hidden_norm(config) for _ in "12")
            self.pre_feedforward_layernorm_2 = hidden_norm(config)
        self.has_layer_input = layer_input_size > 0
        if self.has_layer_input:
            self.per_layer_input_gate = nn.Linear(config.hidden_size, layer_input_size, bias=False)
            self.per_layer_projection = nn.Linear(layer_input_size, config.hidden_size, bias=False)
            self.post_per_layer_input_norm = hidden_norm(config)

    def forward_block(self, x: Tensor, residual: Tensor | None, positions: Positions, cache: BlockCache) -> BlockOutput:
        x, residual = self.mixer(PreNorm(self.input_layernorm), x, residual, positions, cache)
        x, residual, router_logits = self.mlp(
            PreNorm(self.pre_feedforward_layernorm), self.post_attention_layernorm(x), residual
        )
        if self.moe is not None:
            routed, _, router_logits = self.moe(PreNorm(self.pre_feedforward_layernorm_2), residual, None)
            x = self.post_feedforward_layernorm_1(x) + self.post_feedforward_layernorm_2(routed)
        x = self.post_feedforward_layernorm(x)
        if self.has_layer_input and positions.layer_input is not None:
            residual = x + residual
            gate = apply_linear(self.per_layer_input_gate, residual)
            gate_up = torch.cat([gate, positions.layer_input], -1)
            x = apply_linear(self.per_layer_projection, gated_activation(gate_up, self.activation))
            x = self.post_per_layer_input_norm(x)
        return (x + residual) * self.layer_scalar.to(x.dtype), None, router_logits


class LayerInputDecoder(Decoder):
    """A decoder with per-layer embeddings. vocab_size: rows of their table; size: of a layer's vector."""

    def __init__(self, config: Config, layers: list, vocab_size: int, size: int) -> None:
        super().__init__(config, layers)
        width = len(layers) * size
        self.layer_input_size = size
        self.embed_tokens_per_layer = nn.Embedding(vocab_size, width, padding_idx=config.pad_token_id)
        self.per_layer_model_projection = nn.Linear(config.hidden_size, width, bias=False)
        self.per_layer_projection_norm = RMSNorm(size, config.rms_norm_eps)

    def layer_inputs(self, input_ids: Tensor | None, embeddings: Tensor) -> tuple[Tensor, ...]:
        """L of [B, T, size]. Raises ValueError without token ids."""
        if input_ids is None:
            raise ValueError("forward: inputs_embeds alone are not supported: per-layer embeddings need input_ids")
        size = self.layer_input_size
        table = self.embed_tokens_per_layer(input_ids)
        table = (table * table.new_full((), size**0.5)).unflatten(-1, (-1, size))
        projected = self.per_layer_model_projection(embeddings) * embeddings.shape[-1] ** -0.5
        inputs = (self.per_layer_projection_norm(projected.unflatten(-1, (-1, size))) + table) * 2**-0.5
        return inputs.unbind(2)
