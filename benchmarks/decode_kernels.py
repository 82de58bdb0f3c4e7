"""The kernels of a generation step beside torch's, each in a CUDA graph of many calls.

    python -m benchmarks.decode_kernels
    python -m benchmarks.decode_kernels attention --set decoding.decode_attention.STAGES=2

The calls of a graph work on different weights or caches in turn, together several times as large as the L2 cache.
GB/s counts what must be read: weights, or the keys and values that the queries see. The share is that of the rate of a
copy, measured in the same run. Outputs are compared with the reference before anything is timed.
"""

import argparse
import ast
import functools
import importlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import results, timing
from ligermodels.kernels.attention.rope import rope_, rope_reference
from ligermodels.kernels.decoding.cache_write import CacheSlots, rope_write_cache_
from ligermodels.kernels.decoding.decode_attention import decode_attention, decode_attention_reference
from ligermodels.kernels.decoding.few_rows_experts import few_rows_experts
from ligermodels.kernels.decoding.few_rows_linear import (
    MAX_ROWS,
    few_rows_gated_linear,
    few_rows_linear,
    few_rows_norm_linear,
)
from ligermodels.kernels.linear.linear import gated_linear, gated_linear_reference, norm_linear, norm_linear_reference
from ligermodels.kernels.moe.experts import experts, experts_reference, route

DEVICE, DTYPE = "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16
CALLS, REPLAYS = 40, 10  # calls of a graph, at least; replays, of which the median counts
CACHES = 3  # the sets of inputs together are so many L2 caches large, at least
MAX_ERROR = 2e-2  # relative, Frobenius norm: several roundings to bf16
PAGE = 128
COLUMNS = "{:12} {:34} {:22} {:>9} {:>8} {:>9}  {}"

Call = Callable[[], Tensor]


class Case(NamedTuple):
    """One shape: what it must read, and how each provider makes its calls, one for each set of inputs."""

    group: str
    shape: str
    bytes: int
    reference: Call  # of the first set
    providers: dict[str, Callable[[], Sequence[Call]]]


class AttentionShape(NamedTuple):
    rows: int
    length: int
    heads: int
    kv_heads: int
    size: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    ragged: bool = False  # lengths from 1 to 2 length - 1 instead of equal ones


ATTENTION = [
    AttentionShape(64, 768, 32, 8, 128),
    AttentionShape(256, 1000, 32, 8, 128),
    AttentionShape(256, 1000, 32, 8, 128, ragged=True),
    AttentionShape(1, 2048, 32, 8, 128),
    AttentionShape(1, 32768, 32, 8, 128),
    AttentionShape(64, 2048, 8, 4, 256, softcap=50.0),
    AttentionShape(64, 768, 14, 2, 64),
    AttentionShape(1, 768, 14, 2, 64),
    AttentionShape(64, 2048, 64, 8, 64, sinks=True),
    AttentionShape(64, 2048, 64, 8, 64, window=128, sinks=True),
]
ROWS = 1, 2, 4, 8, 16
LINEARS = [
    *[(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256)],  # Llama-3-8B: inputs, outputs
    *[(896, 1152), (896, 896), (896, 9728), (4864, 896), (896, 151936)],  # Qwen2-0.5B
]
NORM_LINEARS = [(4096, 6144), (4096, 28672), (896, 1152), (896, 9728)]
GATED_LINEARS = [(14336, 4096), (4864, 896)]
FUSED_ROWS = 1, 4
EXPERTS = 2048, 768, 128, 8  # hidden, intermediate, experts, experts per token: Qwen3-30B-A3B


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, device=DEVICE, dtype=DTYPE)


def num_sets(size: int) -> int:
    """How many sets of inputs of `size` bytes are CACHES times as large as the L2 cache."""
    cache = torch.cuda.get_device_properties().L2_cache_size if DEVICE == "cuda" else size
    return max(1, math.ceil(CACHES * cache / size))


def attention_cases() -> Iterator[Case]:
    for shape in ATTENTION:
        yield attention_case(shape)


