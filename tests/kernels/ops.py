"""The table of all ops, for the tests that hold for every op. A new op adds a function here and a line to OPS.

A case is an op at one size, with its tensors, drawn from (batch, length, *size): odd sizes for the interpreter, sizes
of real models for compiled kernels, and one size beyond 2^31 elements. Ops that are only parts of others (grouped GEMM,
permutation of rows, rescaling) are covered by the cases of those; `test_opcheck` fails if one is not.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.activated_linear import activated_linear, activated_linear_reference
from ligermodels.kernels.adamw import adamw_, adamw_reference
from ligermodels.kernels.adamw8bit import adamw8bit_, adamw8bit_reference, encode_reference
from ligermodels.kernels.attention import attention, attention_reference
from ligermodels.kernels.cache_write import CacheSlots, write_cache, write_cache_reference
from ligermodels.kernels.causal_conv import causal_conv, causal_conv_reference
from ligermodels.kernels.causal_conv_step import causal_conv_step_, causal_conv_step_reference
from ligermodels.kernels.cross_entropy import (
    cross_entropy,
    cross_entropy_reference,
    cross_entropy_with_metrics,
    cross_entropy_with_metrics_reference,
)
from ligermodels.kernels.decode_attention import decode_attention, decode_attention_reference
from ligermodels.kernels.dispatch import widen
from ligermodels.kernels.experts import experts, experts_reference
from ligermodels.kernels.few_rows_experts import few_rows_experts
from ligermodels.kernels.few_rows_linear import few_rows_gated_linear, few_rows_linear, few_rows_norm_linear
from ligermodels.kernels.fp8 import Float8, fp8_dequantize_reference
from ligermodels.kernels.gated_activation import gated_activation, gated_activation_reference
from ligermodels.kernels.gated_delta_rule import gated_delta_rule, gated_delta_rule_reference
from ligermodels.kernels.gated_delta_step import gated_delta_step_, gated_delta_step_reference
from ligermodels.kernels.gated_linear import gated_linear, gated_linear_reference
from ligermodels.kernels.gated_rms_norm import gated_rms_norm, gated_rms_norm_reference
from ligermodels.kernels.grouped_low_rank import GroupedLowRank
from ligermodels.kernels.layer_norm import layer_norm, layer_norm_reference
from ligermodels.kernels.layer_norm_linear import layer_norm_linear, layer_norm_linear_reference
from ligermodels.kernels.linear import LowRank, low_rank_linear, low_rank_linear_reference
from ligermodels.kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_cross_entropy_with_metrics,
    linear_cross_entropy_with_metrics_reference,
)
from ligermodels.kernels.linear_divergence import linear_divergence, linear_divergence_reference
from ligermodels.kernels.linear_logprobs import linear_logprobs, linear_logprobs_reference
from ligermodels.kernels.mamba2_scan import mamba2_scan, mamba2_scan_reference
from ligermodels.kernels.mamba2_step import mamba2_step_, mamba2_step_reference
from ligermodels.kernels.mxfp4 import EXPONENT_BIAS, Mxfp4Layout, mxfp4_dequantize_reference
from ligermodels.kernels.nf4 import Nf4, nf4_dequantize_reference, nf4_encode, nf4_encode_reference
from ligermodels.kernels.norm_linear import norm_linear, norm_linear_reference
from ligermodels.kernels.penalties import penalize, penalize_reference
from ligermodels.kernels.plain_activation import plain_activation, plain_activation_reference
from ligermodels.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from ligermodels.kernels.qkv_heads import split_heads
from ligermodels.kernels.quantised_weight import QuantisedWeight, frozen_linear
from ligermodels.kernels.rms_norm import (
    CHUNKED_WIDTHS,
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from ligermodels.kernels.rope import rope_, rope_reference
from ligermodels.kernels.rope_cache_write import qk_norm_rope_write_cache, rope_write_cache_
from ligermodels.kernels.sample import sample, sample_reference
from ligermodels.kernels.shared_keys import gather_keys, gather_keys_reference
from ligermodels.losses.divergences import KINDS
from tests.conftest import DEVICE

Function = Callable[..., Tensor | tuple[Tensor, ...]]
EPS = 1e-6
HIDDEN = 576, 1024, 1152, 2048, 2880, 3584, 4096, 5120, 8192, 16384
HEADS = (32, 8, 128), (8, 4, 256), (40, 8, 128), (64, 8, 128), (16, 16, 64)  # query heads, key and value heads, size
VOCABULARIES = 32000, 128256, 151936, 262144
RANK = 3  # of low-rank updates


@dataclass(frozen=True)
class Case:
    """ours and reference take the leaves, which are cast to the dtype under test and differentiated, then constants."""

    ours: Function
    reference: Function
    leaves: list[Tensor]
    constants: list[Tensor]

    def to(self, dtype: torch.dtype, device: str = DEVICE) -> "Case":
        leaves = [x.to(device, dtype).requires_grad_() for x in self.leaves]
        return replace(self, leaves=leaves, constants=[x.to(device) for x in self.constants])

    def freeze(self, *frozen: int) -> "Case":
        return replace(self, leaves=[x.detach() if i in frozen else x for i, x in enumerate(self.leaves)])

    def train_only(self, trained: int) -> "Case":
        return self.freeze(*(i for i in range(len(self.leaves)) if i != trained))

    def freeze_inputs(self) -> "Case":
        """Freezes the activations, so that only weights are trained."""
        rows = self.leaves[0].shape[:2]
        return self.freeze(*(i for i, x in enumerate(self.leaves) if x.shape[:2] == rows))

    def step(self, function: Function, upstream: list[Tensor]) -> list[Tensor]:
        """The outputs, then the gradients of the leaves that require one."""
        outputs = as_list(function(*self.leaves, *self.constants))
        leaves = [x for x in self.leaves if x.requires_grad]
        gradients = torch.autograd.grad(outputs, leaves, upstream) if outputs[0].requires_grad else []
        return [*(x.detach() for x in outputs), *gradients]

    @torch.no_grad()
    def forward(self, function: Function) -> list[Tensor]:
        return as_list(function(*self.leaves, *self.constants))

    def upstream(self, function: Function | None = None) -> list[Tensor]:
        """Random gradients of the outputs of `function`, or of the reference, which takes the interpreter no time."""
        return [torch.randn_like(x) for x in self.forward(function or self.reference)]

    def run(self) -> None:
        """Runs the kernels, without gradients and with them."""
        self.step(self.ours, self.upstream(self.ours))


@dataclass(frozen=True, kw_only=True)
class Op:
    draw: Callable[..., Case]  # from (batch, length, *size)
    small: tuple[int, ...]
    real: tuple[tuple[int, ...], ...] = ()  # sizes of models; empty if another entry or another library has the kernels
    huge: tuple[int, ...] | None = None  # length, then the size; None if another entry has the kernels
    # FLOPs of backward divided by those of forward: with all leaves trained, then with each leaf alone. Empty if there
    # is no matrix product, or one is in place, which FLOP counters miss.
    products: tuple[float, ...] = ()
    has_gradients: bool = True
    # Pairs (batch, length) that launch a further variant: with few rows, or with enough programs to fill the GPU.
    more_variants: tuple[tuple[int, int], ...] = ()

    def case(self, batch: int = 2, length: int = 4, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Case:
        return self.draw(batch, length, *self.small).to(dtype, device)


def parametrize_ops(condition: Callable[[Op], bool] = lambda op: True):
    """Runs a test for each op of the table that meets the condition."""
    chosen = {name: op for name, op in OPS.items() if condition(op)}
    return pytest.mark.parametrize("op", chosen.values(), ids=chosen)


def as_list(outputs: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, device=DEVICE)


def norm_case(batch, length, hidden) -> Case:
    ours, reference = (partial(f, eps=EPS, offset=1.0) for f in (rms_norm, rms_norm_reference))
    return Case(ours, reference, [normal(batch, length, hidden), normal(hidden)], [])


def add_norm_case(batch, length, hidden) -> Case:
    ours, reference = (partial(f, eps=EPS) for f in (add_rms_norm, add_rms_norm_reference))
    return Case(ours, reference, [normal(batch, length, hidden), normal(batch, length, hidden), normal(hidden)], [])


def norm_without_weight_case(batch, length, hidden, add=False) -> Case:
    functions = (add_rms_norm, add_rms_norm_reference) if add else (rms_norm, rms_norm_reference)
    ours, reference = (partial(f, eps=EPS) for f in functions)
    return Case(ours, reference, [normal(batch, length, hidden) for _ in range(1 + add)], [])


def layer_norm_case(batch, length, hidden) -> Case:
    ours, reference = (partial(f, eps=EPS) for f in (layer_norm, layer_norm_reference))
    return Case(ours, reference, [normal(batch, length, hidden), normal(hidden), normal(hidden)], [])


def layer_norm_without_bias_case(batch, length, hidden) -> Case:
    ours, reference = (partial(f, bias=None, eps=EPS) for f in (layer_norm, layer_norm_reference))
    return Case(ours, reference, [normal(batch, length, hidden), normal(hidden)], [])


def norm_linear_case(batch, length, hidden, width) -> Case:
    ours, reference = (partial(f, eps=EPS) for f in (norm_linear, norm_linear_reference))
    stream = normal(batch, length, hidden), normal(batch, length, hidden)
    return Case(ours, reference, [*stream, normal(hidden), normal(width, hidden, scale=0.1), normal(width)], [])


def layer_norm_linear_case(batch, length, hidden, width) -> Case:
    ours, reference = (partial(f, eps=EPS) for f in (layer_norm_linear, layer_norm_linear_reference))
    stream = normal(batch, length, hidden), normal(batch, length, hidden)
    weights = normal(hidden), normal(hidden), normal(width, hidden, scale=0.1), normal(width)
    return Case(ours, reference, [*stream, *weights], [])


def draw_update(inputs, width) -> list[Tensor]:
    """A and B for the first half of a projection's columns and for its last column, as for queries and values."""
    return [normal(2 * RANK, inputs, scale=0.2), normal(width // 2 + 1, RANK, scale=0.2)]


def with_low_rank_update(function: Function, width: int, **settings) -> Function:
    """`function` with a low-rank update, whose A and B are the last two arguments."""
    columns = (0, width // 2), (width - 1, width)
    return lambda *inputs: function(*inputs[:-2], low_rank=LowRank(*inputs[-2:], columns, 0.5), **settings)


def low_rank_linear_case(batch, length, inputs, width) -> Case:
    ours, reference = (with_low_rank_update(f, width) for f in (low_rank_linear, low_rank_linear_reference))
    weights = normal(width, inputs, scale=0.1), normal(width)
    return Case(ours, reference, [normal(batch, length, inputs), *weights, *draw_update(inputs, width)], [])


def low_rank_norm_linear_case(batch, length, hidden, width) -> Case:
    def without_residual(function):
        return lambda x, *weights: with_low_rank_update(function, width, eps=EPS)(x, None, *weights)

    ours, reference = map(without_residual, (norm_linear, norm_linear_reference))
    x, _, *weights = norm_linear_case(batch, length, hidden, width).leaves
    return Case(ours, reference, [x, *weights, *draw_update(hidden, width)], [])


def low_rank_layer_norm_linear_case(batch, length, hidden, width) -> Case:
    """Without a residual, and with a norm without a bias."""

    def without_residual(function):
        update = with_low_rank_update(function, width, eps=EPS)
        return lambda x, norm, *weights: update(x, None, norm, None, *weights)

    ours, reference = map(without_residual, (layer_norm_linear, layer_norm_linear_reference))
    x, _, norm, _, *weights = layer_norm_linear_case(batch, length, hidden, width).leaves
    return Case(ours, reference, [x, norm, *weights, *draw_update(hidden, width)], [])


def draw_nf4(width: int, inputs: int) -> tuple[Tensor, Nf4]:
    """The bytes of a quantised weight of two parts, and their layout."""
    layout = Nf4((width, inputs), (1, width - 1), torch.float32)
    return layout.quantize(normal(width, inputs, scale=0.1)), layout


def draw_fp8(width: int, inputs: int) -> tuple[Tensor, Float8]:
    """As `draw_nf4`, with several blocks in each direction."""
    layout = Float8((width, inputs), (1, width - 1), torch.float32, (4, 48))
    return layout.quantize(normal(width, inputs, scale=0.1)), layout


def draw_mxfp4(width: int, inputs: int) -> tuple[Tensor, Mxfp4Layout]:
    layout = Mxfp4Layout((width, inputs), (1, width - 1), torch.float32)
    data = torch.randint(256, (layout.nbytes,), dtype=torch.uint8, device=DEVICE)
    layout.view(data)[0].fill_(EXPONENT_BIAS - 5)
    return data, layout


def mxfp4_reference(data: Tensor, layout: Mxfp4Layout) -> Tensor:
    exponents, codes = layout.view(data)
    return mxfp4_dequantize_reference(codes, exponents).to(layout.dtype)


def frozen_linear_case(
    batch, length, inputs, width, draw=draw_nf4, dequantize=nf4_dequantize_reference
) -> Case:  # fmt: skip
    data, layout = draw(width, inputs)

    def ours(x, bias, data):
        return frozen_linear(x, QuantisedWeight(data, layout.with_dtype(x.dtype)), bias)

    def reference(x, bias, data):
        return F.linear(x, dequantize(data, layout.with_dtype(x.dtype)), bias)

    return Case(ours, reference, [normal(batch, length, inputs), normal(width)], [data])


def of_frozen_weight(case: Case, node: Function, reference: Function, inputs: int, width: int) -> Case:
    """The case of a fused node whose weight, the second of its leaves, is frozen and quantised."""
    data, layout = draw_nf4(width, inputs)

    def compute(node, dequantize, *tensors):
        *leaves, data = tensors
        return node(*leaves[:-2], dequantize(data, layout.with_dtype(leaves[-1].dtype)), *leaves[-2:])

    leaves = [x for index, x in enumerate(case.leaves) if index != len(case.leaves) - 3]
    ours, plain = partial(compute, node, QuantisedWeight), partial(compute, reference, nf4_dequantize_reference)
    return Case(ours, plain, leaves, [data])


def frozen_norm_linear_case(batch, length, hidden, width) -> Case:
    def with_update(function):
        return lambda x, norm, weight, a, b: with_low_rank_update(function, width, eps=EPS)(x, None, norm, weight, a, b)

    x, _, norm, *_ = norm_linear_case(batch, length, hidden, width).leaves
    case = Case(norm_linear, norm_linear, [x, norm, x, *draw_update(hidden, width)], [])
    return of_frozen_weight(case, *map(with_update, (norm_linear, norm_linear_reference)), hidden, width)


def frozen_layer_norm_linear_case(batch, length, hidden, width) -> Case:
    def with_update(function):
        update = with_low_rank_update(function, width, eps=EPS)
        return lambda x, norm, norm_bias, weight, a, b: update(x, None, norm, norm_bias, weight, a, b)

    x, _, norm, norm_bias, *_ = layer_norm_linear_case(batch, length, hidden, width).leaves
    case = Case(layer_norm_linear, layer_norm_linear, [x, norm, norm_bias, x, *draw_update(hidden, width)], [])
    return of_frozen_weight(case, *map(with_update, (layer_norm_linear, layer_norm_linear_reference)), hidden, width)


def frozen_gated_linear_case(batch, length, inner, width) -> Case:
    case = low_rank_gated_linear_case(batch, length, inner, width)
    return of_frozen_weight(case, case.ours, case.reference, inner, width)


def nf4_encode_case(batch, length, columns) -> Case:
    @torch.no_grad()
    def encode(function, x):
        codes, absmax = function(x.flatten(0, 1))
        return codes.to(x.dtype), absmax.to(x.dtype)

    ours, reference = partial(encode, nf4_encode), partial(encode, nf4_encode_reference)
    return Case(ours, reference, [normal(batch, length, columns)], [])


def angles(rows: int, rotated: int) -> list[Tensor]:
    phases = 100 * torch.rand(rows, rotated // 2, device=DEVICE)
    return [phases.cos(), phases.sin()]


def rope_case(batch, length, heads, kv_heads, head_size, interleaved=False) -> Case:
    def rotate(function, qkv, cos, sin):
        consumed = qkv.clone(memory_format=torch.contiguous_format)
        return function(consumed, cos, sin, heads, kv_heads, interleaved)

    rotated = head_size // 2 if interleaved else head_size
    qkv = normal(batch, length, (heads + 2 * kv_heads) * head_size)
    return Case(partial(rotate, rope_), partial(rotate, rope_reference), [qkv], angles(length, rotated))


def qk_norm_rope_case(batch, length, heads, kv_heads, head_size, whole_row=False) -> Case:
    def norm_and_rotate(function, qkv, q_weight, k_weight, cos, sin):
        return function(qkv, q_weight, k_weight, cos, sin, heads, kv_heads, EPS)

    qkv = normal(batch, length, (heads + 2 * kv_heads) * head_size)
    weights = [normal(head_size * (h if whole_row else 1)) for h in (heads, kv_heads)]
    ours, reference = (partial(norm_and_rotate, f) for f in (qk_norm_rope, qk_norm_rope_reference))
    return Case(ours, reference, [qkv, *weights], angles(length, head_size))


def gated_case(batch, length, inner, activation="silu") -> Case:
    ours, reference = (partial(f, activation=activation) for f in (gated_activation, gated_activation_reference))
    return Case(ours, reference, [normal(batch, length, 2 * inner)], [])


def gated_in_place_case(batch, length, inner, activation) -> Case:
    def ours(gate_up):
        consumed = gate_up.clone(memory_format=torch.contiguous_format)
        return gated_activation(consumed, activation, inplace=True)

    return replace(gated_case(batch, length, inner, activation), ours=ours)


def gate_and_up_case(batch, length, inner) -> Case:
    def gated(function, gate, up, **options):
        return function(gate, "silu", up, **options)

    ours, reference = (partial(gated, f) for f in (gated_activation, gated_activation_reference))
    return Case(ours, reference, [normal(batch, length, inner), normal(batch, length, inner)], [])


def gate_and_up_in_place_case(batch, length, inner, **multipliers) -> Case:
    case = gate_and_up_case(batch, length, inner)

    def ours(gate, up):
        consumed = (x.clone(memory_format=torch.contiguous_format) for x in (gate, up))
        return case.ours(*consumed, inplace=True, **multipliers)

    return replace(case, ours=ours, reference=partial(case.reference, **multipliers))


def plain_case(batch, length, inner, activation="quick_gelu") -> Case:
    ours, reference = (partial(f, activation=activation) for f in (plain_activation, plain_activation_reference))
    return Case(ours, reference, [normal(batch, length, inner)], [])


def activated_linear_case(batch, length, inner, width) -> Case:
    ours, reference = (partial(f, activation="gelu_tanh") for f in (activated_linear, activated_linear_reference))
    weights = normal(width, inner, scale=0.1), normal(width)
    return Case(ours, reference, [normal(batch, length, inner), *weights], [])


def low_rank_activated_linear_case(batch, length, inner, width) -> Case:
    def without_bias(function):
        return lambda x, weight, *update: with_low_rank_update(function, width, activation="gelu")(
            x, weight, None, *update
        )

    ours, reference = map(without_bias, (activated_linear, activated_linear_reference))
    x, weight, _ = activated_linear_case(batch, length, inner, width).leaves
    return Case(ours, reference, [x, weight, *draw_update(inner, width)], [])


def gated_linear_case(batch, length, inner, width, **multipliers) -> Case:
    functions = gated_linear, gated_linear_reference
    ours, reference = (partial(f, activation="silu", **multipliers) for f in functions)
    weights = normal(width, inner, scale=0.1), normal(width)
    return Case(ours, reference, [normal(batch, length, 2 * inner), *weights], [])


def low_rank_gated_linear_case(batch, length, inner, width) -> Case:
    def without_bias(function):
        return lambda gate_up, weight, *update: with_low_rank_update(function, width, activation="silu")(
            gate_up, weight, None, *update
        )

    ours, reference = map(without_bias, (gated_linear, gated_linear_reference))
    gate_up, weight, _ = gated_linear_case(batch, length, inner, width).leaves
    return Case(ours, reference, [gate_up, weight, *draw_update(inner, width)], [])


def experts_case(
    batch, length, hidden, inner, num_experts, k, low_rank=False, biased=False, ours=experts
) -> Case:  # fmt: skip
    def route(function, x, weight, gate_up, down, *rest):
        *factors, index = rest
        options = dict(zip(("gate_up_bias", "down_bias"), factors, strict=True)) if biased else {}
        pairs = [] if biased else zip(factors[::2], factors[1::2], strict=True)
        updates = [GroupedLowRank(*pair, 0.5) for pair in pairs]
        activation = "clamped_silu" if biased else "silu"
        routing = index.flatten(0, 1), widen(weight).flatten(0, 1)
        return function(x.flatten(0, 1), *routing, gate_up, down, activation, *updates, **options).view(x.shape)

    index = torch.rand(batch, length, num_experts, device=DEVICE).topk(k).indices
    gate_up, down = normal(num_experts, 2 * inner, hidden, scale=0.2), normal(num_experts, hidden, inner, scale=0.2)
    leaves = [normal(batch, length, hidden), normal(batch, length, k), gate_up, down]
    if low_rank:
        sides = (RANK, hidden), (2 * inner, RANK), (RANK, inner), (hidden, RANK)
        leaves += [normal(num_experts, *side, scale=0.2) for side in sides]
    if biased:
        leaves += [normal(num_experts, 2 * inner, scale=4.0), normal(num_experts, hidden)]
    return Case(partial(route, ours), partial(route, experts_reference), leaves, [index])


def frozen_experts_case(*size) -> Case:
    """The case of updates with both weights, the third and fourth of its leaves, in NF4 and frozen."""
    case = experts_case(*size, low_rank=True)
    layouts = [Nf4(tuple(x.shape), (x.shape[:-1].numel(),), torch.float32) for x in case.leaves[2:4]]

    def compute(function, dequantize, x, weight, *rest):
        *updates, gate_up, down, index = rest
        own = [layout.with_dtype(x.dtype) for layout in layouts]
        return function(x, weight, *map(dequantize, (gate_up, down), own), *updates, index)

    ours, reference = (
        partial(compute, case.ours, QuantisedWeight),
        partial(compute, case.reference, nf4_dequantize_reference),
    )
    quantised = [layout.quantize(x) for layout, x in zip(layouts, case.leaves[2:4], strict=True)]
    return Case(ours, reference, [*case.leaves[:2], *case.leaves[4:]], [*quantised, *case.constants])


def few_rows_frozen_linear_case(batch, length, hidden, width) -> Case:
    """The same with a weight in NF4, in the place of a leaf."""
    case, (data, layout) = few_rows_linear_case(batch, length, hidden, width), draw_nf4(width, hidden)

    def compute(function, dequantize, *tensors):
        *leaves, bias, data = tensors
        return function(*leaves, dequantize(data, layout.with_dtype(bias.dtype)), bias)

    leaves = [*case.leaves[:4], case.leaves[5]]
    ours, reference = (
        partial(compute, case.ours, QuantisedWeight),
        partial(compute, case.reference, nf4_dequantize_reference),
    )
    return Case(ours, reference, leaves, [data])


def few_rows_experts_case(*size, **options) -> Case:
    case = experts_case(*size, ours=few_rows_experts, **options)
    return replace(case, ours=torch.no_grad()(case.ours), reference=torch.no_grad()(case.reference))


def draw_targets(batch: int, length: int, vocabulary: int) -> Tensor:
    targets = torch.randint(vocabulary, (batch, length), device=DEVICE)
    return torch.where(torch.rand(batch, length, device=DEVICE) < 0.2, -100, targets)


def cross_entropy_case(batch, length, vocabulary, **options) -> Case:
    ours, reference = (partial(f, **options) for f in (cross_entropy, cross_entropy_reference))
    return Case(ours, reference, [normal(batch, length, vocabulary)], [draw_targets(batch, length, vocabulary)])


def cross_entropy_in_place_case(batch, length, vocabulary, **options) -> Case:
    def ours(logits, targets):
        return cross_entropy(logits.clone(memory_format=torch.contiguous_format), targets, inplace=True, **options)

    return replace(cross_entropy_case(batch, length, vocabulary, **options), ours=ours)


def linear_cross_entropy_case(batch, length, hidden, vocabulary, **options) -> Case:
    ours, reference = (partial(f, **options) for f in (linear_cross_entropy, linear_cross_entropy_reference))
    leaves = [normal(batch, length, hidden), normal(vocabulary, hidden, scale=hidden**-0.5)]
    return Case(ours, reference, leaves, [draw_targets(batch, length, vocabulary)])


def low_memory_case(batch, length, hidden, vocabulary, **options) -> Case:
    case = linear_cross_entropy_case(batch, length, hidden, vocabulary, **options)
    return replace(case, ours=partial(linear_cross_entropy, low_memory=True, **options))


def linear_logprobs_case(batch, length, hidden, vocabulary, low_memory=False, **options) -> Case:
    """Log-probabilities and, with entropy=True, entropies."""

    def differentiable(function, **options):
        return lambda *inputs: tuple(x for x in function(*inputs, **options)[:2] if x is not None)

    ours = differentiable(linear_logprobs, low_memory=low_memory, **options)
    case = linear_cross_entropy_case(batch, length, hidden, vocabulary)
    return replace(case, ours=ours, reference=differentiable(linear_logprobs_reference, **options))


def sum_of_metrics(function: Function, **options) -> Function:
    """`function` of (..., targets, class weights), its loss and its metrics added up to one output."""

    def call(*inputs):
        output = function(*inputs[:-1], class_weight=inputs[-1], **options)
        return output.loss + output.z_loss + (output.entropy if output.loss.ndim else output.entropy.sum())

    return call


def weighted_cross_entropy_case(batch, length, vocabulary, inplace=False, **options) -> Case:
    def ours(logits, *constants):
        logits = logits.clone(memory_format=torch.contiguous_format) if inplace else logits
        return sum_of_metrics(cross_entropy_with_metrics, inplace=inplace, **options)(logits, *constants)

    reference = sum_of_metrics(cross_entropy_with_metrics_reference, **options)
    case = cross_entropy_case(batch, length, vocabulary)
    return Case(ours, reference, case.leaves, [*case.constants, 0.5 + torch.rand(vocabulary, device=DEVICE)])


def weighted_linear_cross_entropy_case(batch, length, hidden, vocabulary, low_memory=False, **options) -> Case:
    def with_bias(function, **options):
        return sum_of_metrics(
            lambda x, weight, bias, *rest, **kw: function(x, weight, *rest, bias=bias, **kw), **options
        )

    ours = with_bias(linear_cross_entropy_with_metrics, low_memory=low_memory, **options)
    reference = with_bias(linear_cross_entropy_with_metrics_reference, **options)
    case = linear_cross_entropy_case(batch, length, hidden, vocabulary)
    constants = [*case.constants, 0.5 + torch.rand(vocabulary, device=DEVICE)]
    return Case(ours, reference, [*case.leaves, normal(vocabulary)], constants)


def draw_student(batch, length, hidden, vocabulary) -> list[Tensor]:
    """Hidden states and a weight that half precision holds: autocast rounds it in every path, and a loss is one number,
    in which two errors may differ by chance."""
    weight = normal(vocabulary, hidden, scale=hidden**-0.5).bfloat16().float()
    return [normal(batch, length, hidden).bfloat16().float(), weight]


def linear_divergence_case(batch, length, hidden, vocabulary) -> Case:
    def from_model(function, student, weight, targets, *teacher):
        return function(student, weight, teacher, targets=targets).loss

    ours, reference = (partial(from_model, f) for f in (linear_divergence, linear_divergence_reference))
    size = batch, length, hidden, vocabulary
    return Case(ours, reference, draw_student(*size), [draw_targets(batch, length, vocabulary), *draw_student(*size)])


def divergences_case(batch, length, hidden, vocabulary) -> Case:
    """The sum of all kinds, from logits."""

    def from_logits(function, student, weight, targets, logits):
        return sum(function(student, weight, logits, kind=kind, targets=targets, **DISTILLED).loss for kind in KINDS)

    ours, reference = (partial(from_logits, f) for f in (linear_divergence, linear_divergence_reference))
    constants = draw_targets(batch, length, vocabulary), normal(batch, length, vocabulary).float()
    return Case(ours, reference, draw_student(batch, length, hidden, vocabulary), [*constants])


def top_k_divergence_case(batch, length, hidden, vocabulary, k, forms=({},)) -> Case:
    """The sum of several forms."""

    def from_top_k(function, student, weight, targets, *teacher):
        return sum(function(student, weight, teacher, targets=targets, **form).loss for form in forms)

    ours, reference = (partial(from_top_k, f) for f in (linear_divergence, linear_divergence_reference))
    ids = torch.rand(batch, length, vocabulary, device=DEVICE).topk(k).indices
    logprobs = normal(batch, length, k + 3).float().log_softmax(-1)[..., :k]
    constants = draw_targets(batch, length, vocabulary), ids, logprobs
    return Case(ours, reference, draw_student(batch, length, hidden, vocabulary), [*constants])


def attention_case(batch, length, heads, kv_heads, head_size, window) -> Case:
    settings = {"scale": head_size**-0.5, "window": window}
    leaves = [normal(batch, length, h, head_size) for h in (heads, kv_heads, kv_heads)]
    return Case(partial(attention, **settings), partial(attention_reference, **settings), leaves, [])


def gather_keys_case(batch, length, heads, head_size) -> Case:
    """Tokens with three copies and with one in turns."""

    def gather(function, x, ends, places):
        return function(x.flatten(0, 1)[None], F.pad(ends.flatten(), (1, 0)), places.flatten())

    token = torch.arange(batch * length, dtype=torch.int32, device=DEVICE).view(batch, length)
    ends = (2 * token + 3 - token % 2).clamp(max=2 * batch * length)
    places = torch.randperm(2 * batch * length, dtype=torch.int32, device=DEVICE).view(batch, length, 2)
    ours, reference = partial(gather, gather_keys), partial(gather, gather_keys_reference)
    return Case(ours, reference, [normal(batch, length, heads, head_size)], [ends, places])


def gated_delta_rule_case(batch, length, key_heads, key_size, value_heads, value_size, states=True) -> Case:
    """With states, the initial state is a leaf and the final state an output."""

    def rule(function, qkv, g, beta, initial_state=None):
        o, final = function(qkv, -F.softplus(widen(g)), widen(beta).sigmoid(), key_heads, key_size, initial_state)
        return (o, final.to(qkv.dtype)) if states else o

    columns = 2 * key_heads * key_size + value_heads * value_size
    leaves = [normal(batch, length, columns), normal(batch, length, value_heads), normal(batch, length, value_heads)]
    if states:
        leaves.append(normal(batch, value_heads, key_size, value_size))
    return Case(partial(rule, gated_delta_rule), partial(rule, gated_delta_rule_reference), leaves, [])


def gated_delta_step_case(batch, length, key_heads, key_size, value_heads, value_size) -> Case:
    """As many rows as tokens, in another order."""

    @torch.no_grad()
    def move(function, qkv, g, beta, pool, row):
        qkv, g, beta, row = (x.flatten(0, 1) for x in (qkv, g, beta, row))
        states = widen(pool).flatten(0, 1).clone(memory_format=torch.contiguous_format)
        outputs = function(qkv, -widen(g).square(), widen(beta).sigmoid(), key_heads, key_size, states, row)
        o, moved = (outputs, states) if function is gated_delta_step_ else outputs
        return o, moved.to(pool.dtype)

    rule = gated_delta_rule_case(batch, length, key_heads, key_size, value_heads, value_size, states=False)
    leaves = [*rule.leaves, normal(batch, length, value_heads, key_size, value_size)]
    row = torch.randperm(batch * length, device=DEVICE).view(batch, length)
    return Case(partial(move, gated_delta_step_), partial(move, gated_delta_step_reference), leaves, [row])


def mamba2_scan_case(batch, length, heads, head_size, groups, state_size, states=True) -> Case:
    """With states, the initial state is a leaf and the final state an output."""

    def scan(function, xbc, delta, a, d, initial_state=None):
        y, final = function(xbc, F.softplus(widen(delta)), -widen(a).square(), d, groups, state_size, initial_state)
        return (y, final.to(xbc.dtype)) if states else y

    columns = heads * head_size + 2 * groups * state_size
    leaves = [normal(batch, length, columns), normal(batch, length, heads), normal(heads), normal(heads)]
    if states:
        leaves.append(normal(batch, heads, state_size, head_size))
    return Case(partial(scan, mamba2_scan), partial(scan, mamba2_scan_reference), leaves, [])


def mamba2_step_case(batch, length, heads, head_size, groups, state_size) -> Case:
    """As many rows as tokens, in another order."""

    @torch.no_grad()
    def move(function, xbc, delta, a, d, pool, row):
        xbc, delta, row = (x.flatten(0, 1) for x in (xbc, delta, row))
        states = widen(pool).flatten(0, 1).clone(memory_format=torch.contiguous_format)
        delta, a = F.softplus(widen(delta)), -widen(a).square()
        outputs = function(xbc, delta, a, d, groups, state_size, states, row)
        y, moved = (outputs, states) if function is mamba2_step_ else outputs
        return y, moved.to(pool.dtype)

    leaves = mamba2_scan_case(batch, length, heads, head_size, groups, state_size, states=False).leaves
    row = torch.randperm(batch * length, device=DEVICE).view(batch, length)
    pool = normal(batch, length, heads, state_size, head_size)
    return Case(partial(move, mamba2_step_), partial(move, mamba2_step_reference), [*leaves, pool], [row])


def causal_conv_case(batch, length, channels, taps) -> Case:
    """The number of taps is no dimension of a leaf: it equals one of the lengths of test_contracts.py."""

    def convolve(function, x, weight, bias, initial_state):
        return function(x, weight.reshape(-1, taps), bias, "silu", initial_state.unflatten(1, (taps - 1, -1)))

    leaves = [normal(batch, length, channels), normal(channels * taps), normal(channels)]
    leaves.append(normal(batch, (taps - 1) * channels))
    return Case(partial(convolve, causal_conv), partial(convolve, causal_conv_reference), leaves, [])


def causal_conv_step_case(batch, length, channels, taps) -> Case:
    @torch.no_grad()
    def move(function, x, weight, pool, row):
        states = (
            pool.to(x.dtype).flatten(0, 1).unflatten(1, (taps - 1, -1)).clone(memory_format=torch.contiguous_format)
        )
        outputs = function(x.flatten(0, 1), weight.reshape(-1, taps), None, "silu", states, row.flatten())
        return (outputs, states) if function is causal_conv_step_ else outputs

    leaves = [normal(batch, length, channels), normal(channels * taps), normal(batch, length, (taps - 1) * channels)]
    row = torch.randperm(batch * length, device=DEVICE).view(batch, length)
    return Case(partial(move, causal_conv_step_), partial(move, causal_conv_step_reference), leaves, [row])


def gated_rms_norm_case(batch, length, heads, size, gate_first=False) -> Case:
    leaves = [normal(batch, length, heads, size), normal(batch, length, heads, size), normal(size)]
    ours, reference = (partial(f, gate_first=gate_first) for f in (gated_rms_norm, gated_rms_norm_reference))
    return Case(ours, reference, leaves, [])


def rounded_adamw_case(batch, length, width, compensated, eight_bits=False) -> Case:
    """Rounding of the same updated bf16 parameter; test_param_rounding.py compares it with the references."""
    hyperparameters = 1e-2, 0.9, 0.999, 1e-8, 0.1

    @torch.no_grad()
    def update(param, grad, step):
        tensors = [x.contiguous().to(torch.bfloat16, copy=True) for x in (param, grad)]
        left_over = torch.zeros_like(tensors[0]) if compensated else None
        if eight_bits:
            codes, scale = (
                torch.zeros_like(tensors[0], dtype=torch.uint8),
                step.new_zeros(*param.shape[:2], width // 64),
            )
            tensors += [codes, scale, codes.clone(), scale.clone()]
            adamw8bit_(*tensors, *hyperparameters, step, None, None, left_over, None if compensated else 3)
        else:
            tensors += [torch.zeros_like(tensors[0]) for _ in range(2)]
            adamw_(*tensors, *hyperparameters, step, None, None, left_over, None if compensated else 3)
        return tensors[0].to(param.dtype)

    return Case(update, update, [normal(batch, length, width) for _ in range(2)], [torch.tensor(3.0, device=DEVICE)])


def adamw_case(batch, length, width) -> Case:
    hyperparameters = 1e-2, 0.9, 0.999, 1e-8, 0.1

    @torch.no_grad()
    def ours(param, grad, exp_avg, exp_avg_sq, step):
        updated = param.clone(), exp_avg.clone(), exp_avg_sq.clone()
        adamw_(updated[0], grad, *updated[1:], *hyperparameters, step)
        return updated

    @torch.no_grad()
    def reference(param, grad, exp_avg, exp_avg_sq, step):
        return adamw_reference(param, grad, exp_avg, exp_avg_sq, *hyperparameters, step)

    tensors = [normal(batch, length, width) for _ in range(4)]
    tensors[3] = tensors[3].square() + 0.1
    return Case(ours, reference, tensors, [torch.tensor(3.0, device=DEVICE)])


def adamw8bit_case(batch, length, width) -> Case:
    """The moments are constants; of the results the codes are left to test_adamw8bit.py."""
    hyperparameters = 1e-2, 0.9, 0.999, 1e-8, 0.1

    @torch.no_grad()
    def ours(param, grad, *states_and_step):
        param, *states = (x.clone() for x in (param, *states_and_step[:-1]))
        adamw8bit_(param, grad, *states, *hyperparameters, states_and_step[-1])
        return param, states[1].to(param.dtype), states[3].to(param.dtype)

    @torch.no_grad()
    def reference(param, grad, *states_and_step):
        *states, step = states_and_step
        param, _, scale, _, scale_sq = adamw8bit_reference(param, grad, *states, *hyperparameters, step)
        return param, scale.to(param.dtype), scale_sq.to(param.dtype)

    shape, states = (batch, length, width), []
    for x, signed in ((normal(*shape), True), (normal(*shape).square(), False)):
        codes, scale = encode_reference(x.view(-1, 64), signed)
        states += [codes.view(shape), scale.view(batch, length, width // 64)]
    return Case(ours, reference, [normal(*shape), normal(*shape)], [*states, torch.tensor(3.0, device=DEVICE)])


def decode_attention_case(batch, length, heads, kv_heads, head_size, only_one=False, **options) -> Case:
    """Each token is a row of its own, with a length of up to three blocks in a pool of five.

    only_one: the op is called on the first row alone, whose keys are then split.
    """

    def attend(function, q, keys, values, table, lengths):
        pools = [x.to(q.dtype) for x in (keys, values)]
        q, table, lengths = (x.flatten(0, 1)[: 1 if only_one else None] for x in (q, table, lengths))
        with torch.no_grad():
            return function(q, *pools, table, lengths, scale=head_size**-0.5, page_size=64, **options)

    # Exact in half precision too: constants keep their dtype.
    pools = [normal(5 * 64, kv_heads, head_size).bfloat16().float() for _ in range(2)]
    table = torch.randint(5, (batch, length, 3), device=DEVICE, dtype=torch.int32)
    lengths = torch.randint(3 * 64 + 1, (batch, length), device=DEVICE)
    ours, reference = (partial(attend, f) for f in (decode_attention, decode_attention_reference))
    return Case(ours, reference, [normal(batch, length, heads, head_size)], [*pools, table, lengths])


def latent_attention_case(batch, length, heads, head_size, value_size) -> Case:
    """`decode_attention_case` with one wide key for all heads, whose first columns are the value."""
    case = decode_attention_case(batch, length, heads, 1, head_size)
    pool, _, table, lengths = case.constants

    def attend(function, q, pool, table, lengths):
        q, table, lengths = (x.flatten(0, 1) for x in (q, table, lengths))
        options = {"scale": head_size**-0.5, "page_size": 64, "value_size": value_size}
        with torch.no_grad():
            return function(q, pool.to(q.dtype), None, table, lengths, **options)

    ours, reference = (partial(attend, f) for f in (decode_attention, decode_attention_reference))
    return Case(ours, reference, case.leaves, [pool, table, lengths])


def cache_write_case(batch, length, heads, kv_heads, head_size) -> Case:
    """The ops that write to a cache, each with a cache of its own: their outputs, and what they wrote.

    The norms are those of whole rows, then those of heads, which have the first weights of those.
    """

    def write_all(plain, rope, qk_norm, qkv, q_weight, k_weight, cos, sin, slots):
        settings = cos, sin, heads, kv_heads
        of_heads = q_weight[:head_size], k_weight[:head_size]
        ops = (
            lambda qkv, cache: plain(*split_heads(qkv, heads, kv_heads)[1:], cache),
            lambda qkv, cache: rope(qkv, *settings, False, cache),
            lambda qkv, cache: qk_norm(qkv, q_weight, k_weight, *settings, EPS, 0.0, cache),
            lambda qkv, cache: qk_norm(qkv, *of_heads, *settings, EPS, 0.0, cache),
        )
        outputs = []
        with torch.no_grad():
            for op in ops:
                keys, values = (qkv.new_zeros(4096, kv_heads, head_size) for _ in range(2))
                cache = CacheSlots(keys, values, slots.flatten().contiguous())
                consumed = qkv.clone(memory_format=torch.contiguous_format)
                outputs += [*(op(consumed, cache) or ()), keys, values]
        return tuple(outputs)

    def then_write(rotate):
        def call(*inputs):
            q, k, v = rotate(*inputs[:-1])
            write_cache_reference(k, v, *inputs[-1])
            return q, k, v

        return call

    def plain_reference(k, v, cache):
        write_cache_reference(k, v, *cache)

    ours = partial(write_all, write_cache, rope_write_cache_, qk_norm_rope_write_cache)
    references = plain_reference, then_write(rope_reference), then_write(qk_norm_rope_reference)
    qkv = normal(batch, length, (heads + 2 * kv_heads) * head_size)
    slots = torch.randperm(4096, device=DEVICE)[: batch * length].view(batch, length)
    weights = normal(heads * head_size), normal(kv_heads * head_size)
    return Case(ours, partial(write_all, *references), [qkv, *weights], [*angles(length, head_size), slots])


def few_rows_linear_case(batch, length, hidden, width) -> Case:
    """The three linears of few rows, of the first three rows."""

    def multiply_all(plain, norm, gated, x, residual, gate_up, norm_weight, weight, bias):
        x, residual, gate_up = (y.flatten(0, 1)[:3] for y in (x, residual, gate_up))
        with torch.no_grad():
            normed = norm(x, residual, norm_weight, weight, bias, EPS)
            return plain(x, weight), *normed, gated(gate_up, weight, None, "silu")

    ours = partial(multiply_all, few_rows_linear, few_rows_norm_linear, few_rows_gated_linear)
    reference = partial(multiply_all, F.linear, norm_linear_reference, gated_linear_reference)
    stream = [normal(batch, length, hidden), normal(batch, length, hidden), normal(batch, length, 2 * hidden)]
    return Case(ours, reference, [*stream, normal(hidden), normal(width, hidden, scale=0.1), normal(width)], [])


def sample_case(batch, length, vocabulary, filters=True) -> Case:
    """Rows are greedy, with temperature alone, and with filters, in turn."""
    rows = torch.arange(batch * length, device=DEVICE).view(batch, length)
    temperature = (rows % 3 > 0).float()
    settings = [rows % 3 // 2 * 5, 1 - rows % 3 * 0.1, rows % 3 * 0.01] if filters else []
    counters = torch.stack([rows, rows + 7], -1)

    def under(function):
        def call(logits, temperature, seeds, counters, *settings):
            top_k, top_p, min_p = (x.flatten() for x in settings) if settings else (None,) * 3
            top_k = top_k.int() if filters else None
            arguments = logits.flatten(0, 1), temperature.flatten(), top_k, top_p, min_p
            tokens, logprobs = function(*arguments, seeds.flatten(), counters.flatten(0, 1))
            return tokens.float(), logprobs

        return call

    logits = normal(batch, length, vocabulary, scale=3.0)
    return Case(under(sample), under(sample_reference), [logits], [temperature, rows + 3, counters, *settings])


def penalty_case(batch, length, vocabulary) -> Case:
    def under(function):
        @torch.no_grad()
        def call(logits, table, *penalties):
            return function(logits.flatten(0, 1), table.flatten(0, 1), *(x.flatten() for x in penalties))

        return call

    table = torch.randint(4, (batch, length, vocabulary), dtype=torch.int32, device=DEVICE)
    penalties = [torch.rand(batch, length, device=DEVICE) + 0.5 for _ in range(3)]
    logits = normal(batch, length, vocabulary)
    return Case(under(penalize), under(penalize_reference), [logits], [table, *penalties])


def run_all_kernels(name: str, case: Case) -> None:
    """Runs all kernels of a case: norms have other variants if their inputs are frozen, log-probabilities if the head
    is."""
    cases = [case]
    if "norm" in name:
        cases.append(case.freeze_inputs())
    if "logprobs" in name:
        cases.append(case.train_only(0))
    for trained in cases:
        trained.run()


def run_chunked_norm() -> None:
    """Runs the kernel for rows of certain widths, which are too long to be in the table."""
    for columns in CHUNKED_WIDTHS:
        case = norm_case(1, 32, columns).to(torch.bfloat16)
        case.forward(case.ours)


MULTIPLIERS = {"gate_multiplier": 0.75, "down_multiplier": -1.25}
ALL_OPTIONS = {"softcap": 5.0, "logit_scale": 1.5, "z_loss": 0.02, "label_smoothing": 0.1}
STUDENT = {"temperature": 1.5, "softcap": 5.0, "logit_scale": 1.5, "ce_weight": 0.3}
DISTILLED = {**STUDENT, "teacher_softcap": 4.0, "teacher_logit_scale": 0.8}
TOP_K_FORMS = {"kind": "forward_kl", **STUDENT}, {"kind": "reverse_kl", **STUDENT}, {"tail": False, **STUDENT}
SCALED = {**ALL_OPTIONS, "token_scaling": True}
LOGPROB_OPTIONS = {"softcap": 5.0, "logit_scale": 1.5, "temperature": 0.7, "entropy": True, "extras": ("greedy",)}

OPS = {
    "rms_norm": Op(
        draw=norm_case, small=(33,), real=tuple((h,) for h in (128, *HIDDEN)), huge=(2**17 + 1, 2**14)
    ),
    "add_rms_norm": Op(
        draw=add_norm_case, small=(33,), real=tuple((h,) for h in HIDDEN), huge=(2**17 + 1, 2**14)
    ),
    "rms_norm without weight": Op(draw=norm_without_weight_case, small=(33,), real=((4096,), (8192,))),
    "add_rms_norm without weight": Op(
        draw=partial(norm_without_weight_case, add=True), small=(33,), real=((4096,), (16384,))
    ),
    # At most 1024 columns: where x has more than 2^31 elements, cuBLAS 13.0 loses rows of dyᵀ x for a dy of 16 columns.
    "layer_norm": Op(
        draw=layer_norm_case, small=(33,), real=tuple((h,) for h in HIDDEN), huge=(2**17 + 1, 2**14)
    ),
    "layer_norm without bias": Op(draw=layer_norm_without_bias_case, small=(33,), real=((8192,),)),
    "norm_linear": Op(
        draw=norm_linear_case, small=(33, 7), real=tuple((h, 64) for h in HIDDEN), huge=(2**17 + 1, 2**14, 1024),
        products=(2, 1, 1, 1, 1, 0),
    ),
    "norm_linear with a low-rank update": Op(draw=low_rank_norm_linear_case, small=(33, 9)),
    # Not 16384 columns: sums of both gradients, the normed values and their bias need more registers than a thread has.
    "layer_norm_linear": Op(
        draw=layer_norm_linear_case, small=(33, 7), real=tuple((h, 64) for h in HIDDEN[:-1]),
        huge=(2**17 + 1, 2**14, 1024), products=(2, 1, 1, 1, 1, 1, 0),
    ),
    "layer_norm_linear with a low-rank update": Op(draw=low_rank_layer_norm_linear_case, small=(33, 9)),
    "low_rank_linear": Op(draw=low_rank_linear_case, small=(33, 9)),
    "frozen_linear": Op(
        draw=frozen_linear_case, small=(64, 7), real=((4096, 64), (2880, 512)), huge=None, products=(1, 1, 0)
    ),
    "frozen_linear in FP8": Op(
        draw=partial(frozen_linear_case, draw=draw_fp8, dequantize=fp8_dequantize_reference), small=(64, 7),
        real=((4096, 64),),
    ),
    "frozen_linear in MXFP4": Op(
        draw=partial(frozen_linear_case, draw=draw_mxfp4, dequantize=mxfp4_reference), small=(64, 7),
        real=((2880, 64),),
    ),
    "norm_linear of a frozen weight": Op(draw=frozen_norm_linear_case, small=(64, 9)),
    "layer_norm_linear of a frozen weight": Op(draw=frozen_layer_norm_linear_case, small=(64, 9)),
    "gated_linear of a frozen weight": Op(draw=frozen_gated_linear_case, small=(64, 9)),
    "nf4_encode": Op(draw=nf4_encode_case, small=(192,), real=((4096,),), has_gradients=False),
    "rope": Op(draw=rope_case, small=(5, 3, 20), real=HEADS, huge=(2**17 + 1, 96, 16, 128)),
    "rope, partial and interleaved": Op(
        draw=partial(rope_case, interleaved=True), small=(5, 1, 12), real=((32, 2, 128),), huge=(2**17 + 1, 96, 16, 128)
    ),
    "qk_norm_rope": Op(draw=qk_norm_rope_case, small=(5, 3, 20), real=HEADS, huge=(2**17 + 1, 96, 16, 128)),
    "qk_norm_rope of whole rows": Op(
        draw=partial(qk_norm_rope_case, whole_row=True), small=(3, 1, 12), real=((32, 32, 128), (40, 8, 128)),
        huge=(2**17 + 1, 96, 16, 128),
    ),
    "swiglu": Op(
        draw=gated_case, small=(33,), real=((1024,), (2880,), (8192,), (14336,), (28672,)), huge=(2**16 + 1, 2**14)
    ),
    "geglu": Op(draw=partial(gated_case, activation="gelu"), small=(33,), real=((8192,), (14336,))),
    "geglu with tanh, in place": Op(
        draw=partial(gated_in_place_case, activation="gelu_tanh"), small=(33,), real=((8192,), (14336,))
    ),
    "swiglu of gate and up": Op(
        draw=gate_and_up_case, small=(33,), real=((2880,), (14336,)), huge=(2**17 + 1, 2**14)
    ),
    "swiglu of gate and up, with multipliers, in place": Op(
        draw=partial(gate_and_up_in_place_case, **MULTIPLIERS), small=(33,), real=((14336,),)
    ),
    "gated_linear with multipliers": Op(
        draw=partial(gated_linear_case, **MULTIPLIERS), small=(33, 7), real=((14336, 64),), products=(2, 1, 1, 0)
    ),
    "gated_linear": Op(
        draw=gated_linear_case, small=(33, 7), real=((14336, 64),), huge=(2**16 + 1, 2**14, 16), products=(2, 1, 1, 0)
    ),
    "gated_linear with a low-rank update": Op(draw=low_rank_gated_linear_case, small=(33, 9)),
    "plain_activation": Op(draw=plain_case, small=(33,), real=((5120,),), huge=(2**17 + 1, 2**14)),
    "plain_activation of gelu": Op(draw=partial(plain_case, activation="gelu"), small=(33,)),
    "activated_linear": Op(draw=activated_linear_case, small=(33, 7), real=((5120, 64),), products=(2, 1, 1, 0)),
    "activated_linear with a low-rank update": Op(draw=low_rank_activated_linear_case, small=(33, 9)),
    "experts": Op(
        draw=experts_case, small=(20, 11, 5, 3), real=((2048, 768, 128, 8), (4096, 14336, 8, 2)),
        huge=(2**18 + 1, 4096, 16, 4, 2), products=(2, 1, 1 / 3, 1, 1 / 3),
    ),
    "experts with biases and a clamped activation": Op(
        draw=partial(experts_case, biased=True), small=(20, 11, 5, 3), real=((2880, 2880, 32, 4),),
        products=(2, 1, 1 / 3, 1, 1 / 3, 1 / 3, 0),
    ),
    "experts with low-rank updates": Op(draw=partial(experts_case, low_rank=True), small=(20, 11, 3, 1)),
    "experts of frozen weights": Op(draw=frozen_experts_case, small=(64, 64, 3, 2)),
    "cross_entropy": Op(
        draw=partial(cross_entropy_case, reduction="none"), small=(257,), real=tuple((v,) for v in VOCABULARIES),
        huge=(2**13 + 1, 2**18),
    ),
    "cross_entropy, all options": Op(
        draw=partial(cross_entropy_case, **ALL_OPTIONS), small=(257,), real=tuple((v,) for v in VOCABULARIES)
    ),
    "cross_entropy in place": Op(
        draw=cross_entropy_in_place_case, small=(257,), real=tuple((v,) for v in VOCABULARIES)
    ),
    "cross_entropy in place, all options": Op(  # also with rows that are not aligned to vectors
        draw=partial(cross_entropy_in_place_case, **ALL_OPTIONS), small=(257,), real=((50257,),)
    ),
    "linear_cross_entropy": Op(
        draw=linear_cross_entropy_case, small=(17, 33), real=((64, 128256), (64, 262144)), products=(2, 1, 1)
    ),
    "linear_cross_entropy, all options": Op(
        draw=partial(linear_cross_entropy_case, **ALL_OPTIONS), small=(17, 33), real=((64, 128256), (64, 262144)),
        products=(2, 1, 1),
    ),
    "linear_cross_entropy of few rows": Op(draw=linear_cross_entropy_case, small=(17, 48), products=(2, 1, 1)),
    "linear_cross_entropy by rows": Op(
        draw=partial(linear_cross_entropy_case, reduction="none"), small=(17, 33), real=((16, 128256), (16, 262144)),
        huge=(2**18 + 1, 2**13, 64), products=(3, 2, 2),
    ),
    "linear_cross_entropy, low memory": Op(
        draw=low_memory_case, small=(17, 33), real=((16, 128256), (16, 262144)), products=(3, 1, 2)
    ),
    "linear_cross_entropy of few rows, low memory": Op(draw=low_memory_case, small=(64, 128), products=(2, 1, 1)),
    "linear_cross_entropy by rows, low memory": Op(
        draw=partial(low_memory_case, reduction="none"), small=(17, 33), real=((16, 128256), (16, 262144)),
        products=(4, 2, 2),
    ),
    # With class weights, a bias of the projection, token scaling and all metrics.
    "cross_entropy, weighted": Op(
        draw=partial(weighted_cross_entropy_case, reduction="none", **SCALED), small=(257,), real=((262144,),)
    ),
    "cross_entropy in place, weighted": Op(
        draw=partial(weighted_cross_entropy_case, inplace=True, **SCALED), small=(257,), real=((50257,), (262144,))
    ),
    "linear_cross_entropy, weighted": Op(
        draw=partial(weighted_linear_cross_entropy_case, **SCALED), small=(33, 129), real=((64, 262144),),
        products=(2, 1, 1, 0),
    ),
    "linear_cross_entropy by rows, weighted": Op(
        draw=partial(weighted_linear_cross_entropy_case, reduction="none", **SCALED), small=(17, 33),
        real=((16, 262144),), products=(3, 2, 2, 1),
    ),
    "linear_cross_entropy, low memory, weighted": Op(
        draw=partial(weighted_linear_cross_entropy_case, low_memory=True, **SCALED), small=(17, 33),
        real=((16, 262144),), products=(3, 1, 2, 0),
    ),
    "linear_cross_entropy by rows, low memory, weighted": Op(
        draw=partial(weighted_linear_cross_entropy_case, low_memory=True, reduction="none", **SCALED), small=(17, 33),
        real=((16, 262144),), products=(4, 2, 2, 1),
    ),
    "linear_logprobs": Op(
        draw=linear_logprobs_case, small=(17, 33), real=((16, 128256), (16, 262144)), huge=(2**18 + 1, 2**13, 64),
        products=(3, 1, 2),
    ),
    "linear_logprobs, all options": Op(
        draw=partial(linear_logprobs_case, **LOGPROB_OPTIONS), small=(17, 33), real=((16, 262144),), products=(3, 2, 2)
    ),
    "linear_logprobs of few rows": Op(draw=linear_logprobs_case, small=(17, 48), products=(3, 1, 2)),
    "linear_logprobs, low memory": Op(
        draw=partial(linear_logprobs_case, low_memory=True, **LOGPROB_OPTIONS), small=(17, 33), real=((16, 262144),),
        products=(4, 2, 2),
    ),
    "linear_divergence": Op(
        draw=linear_divergence_case, small=(17, 33), real=((64, 128256), (64, 262144)),
        products=(1, 0.5, 0.5),
    ),
    "linear_divergence, all kinds, all options": Op(draw=divergences_case, small=(17, 33), real=((64, 262144),)),
    "linear_divergence from top-k": Op(
        draw=top_k_divergence_case, small=(17, 33, 5), real=((64, 262144, 64),),
        products=(2, 1, 1),
    ),
    "linear_divergence from top-k, all forms, all options": Op(
        draw=partial(top_k_divergence_case, forms=TOP_K_FORMS), small=(17, 33, 5), real=((64, 262144, 64),)
    ),
    # Not our kernels: the backend that runs anywhere. test_attention.py covers softcaps, document masking and caches.
    "attention": Op(draw=attention_case, small=(6, 3, 16, None)),
    "attention with a window": Op(draw=attention_case, small=(6, 3, 16, 1)),
    "adamw": Op(draw=adamw_case, small=(33,), real=((4096,),), huge=(2**17 + 1, 2**14), has_gradients=False),
    "adamw8bit": Op(
        draw=adamw8bit_case, small=(192,), real=((4096,),), huge=(2**17 + 1, 2**14), has_gradients=False
    ),
    **{
        f"adamw{'8bit' * eight_bits}, {'compensated' if compensated else 'stochastic'}": Op(
            draw=partial(rounded_adamw_case, compensated=compensated, eight_bits=eight_bits), small=(192,),
            real=((4096,),), has_gradients=False,
        )
        for compensated, eight_bits in product((False, True), repeat=2)
    },
    "experts of few rows": Op(
        draw=few_rows_experts_case, small=(20, 11, 5, 3), real=((2048, 768, 128, 8), (4096, 14336, 8, 2)),
        has_gradients=False,
    ),
    "biased experts of few rows": Op(
        draw=partial(few_rows_experts_case, biased=True), small=(20, 11, 5, 3), real=((2880, 2880, 32, 4),),
        has_gradients=False,
    ),
    "linears of few rows": Op(
        draw=few_rows_linear_case, small=(33, 7), real=((896, 1152), (4096, 6144), (14336, 4096)), has_gradients=False,
        more_variants=((1, 1), (2, 1)),
    ),
    "few_rows_linear of a frozen weight": Op(
        draw=few_rows_frozen_linear_case, small=(64, 7), real=((14336, 4096),), has_gradients=False,
        more_variants=((1, 1), (2, 1)),
    ),
    "cache writes": Op(draw=cache_write_case, small=(5, 3, 20), real=HEADS, has_gradients=False),
    "decode_attention": Op(
        draw=decode_attention_case, small=(6, 3, 20), real=(*HEADS, (14, 2, 64), (16, 1, 256)), has_gradients=False,
        more_variants=((1, 1),),
    ),
    "decode_attention of one row, with a window and a softcap": Op(
        draw=partial(decode_attention_case, only_one=True, window=70, softcap=50.0), small=(6, 3, 20),
        real=((64, 8, 64), (8, 4, 256), (16, 1, 256)), has_gradients=False,
    ),
    "decode_attention over latents": Op(
        draw=latent_attention_case, small=(20, 40, 32), real=((20, 576, 512), (128, 576, 512)), has_gradients=False
    ),
    "sample": Op(
        draw=sample_case, small=(300,), real=tuple((v,) for v in VOCABULARIES), huge=(2**13 + 1, 2**18),
        has_gradients=False,
    ),
    "sample without filters": Op(
        draw=partial(sample_case, filters=False), small=(300,), real=tuple((v,) for v in VOCABULARIES),
        has_gradients=False,
    ),
    "penalize": Op(
        draw=penalty_case, small=(300,), real=tuple((v,) for v in VOCABULARIES), huge=(2**13 + 1, 2**18),
        has_gradients=False,
    ),
    "gather_keys": Op(draw=gather_keys_case, small=(3, 20), real=((8, 128), (4, 256))),
    "gated_delta_rule": Op(
        draw=gated_delta_rule_case, small=(2, 20, 6, 12), real=((16, 128, 32, 128), (16, 128, 48, 128)),
        more_variants=((3, 16),),
    ),
    # So few programs that outputs have a kernel of their own.
    "gated_delta_rule of one head": Op(
        draw=partial(gated_delta_rule_case, states=False), small=(1, 20, 1, 12), real=((1, 128, 1, 64),)
    ),
    "gated_delta_step": Op(
        draw=gated_delta_step_case, small=(2, 20, 6, 12), real=((16, 128, 48, 128),), has_gradients=False
    ),
    "mamba2_scan": Op(
        draw=mamba2_scan_case, small=(6, 12, 3, 20), real=((48, 64, 1, 128), (128, 64, 1, 128)),
        more_variants=((1, 16),),
    ),
    "mamba2_scan of one head": Op(
        draw=partial(mamba2_scan_case, states=False), small=(1, 12, 1, 20), real=((1, 64, 1, 128),)
    ),
    "mamba2_step": Op(
        draw=mamba2_step_case, small=(6, 12, 3, 20), real=((128, 64, 1, 128),), has_gradients=False
    ),
    "causal_conv": Op(draw=causal_conv_case, small=(37, 4), real=((8192, 4), (10240, 4))),
    "causal_conv_step": Op(draw=causal_conv_step_case, small=(37, 4), real=((10240, 4),), has_gradients=False),
    "gated_rms_norm": Op(draw=gated_rms_norm_case, small=(3, 20), real=((32, 128), (48, 128))),
    "gated_rms_norm, the gate first": Op(
        draw=partial(gated_rms_norm_case, gate_first=True), small=(3, 20), real=((1, 3072), (1, 8192))
    ),
}  # fmt: skip
