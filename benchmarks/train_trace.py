"""How busy the GPU was in steps of train.py, read from the trace that --profile wrote.

    python -m benchmarks.train_trace runs/llama/trace.json.gz

The stream of computation is the one that computed longest. Busy is the share of the time, from its first kernel to its
last, in which a kernel of it runs. What other streams run is communication and copies: hidden beside that stream's
kernels, or exposed while it waits.
"""

import argparse
import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

STEPS = 3  # that --profile traces
ON_A_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
COMMUNICATION = ("nccl", "barrier", "memcpy")

Span = tuple[float, float]


class Activity(NamedTuple):
    """Of one GPU, in milliseconds a step. waiting: the longest time without a kernel of the stream of computation."""

    step: float
    computing: float
    others_hidden: float
    others_exposed: float
    waiting: float

    @property
    def busy(self) -> float:
        return self.computing / self.step


def activity(events: Iterable[dict[str, Any]], steps: int) -> Activity:
    """events: those of a chrome trace, times in microseconds."""
    streams: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ON_A_GPU:
            streams[event["args"]["stream"]].append(event)
    main = max(streams, key=lambda stream: sum(e["dur"] for e in streams[stream] if not communicates(e["name"])))
    computing = merged(span(event) for event in streams[main])
    start, end = computing[0][0], computing[-1][1]
    inside = [
        (max(a, start), min(b, end)) for stream in streams if stream != main for a, b in map(span, streams[stream])
    ]
    others = merged((a, b) for a, b in inside if a < b)
    either = length(merged([*computing, *others]))
    gaps = [b[0] - a[1] for a, b in itertools.pairwise(computing)]
    return Activity(
        step=(end - start) / 1e3 / steps,
        computing=length(computing) / 1e3 / steps,
        others_hidden=(length(computing) + length(others) - either) / 1e3 / steps,
        others_exposed=(either - length(computing)) / 1e3 / steps,
        waiting=max(gaps, default=0.0) / 1e3,
    )


def communicates(name: str) -> bool:
    return any(word in name.lower() for word in COMMUNICATION)


def span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def merged(spans: Iterable[Span]) -> list[Span]:
    """What any of them covers, ascending."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="trace.json.gz of a run's folder")
    args = parser.parse_args()
    with gzip.open(args.trace, "rt") as file:
        found = activity(json.load(file)["traceEvents"], STEPS)
    print(json.dumps({"busy": round(found.busy, 4)} | {k: round(v, 2) for k, v in found._asdict().items()}))


if __name__ == "__main__":
    main()