def attention_case(shape: AttentionShape) -> Case:
    rows, length, heads, kv_heads, size, window, softcap, with_sinks, ragged = shape
    lengths = torch.randint(1, 2 * length, (rows,)) if ragged else torch.full((rows,), length)
    seen = lengths if window is None else lengths.clamp_max(window)
    total = 2 * 2 * int(seen.sum()) * kv_heads * size
    max_blocks = math.ceil((2 * length if ragged else length) / PAGE)
    sets = num_sets(total)
    keys, values = (draw(sets * rows * max_blocks * PAGE, kv_heads, size) for _ in range(2))
    tables = torch.randperm(sets * rows * max_blocks, device=DEVICE).view(sets, rows, max_blocks).int()
    q, lengths = draw(rows, heads, size), lengths.to(DEVICE)
    settings: dict[str, Any] = {
        "scale": size**-0.5, "window": window, "softcap": softcap, "page_size": PAGE,
        "sinks": draw(heads) if with_sinks else None,
    }  # fmt: skip

    def with_table(function: Callable, table: Tensor) -> Call:
        return functools.partial(function, q, keys, values, table, lengths, **settings)

    def ours() -> Sequence[Call]:
        return [with_table(decode_attention, table) for table in tables]

    def sdpa() -> Sequence[Call]:
        """On contiguous rows of equal length, without pages."""
        if ragged or window or softcap or with_sinks:
            raise NotImplementedError("equal lengths alone, without window, softcap and sinks")
        blocks = (x.unflatten(0, (-1, PAGE)) for x in (keys, values))
        pools = [x[tables.flatten()].view(sets, rows, -1, kv_heads, size).transpose(2, 3) for x in blocks]

        def attend(k: Tensor, v: Tensor) -> Tensor:
            k, v = k[:, :, :length], v[:, :, :length]
            out = F.scaled_dot_product_attention(q[:, :, None], k, v, scale=size**-0.5, enable_gqa=True)
            return out[:, :, 0]

        return [functools.partial(attend, k, v) for k, v in zip(*pools, strict=True)]

    def flash_attention_4() -> Sequence[Call]:
        from flash_attn.cute import flash_attn_varlen_func

        offsets = torch.arange(rows + 1, device=DEVICE, dtype=torch.int32)
        k, v = (x.unflatten(0, (-1, PAGE)) for x in (keys, values))
        used = lengths.int()

        def attend(table: Tensor) -> Tensor:
            out = flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=offsets, max_seqlen_q=1, seqused_k=used, page_table=table, causal=True,
                softmax_scale=settings["scale"], window_size=(window - 1 if window else None, None),
                softcap=softcap or 0.0, learnable_sink=settings["sinks"],
            )  # fmt: skip
            return out if isinstance(out, Tensor) else out[0]

        return [functools.partial(attend, table) for table in tables]

    def torch_varlen() -> Sequence[Call]:
        """FlashAttention 2 of torch 2.13, which reads pages."""
        from torch.nn.attention.varlen import varlen_attn

        offsets = torch.arange(rows + 1, device=DEVICE, dtype=torch.int32)
        k, v = (x.unflatten(0, (-1, PAGE)) for x in (keys, values))
        options: dict[str, Any] = {"seqused_k": lengths.int(), "scale": size**-0.5}

        def attend(table: Tensor) -> Tensor:
            out = varlen_attn(q, k, v, offsets, None, 1, length, block_table=table, **options)
            return out if isinstance(out, Tensor) else out[0]

        return [functools.partial(attend, table) for table in tables]

    label = f"{rows} x {length} {heads}/{kv_heads}x{size}"
    extras = {"window": window, "softcap": softcap, "sinks": with_sinks, "ragged": ragged}
    label += "".join(f" {name}" for name, value in extras.items() if value)
    providers = {"ligermodels": ours, "sdpa, without pages": sdpa, "flash-attn-4": flash_attention_4}
    if not (window or softcap or with_sinks or ragged):
        providers["torch varlen"] = torch_varlen
    return Case("attention", label, total, with_table(decode_attention_reference, tables[0]), providers)


def linear_cases() -> Iterator[Case]:
    for inputs, outputs in LINEARS:
        weights = draw_weights(outputs, inputs)
        for rows in ROWS:
            yield linear_case(rows, weights)
    for inputs, outputs in NORM_LINEARS:
        weights = draw_weights(outputs, inputs)
        for rows in FUSED_ROWS:
            yield norm_linear_case(rows, weights)
    for inputs, outputs in GATED_LINEARS:
        weights = draw_weights(outputs, inputs)
        for rows in FUSED_ROWS:
            yield gated_linear_case(rows, weights)


