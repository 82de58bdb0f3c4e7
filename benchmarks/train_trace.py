"""GPU utilization in training steps of train.py, computed from the trace written by --profile.

    python -m benchmarks.train_trace runs/llama/trace.json.gz

The compute stream is the one whose non-communication kernels take the longest total time. "Busy" is the fraction of the
time between its first and last kernel in which one of its kernels runs. The other streams run communication and copies:
hidden if they overlap with kernels of the compute stream, exposed otherwise.
"""

import argparse
import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

STEPS = 3  # number of steps traced by --profile
GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
COMMUNICATION = ("nccl", "barrier", "memcpy")

Interval = tuple[float, float]


class Activity(NamedTuple):
    """Times of one GPU in ms per step. waiting: the longest gap between kernels of the compute stream, in ms."""

    step: float
    computing: float
    others_hidden: float
    others_exposed: float
    waiting: float

    @property
    def busy(self) -> float:
        return self.computing / self.step


def activity(events: Iterable[dict[str, Any]], steps: int) -> Activity:
    """events: those of a Chrome trace, with times in microseconds. steps: the number of traced steps."""
    streams: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in GPU_CATEGORIES:
            streams[event["args"]["stream"]].append(event)
    compute_stream = max(streams, key=lambda stream: compute_time(streams[stream]))
    computing = union(interval(event) for event in streams[compute_stream])
    start, end = computing[0][0], computing[-1][1]
    elsewhere = itertools.chain.from_iterable(streams[stream] for stream in streams if stream != compute_stream)
    clipped = [(max(a, start), min(b, end)) for a, b in map(interval, elsewhere)]
    others = union((a, b) for a, b in clipped if a < b)
    covered = total_length(union([*computing, *others]))
    gaps = [b[0] - a[1] for a, b in itertools.pairwise(computing)]
    return Activity(
        step=(end - start) / 1e3 / steps,
        computing=total_length(computing) / 1e3 / steps,
        others_hidden=(total_length(computing) + total_length(others) - covered) / 1e3 / steps,
        others_exposed=(covered - total_length(computing)) / 1e3 / steps,
        waiting=max(gaps, default=0.0) / 1e3,
    )


def compute_time(events: Iterable[dict[str, Any]]) -> float:
    return sum(event["dur"] for event in events if not is_communication(event["name"]))


def is_communication(name: str) -> bool:
    return any(word in name.lower() for word in COMMUNICATION)


def interval(event: dict[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of the intervals, disjoint and in ascending order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def total_length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="trace.json.gz in the folder of a run")
    args = parser.parse_args()
    with gzip.open(args.trace, "rt") as file:
        result = activity(json.load(file)["traceEvents"], STEPS)
    print(json.dumps({"busy": round(result.busy, 4)} | {k: round(v, 2) for k, v in result._asdict().items()}))


if __name__ == "__main__":
    main()
