"""Device time, host time and memory of calls on one GPU, and what the hardware gives. Knows no op and no provider.

Device time is free of the host's gaps: the GPU sleeps while the host enqueues a batch of calls, each between a pair of
events. Where the host cannot run ahead (a provider that waits for the device, or a queue that is full), that is told.
Host time is the wall time of enqueueing one call, with nothing else in the queue. Times are milliseconds.
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

BATCH = 10  # calls behind one sleep: their launches fit the queue
FEWEST_CALLS, MOST_CALLS = 3, 30
SECONDS = 0.5  # of device time for each pass, within these limits
LONGEST_SLEEP = 100.0
COPY, MATMUL = "copy_gb_per_s", "matmul_tflop_per_s"


class Inputs(NamedTuple):
    """What one call takes: arguments, those of them that are differentiated, and the outputs' upstream gradients.

    kept: the arguments' values, put back after the call where some provider writes over them; else empty.
    """

    arguments: list[Tensor]
    leaves: list[Tensor]
    upstream: list[Tensor]
    kept: Sequence[Tensor] = ()


@torch.no_grad()
def restore(inputs: Inputs) -> None:
    for argument, values in zip(inputs.arguments, inputs.kept, strict=False):
        argument.copy_(values)


class Timing(NamedTuple):
    """Of one pass: device time (median, 20th and 80th percentile), host time, and whether the host ran ahead."""

    ms: float
    ms_20: float
    ms_80: float
    host_us: float
    ahead: bool


class Stamp:
    """Like a CUDA event, but of the host's clock."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: "Stamp") -> float:
        return 1e3 * (end.seconds - self.seconds)


def as_list(outputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def caller(function: Callable, sets: Sequence[Inputs], kind: str) -> Callable:
    """call(begin, end), which records both around one pass on the next of the sets.

    Gradients are returned, not accumulated: no provider pays for an addition to .grad.
    """
    ring = itertools.cycle(sets)

    def call(begin, end):
        inputs = next(ring)
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
    """The timing of each pass, and the peak of bytes that the last one allocates."""
    calls = {kind: caller(function, sets, kind) for kind in passes}
    most = calls[passes[-1]]
    for call in [most, most, *calls.values()]:
        call(Stamp(), Stamp())
    count = repetitions(wall_time(most))
    host = {kind: statistics.median(host_times(call, count)) for kind, call in calls.items()}
    sleep = min(2 + 2 * BATCH * max(host.values()), LONGEST_SLEEP)
    timings = {}
    for kind, call in calls.items():
        times, ahead = device_times(call, count, sleep)
        timings[kind] = Timing(*median_and_spread(times), 1e3 * host[kind], ahead)
    return timings, peak_memory(most)


def median_and_spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    low, _, _, high = statistics.quantiles(times, n=5, method="inclusive")
    return statistics.median(times), low, high


def repetitions(milliseconds: float) -> int:
    return int(min(max(1e3 * SECONDS / milliseconds, FEWEST_CALLS), MOST_CALLS))


def wall_time(call: Callable) -> float:
    start, end = Stamp(), Stamp()
    torch.cuda.synchronize()
    start.record()
    call(Stamp(), Stamp())
    torch.cuda.synchronize()
    end.record()
    return start.elapsed_time(end)


def host_times(call: Callable, count: int) -> list[float]:
    stamps = [(Stamp(), Stamp()) for _ in range(count)]
    torch.cuda.synchronize()
    for begin, end in stamps:
        call(begin, end)
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in stamps]


def device_times(call: Callable, count: int, sleep: float) -> tuple[list[float], bool]:
    """Times of `count` calls, and whether each was enqueued while the device still slept.

    A batch that the host did not finish in time is repeated behind twice the sleep, in case something held it up.
    """
    times, ahead = [], True
    for batch in batches(count):
        took, in_time = batch_times(call, batch, sleep)
        if ahead and not in_time and sleep < LONGEST_SLEEP:
            took, in_time = batch_times(call, batch, 2 * sleep)
        ahead = ahead and in_time
        times += took
    return times, ahead


def batches(count: int) -> Iterator[int]:
    for start in range(0, count, BATCH):
        yield min(BATCH, count - start)


def batch_times(call: Callable, count: int, sleep: float) -> tuple[list[float], bool]:
    events = [(event(), event()) for _ in range(count)]
    torch.cuda.synchronize()
    torch.cuda._sleep(int(sleep * cycles_per_millisecond()))
    awake = event()
    awake.record()
    for begin, end in events:
        call(begin, end)
    ahead = not awake.query()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events], ahead


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def peak_memory(call: Callable) -> int:
    """Bytes that one call needs beyond what is allocated before it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(Stamp(), Stamp())
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def median_time(function: Callable[[], Tensor | Sequence[Tensor]], count: int) -> float:
    call = caller(function, [Inputs([], [], [])], "forward")
    for _ in range(3):
        call(Stamp(), Stamp())
    times, _ = device_times(call, count, LONGEST_SLEEP / BATCH)
    return statistics.median(times)


@functools.cache
def cycles_per_millisecond() -> float:
    """Of the clock that torch.cuda._sleep counts."""
    cycles, begin, end = 10_000_000, event(), event()
    torch.cuda._sleep(cycles)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return cycles / begin.elapsed_time(end)


@functools.cache
def ceilings() -> dict[str, float]:
    """What the hardware gives in this run: a copy of 2 GiB, read and written, and a bf16 product of 8192³."""
    x = torch.randint(255, (2**31,), dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    copy = median_time(lambda: y.copy_(x), 20)
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = median_time(lambda: a @ b, 400)  # a cool card is faster
    return {COPY: round(2 * 2**31 / copy / 1e6), MATMUL: round(2 * 8192**3 / product / 1e9)}


def sets_beyond_cache(bytes_of_one: int) -> int:
    """How many sets of inputs to rotate, so that none is found in the L2 cache when its turn comes again.

    No more than there are calls: at shapes that the host bounds, all sets may fit the cache.
    """
    cache = torch.cuda.get_device_properties().L2_cache_size
    return min(MOST_CALLS, 1 + 2 * cache // max(bytes_of_one, 1))