def draw_weights(outputs: int, inputs: int) -> list[Tensor]:
    return [draw(outputs, inputs, scale=inputs**-0.5) for _ in range(num_sets(2 * outputs * inputs))]


def over_weights(function: Callable[[Tensor], Tensor], weights: Sequence[Tensor]) -> Callable[[], Sequence[Call]]:
    return lambda: [functools.partial(function, weight) for weight in weights]


def label_of(rows: int, weights: Sequence[Tensor]) -> str:
    outputs, inputs = weights[0].shape
    return f"{rows} x {inputs} -> {outputs}"


def linear_case(rows: int, weights: list[Tensor]) -> Case:
    x = draw(rows, weights[0].shape[1])
    providers = {"cublas": over_weights(lambda weight: F.linear(x, weight), weights)}
    if rows <= MAX_ROWS:
        providers["ligermodels"] = over_weights(lambda weight: few_rows_linear(x, weight), weights)
    reference = functools.partial(F.linear, x, weights[0])
    return Case("linear", label_of(rows, weights), weights[0].nbytes, reference, providers)


def norm_linear_case(rows: int, weights: list[Tensor]) -> Case:
    x, residual, norm_weight = (
        draw(rows, weights[0].shape[1]),
        draw(rows, weights[0].shape[1]),
        draw(weights[0].shape[1]),
    )

    def first(function: Callable) -> Callable[[Tensor], Tensor]:
        return lambda weight: function(x, residual, norm_weight, weight)[0]

    providers = {
        "norm, then cublas": over_weights(first(norm_linear), weights),
        "ligermodels": over_weights(first(few_rows_norm_linear), weights),
    }
    reference = functools.partial(first(norm_linear_reference), weights[0])
    return Case("norm_linear", label_of(rows, weights), weights[0].nbytes, reference, providers)


def gated_linear_case(rows: int, weights: list[Tensor]) -> Case:
    gate_up = draw(rows, 2 * weights[0].shape[1])
    providers = {
        "swiglu, then cublas": over_weights(lambda weight: gated_linear(gate_up, weight), weights),
        "ligermodels": over_weights(lambda weight: few_rows_gated_linear(gate_up, weight), weights),
    }
    reference = functools.partial(gated_linear_reference, gate_up, weights[0])
    return Case("gated_linear", label_of(rows, weights), weights[0].nbytes, reference, providers)


def experts_cases() -> Iterator[Case]:
    hidden, inner, num_experts, k = EXPERTS
    gate_up = draw(num_experts, 2 * inner, hidden, scale=hidden**-0.5)
    down = draw(num_experts, hidden, inner, scale=inner**-0.5)
    for tokens in ROWS:
        yield experts_case(tokens, k, gate_up, down)


def experts_case(tokens: int, k: int, gate_up: Tensor, down: Tensor) -> Case:
    """Each call routes other tokens. Bytes are those of the distinct experts, on average."""
    x = draw(tokens, gate_up.shape[2])
    routed = [route(draw(tokens, len(gate_up)), k) for _ in range(CALLS)]
    distinct = statistics.mean(len(index.unique()) for _, index in routed)

    def calls(function: Callable) -> Callable[[], Sequence[Call]]:
        return lambda: [functools.partial(function, x, index, weight, gate_up, down) for weight, index in routed]

    weight, index = routed[0]
    reference = functools.partial(experts_reference, x, index, weight, gate_up, down)
    total = int(distinct * (gate_up[0].nbytes + down[0].nbytes))
    providers = {"grouped gemm": calls(experts), "ligermodels": calls(few_rows_experts)}
    return Case("experts", f"{tokens} x {gate_up.shape[2]}, {k} of {len(gate_up)}", total, reference, providers)


def write_cases() -> Iterator[Case]:
    for rows in (1, 64, 256):
        yield write_case(rows, 32, 8, 128)


