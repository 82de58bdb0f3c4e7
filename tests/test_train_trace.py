"""GPU activity computed from a hand-written trace."""

import pytest

from benchmarks.train_trace import activity


def event(stream, start, end, name="gemm", cat="kernel"):
    return {"cat": cat, "name": name, "ts": start, "dur": end - start, "args": {"stream": stream}}


def test_busy_hidden_and_exposed_times_are_computed_from_a_trace():
    events = [
        event(7, 0, 4000),
        event(7, 3000, 5000),  # overlaps with the previous kernel
        event(7, 6000, 10_000, "attention"),
        event(20, 4500, 5500, "ncclDevKernel_AllGather"),  # half of it overlaps with the compute stream
        event(20, 9000, 12_000, "Memcpy DtoD", "gpu_memcpy"),  # counted up to the end of the compute stream
        event(20, 0, 0, "annotation", "user_annotation") | {"dur": 90_000},
    ]
    found = activity(events, steps=2)
    assert found == pytest.approx((5.0, 4.5, 0.75, 0.25, 1.0))
    assert found.busy == pytest.approx(0.9)


def test_communication_does_not_determine_the_compute_stream():
    events = [event(7, 0, 1000), event(20, 0, 9000, "ncclDevKernel_ReduceScatter"), event(7, 9500, 10_000)]
    assert activity(events, steps=1).computing == pytest.approx(1.5)
