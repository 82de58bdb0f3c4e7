"""Device time, host time and peak memory of calls on one GPU, and the GPU's measured ceilings.

Device time excludes gaps caused by the host: the GPU sleeps while the host enqueues a batch of calls, and each call
lies between two CUDA events. If the host cannot enqueue ahead of the device (the provider synchronizes, or the launch
queue is full), this is reported. Host time is the wall time of enqueueing one call while the queue is otherwise empty.
Times are in milliseconds unless a name says otherwise. Knows no op and no provider.
"""

import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CALLS_PER_BATCH = 10  # calls enqueued during one sleep; few enough that their launches fit in the queue
MIN_CALLS, MAX_CALLS = 3, 30
TARGET_SECONDS = 0.5  # target duration of the calls of each pass; MIN_CALLS and MAX_CALLS take precedence
MAX_SLEEP_MS = 100.0
COPY, MATMUL = "copy_gb_per_s", "matmul_tflop_per_s"


class Inputs(NamedTuple):
    """The input tensors of one call.

    leaves: the arguments that require a gradient. upstream: the upstream gradients of the outputs.
    saved_values: the values restored to the arguments after each call, if a provider overwrites them; otherwise empty.
    """

    arguments: list[Tensor]
    leaves: list[Tensor]
    upstream: list[Tensor]
    saved_values: Sequence[Tensor] = ()


@torch.no_grad()
def restore(inputs: Inputs) -> None:
    for argument, values in zip(inputs.arguments, inputs.saved_values, strict=False):
        argument.copy_(values)


class Timing(NamedTuple):
    """One pass: device time (median, 20th and 80th percentile), host time, and whether the host ran ahead of it."""

    ms: float
    ms_20: float
    ms_80: float
    host_us: float
    host_ahead: bool


class HostEvent:
    """The interface of a CUDA event on the host's clock."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: "HostEvent") -> float:
        return 1e3 * (end.seconds - self.seconds)


def as_list(outputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def make_call(function: Callable, sets: Sequence[Inputs], kind: str) -> Callable:
    """Returns call(begin, end), which records the two events around one pass on the next input set, in rotation.

    kind: "forward", "backward" or "forward+backward". Gradients are returned, not accumulated, so that no provider's
    time includes an addition to .grad.
    """
    rotation = itertools.cycle(sets)

    def call(begin, end):
        inputs = next(rotation)
        arguments, leaves, upstream, _ = inputs
        if kind != "backward":
            begin.record()
        outputs = as_list(function(*arguments))
        if kind == "backward":
            begin.record()
        if kind != "forward":
            torch.autograd.grad(outputs, leaves, upstream)
        end.record()
        restore(inputs)

    return call


def measure(function: Callable, sets: Sequence[Inputs], passes: Sequence[str]) -> tuple[dict[str, Timing], int]:
    """The timing of each pass, and the peak number of bytes that the last pass allocates."""
    calls = {kind: make_call(function, sets, kind) for kind in passes}
    last_pass = calls[passes[-1]]
    for call in [last_pass, last_pass, *calls.values()]:
        call(HostEvent(), HostEvent())
    count = num_calls(wall_time(last_pass))
    host = {kind: statistics.median(host_times(call, count)) for kind, call in calls.items()}
    sleep = min(2 + 2 * CALLS_PER_BATCH * max(host.values()), MAX_SLEEP_MS)
    timings = {}
    for kind, call in calls.items():
        times, host_ahead = device_times(call, count, sleep)
        timings[kind] = Timing(*median_and_spread(times), 1e3 * host[kind], host_ahead)
    return timings, peak_memory(last_pass)


def median_and_spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    low, _, _, high = statistics.quantiles(times, n=5, method="inclusive")
    return statistics.median(times), low, high


def num_calls(milliseconds: float) -> int:
    return int(min(max(1e3 * TARGET_SECONDS / milliseconds, MIN_CALLS), MAX_CALLS))


def wall_time(call: Callable) -> float:
    start, end = HostEvent(), HostEvent()
    torch.cuda.synchronize()
    start.record()
    call(HostEvent(), HostEvent())
    torch.cuda.synchronize()
    end.record()
    return start.elapsed_time(end)


def host_times(call: Callable, count: int) -> list[float]:
    events = [(HostEvent(), HostEvent()) for _ in range(count)]
    torch.cuda.synchronize()
    for begin, end in events:
        call(begin, end)
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def device_times(call: Callable, count: int, sleep: float) -> tuple[list[float], bool]:
    """Times of `count` calls, and whether every batch was enqueued while the device was still asleep.

    If the host did not enqueue a batch in time, the batch is repeated with twice the sleep: the delay may have been
    a single event.
    """
    times, host_ahead = [], True
    for batch in batch_sizes(count):
        batch_ms, in_time = batch_times(call, batch, sleep)
        if host_ahead and not in_time and sleep < MAX_SLEEP_MS:
            batch_ms, in_time = batch_times(call, batch, 2 * sleep)
        host_ahead = host_ahead and in_time
        times += batch_ms
    return times, host_ahead


def batch_sizes(count: int) -> Iterator[int]:
    for start in range(0, count, CALLS_PER_BATCH):
        yield min(CALLS_PER_BATCH, count - start)


def batch_times(call: Callable, count: int, sleep: float) -> tuple[list[float], bool]:
    events = [(cuda_event(), cuda_event()) for _ in range(count)]
    torch.cuda.synchronize()
    torch.cuda._sleep(int(sleep * cycles_per_millisecond()))
    sleep_end = cuda_event()
    sleep_end.record()
    for begin, end in events:
        call(begin, end)
    host_ahead = not sleep_end.query()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events], host_ahead


def cuda_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def peak_memory(call: Callable) -> int:
    """Peak number of bytes that one call allocates in addition to those allocated before it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(HostEvent(), HostEvent())
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def median_time(function: Callable[[], Tensor | Sequence[Tensor]], count: int) -> float:
    call = make_call(function, [Inputs([], [], [])], "forward")
    for _ in range(3):
        call(HostEvent(), HostEvent())
    times, _ = device_times(call, count, MAX_SLEEP_MS / CALLS_PER_BATCH)
    return statistics.median(times)


@functools.cache
def cycles_per_millisecond() -> float:
    """The rate of the clock whose cycles torch.cuda._sleep counts."""
    cycles, begin, end = 10_000_000, cuda_event(), cuda_event()
    torch.cuda._sleep(cycles)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return cycles / begin.elapsed_time(end)


@functools.cache
def ceilings() -> dict[str, float]:
    """The measured rates of this GPU: a copy of 2 GiB (reads and writes counted) and a bf16 matrix product of 8192³."""
    x = torch.randint(255, (2**31,), dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    copy = median_time(lambda: y.copy_(x), 20)
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = median_time(lambda: a @ b, 400)  # many calls: a cool GPU is faster
    return {COPY: round(2 * 2**31 / copy / 1e6), MATMUL: round(2 * 8192**3 / product / 1e9)}


def num_input_sets(bytes_per_set: int) -> int:
    """The number of input sets to rotate so that a set has left the L2 cache before it is used again.

    At last_pass MAX_CALLS. At small shapes, which are bound by the host, all sets may therefore fit in the cache.
    """
    cache = torch.cuda.get_device_properties().L2_cache_size
    return min(MAX_CALLS, 1 + 2 * cache // max(bytes_per_set, 1))
