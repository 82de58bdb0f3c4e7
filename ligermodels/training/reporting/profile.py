"""A profiler trace of three steps, for Perfetto or chrome://tracing, and a summary of it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ligermodels.units import counted

PROFILED_STEPS = 3
REPORTED_KERNELS = 10
MAX_KERNEL_NAME = 72  # characters


class StepProfiler:
    """Traces the steps first, first + 1 and first + 2 of a run; none if `first` is None. A context manager.

    Work between these steps, such as a validation, is traced too; work after the last of them is not.
    file: path of the trace, such as trace.json.gz. say: receives the summary line by line: where the trace is, how busy
    the GPU was, and which kernels (on a CPU, which ops) took most of its time.
    """

    def __init__(self, first: int | None, file: Path, device: torch.device, say: Callable[[str], None]) -> None:
        self.first, self.file, self.device, self.say = first, file, device, say
        self.profile: profile | None = None
        self.steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Writes the trace if the run stops before the third step."""
        if self.profile:
            self.finish(self.profile)

    def begin(self, step: int) -> None:
        """Call at the start of every step. step: counts from 1."""
        if step == self.first:
            gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self.profile = profile(activities=[ProfilerActivity.CPU, *gpu])
            self.profile.start()
        self.steps += self.profile is not None

    def end(self, *, last: bool) -> None:
        """Call at the end of every step. last: whether it is the last step of the run."""
        if self.profile and (last or self.steps == PROFILED_STEPS):
            self.finish(self.profile)

    def finish(self, traced: profile) -> None:
        self.profile = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        traced.stop()
        traced.export_chrome_trace(str(self.file))
        self.say(f"{self.file}: {counted(self.steps, 'step')} from step {self.first} on; open it at ui.perfetto.dev")
        for line in profile_report(traced.events(), self.device, self.steps):
            self.say(line)


def profile_report(events: Iterable[Any], device: torch.device, steps: int) -> Iterator[str]:
    """Yields a table of the kernels (on a CPU, ops) that took the most time: time per step, fraction, calls per step.

    events: torch.profiler's FunctionEvents, with times in µs. On a GPU the first line is its busy fraction.
    """
    calls: Counter[str] = Counter()
    times: Counter[str] = Counter()
    on_gpu = device.type == "cuda"
    timed = [event for event in events if not on_gpu or is_kernel(event)]
    for event in timed:
        calls[event.name] += 1
        times[event.name] += event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
    if on_gpu:
        busy = busy_fraction([(event.time_range.start, event.time_range.end) for event in timed])
        yield f"the GPU was busy for {busy:.1%} of that time"
    yield f"{'ms/step':>10}{'time':>8}{'calls':>8}"
    for name, time in times.most_common(REPORTED_KERNELS):
        fraction = time / times.total()
        yield f"{time / 1e3 / steps:10.3f}{fraction:8.1%}{calls[name] / steps:8.0f}  {name[:MAX_KERNEL_NAME]}"


def is_kernel(event: Any) -> bool:
    """Whether an event is a kernel or a copy on the GPU. Annotations are not: they span several kernels."""
    return event.device_type == DeviceType.CUDA and not event.is_user_annotation


def busy_fraction(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the fraction of the time from the first start to the last end in which at least one span runs."""
    spans = sorted(spans)
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / (reached - spans[0][0])
