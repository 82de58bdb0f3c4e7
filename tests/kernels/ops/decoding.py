"""Generation, where rows are few: caches, attention over them, linears, penalties, sampling."""

from functools import partial

import torch
import torch.nn.functional as F

from ligermodels.kernels.attention.qk_norm_rope import qk_norm_rope_reference
from ligermodels.kernels.attention.qkv_heads import split_heads
from ligermodels.kernels.attention.rope import rope_reference
from ligermodels.kernels.decoding.cache_write import (
    CacheSlots,
    qk_norm_rope_write_cache,
    rope_write_cache_,
    write_cache,
    write_cache_reference,
)
from ligermodels.kernels.decoding.decode_attention import decode_attention, decode_attention_reference
from ligermodels.kernels.decoding.few_rows_linear import few_rows_gated_linear, few_rows_linear, few_rows_norm_linear
from ligermodels.kernels.decoding.sample import sample, sample_reference
from ligermodels.kernels.decoding.sample_filters import penalize, penalize_reference
from ligermodels.kernels.linear.linear import gated_linear_reference, norm_linear_reference
from tests.conftest import DEVICE
from tests.kernels.ops.attention import angles
from tests.kernels.ops.base import EPS, HEADS, VOCABULARIES, Case, Op, normal


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

    def under(function):
        def call(logits, temperature, seeds, rows, *settings):
            top_k, top_p, min_p = (x.flatten() for x in settings) if settings else (None,) * 3
            top_k = top_k.int() if filters else None
            arguments = logits.flatten(0, 1), temperature.flatten(), top_k, top_p, min_p
            # Here, because their 2 is no batch or length.
            counters = torch.stack([rows, rows + 7], -1).flatten(0, 1)
            tokens, logprobs = function(*arguments, seeds.flatten(), counters)
            return tokens.float(), logprobs

        return call

    logits = normal(batch, length, vocabulary, scale=3.0)
    return Case(under(sample), under(sample_reference), [logits], [temperature, rows + 3, rows, *settings])


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


OPS = {
    "linears of few rows": Op(
        draw=few_rows_linear_case, small=(33, 7), real=((896, 1152), (4096, 6144), (14336, 4096)), has_gradients=False,
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
}  # fmt: skip
