"""What a trace says of a step, on one drawn by hand."""

import pytest

from benchmarks.train_trace import activity


def event(stream, start, end, name="gemm", cat="kernel"):
    return {"cat": cat, "name": name, "ts": start, "dur": end - start, "args": {"stream": stream}}


def test_a_trace_tells_busy_hidden_and_exposed():
    events = [
        event(7, 0, 4000),
        event(7, 3000, 5000),  # overlaps the one before
        event(7, 6000, 10_000, "attention"),
        event(20, 4500, 5500, "ncclDevKernel_AllGather"),  # half of it beside the stream that computes
        event(20, 9000, 12_000, "Memcpy DtoD", "gpu_memcpy"),  # up to the end
        event(20, 0, 0, "annotation", "user_annotation") | {"dur": 90_000},
    ]
    found = activity(events, steps=2)
    assert found == pytest.approx((5.0, 4.5, 0.75, 0.25, 1.0))
    assert found.busy == pytest.approx(0.9)


def test_the_stream_of_computation_is_not_the_one_that_communicates_longest():
    events = [event(7, 0, 1000), event(20, 0, 9000, "ncclDevKernel_ReduceScatter"), event(7, 9500, 10_000)]
    assert activity(events, steps=1).computing == pytest.approx(1.5)