def write_case(rows: int, heads: int, kv_heads: int, size: int) -> Case:
    """RoPE and the write of a cache. Bound by the launch: bytes are those of the projection, read once.

    A provider rotates its own copy of the projection in place, further with each call.
    """
    qkv = draw(rows, 1, (heads + 2 * kv_heads) * size)
    phases = torch.rand(rows, size // 2, device=DEVICE)
    tables, slots = (phases.cos(), phases.sin()), torch.randperm(4096, device=DEVICE)[:rows]
    keys, values = (draw(4096, kv_heads, size) for _ in range(2))

    def rope_then_copies() -> Sequence[Call]:
        mine = qkv.clone()

        def call() -> Tensor:
            q, k, v = rope_(mine, *tables, heads, kv_heads)
            keys.index_copy_(0, slots, k[:, 0])
            values.index_copy_(0, slots, v[:, 0])
            return q

        return [call]

    def one_launch() -> Sequence[Call]:
        mine, cache = qkv.clone(), CacheSlots(keys, values, slots)
        return [lambda: rope_write_cache_(mine, *tables, heads, kv_heads, False, cache)[0]]

    return Case(
        "rope, write", f"{rows} x {heads}/{kv_heads}x{size}", qkv.nbytes,
        lambda: rope_reference(qkv, *tables, heads, kv_heads)[0],
        {"rope, then copies": rope_then_copies, "ligermodels": one_launch},
    )  # fmt: skip


GROUPS = {
    "attention": attention_cases, "linear": linear_cases, "experts": experts_cases, "writes": write_cases,
}  # fmt: skip


def rows_of(case: Case, copy_rate: float, skipped: Sequence[str] = ()) -> Iterator[dict]:
    """One row a provider; one that fails or is wrong has the reason instead of figures."""
    expected = case.reference()
    for provider, make in case.providers.items():
        if provider in skipped:
            continue
        row = {"group": case.group, "shape": case.shape, "provider": provider}
        try:
            calls = make()
            error = relative_error(calls[0](), expected)
            if not error <= MAX_ERROR:
                yield row | {"reason": f"wrong: relative error {error:.1e}"}
                continue
            us = graph_us(calls)
        except Exception as failure:
            yield row | {"reason": f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"}
            continue
        rate = case.bytes / us / 1e3
        yield row | {"us": round(us, 2), "gb_per_s": round(rate), "share": round(rate / copy_rate, 3)}


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def graph_us(calls: Sequence[Call]) -> float:
    """Microseconds of one call, in a graph that makes all of them in turn, CALLS at least."""
    repeated = list(calls) * math.ceil(CALLS / len(calls))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in repeated:
            call()
    times = []
    for _ in range(REPLAYS):
        begin, end = timing.cuda_event(), timing.cuda_event()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(times) / len(repeated)


def format_row(row: dict) -> str:
    figures = (f"{row['us']:.2f}", f"{row['gb_per_s']}", f"{100 * row['share']:.1f} %") if "us" in row else ("", "", "")
    return COLUMNS.format(row["group"], row["shape"], row["provider"], *figures, row.get("reason", "")).rstrip()


def set_constant(assignment: str) -> None:
    """ "module.NAME=value": a constant of a kernel's file, for one run."""
    name, value = assignment.split("=", 1)
    module, constant = name.rsplit(".", 1)
    kernels = importlib.import_module(f"ligermodels.kernels.{module}")
    if not hasattr(kernels, constant):
        raise argparse.ArgumentTypeError(f"ligermodels.kernels.{module} has no constant {constant}")
    setattr(kernels, constant, ast.literal_eval(value))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", nargs="*", metavar="group", help=f"of {', '.join(GROUPS)} (default: all)")
    parser.add_argument(
        "--set", nargs="+", default=[], type=set_constant, metavar="module.NAME=value", dest="constants",
        help="constants of kernels for this run",
    )  # fmt: skip
    parser.add_argument("--skip", nargs="+", default=[], metavar="provider", help="providers that are not run")
    parser.add_argument("--output", type=Path, help="folder for the dated JSON file (default: none is written)")
    args = parser.parse_args()
    if unknown := set(args.group) - set(GROUPS):
        parser.error(f"unknown group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    copy_rate = timing.ceilings()[timing.COPY]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy_rate} GB/s")
    print(COLUMNS.format("group", "shape", "provider", "us", "GB/s", "of copy", "").rstrip())
    rows = []
    for group in args.group or GROUPS:
        for case in GROUPS[group]():
            for row in rows_of(case, copy_rate, args.skip):
                print(format_row(row), flush=True)
                rows.append(row)
        torch.cuda.empty_cache()
    if args.output:
        report = results.environment() | {"ceilings": timing.ceilings(), "rows": rows}
        print(results.save(args.output, "decode-kernels", report))


if __name__ == "__main__":
    main()
