"""Which steps are traced, and the summary of a trace."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from ligermodels.training.reporting.profile import StepProfiler, busy_fraction, profile_report

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def run(file, first, steps):
    """Profiles a run with one matrix product per step and two after the last step. Returns the printed lines."""
    lines, x = [], torch.ones(64, 64)
    with StepProfiler(first, file, CPU, lines.append) as profiler:
        for step in range(1, steps + 1):
            profiler.begin(step)
            x @ x
            profiler.end(last=step == steps)
        x @ x @ x
    return lines


@pytest.mark.parametrize("first, steps, traced", [(2, 9, 3), (1, 3, 3), (4, 5, 2)])
def test_three_steps_are_traced_or_fewer_at_the_end_of_a_run(first, steps, traced, tmp_path):
    file = tmp_path / "trace.json.gz"
    lines = run(file, first, steps)
    assert lines[0] == f"{file}: {traced} steps from step {first} on; open it at ui.perfetto.dev"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == traced
    assert lines[1].split() == ["ms/step", "time", "calls"]
    (product,) = (line.split() for line in lines if line.endswith("aten::mm"))
    assert product[2] == "1" and 0 < float(product[1].rstrip("%")) <= 100


def test_without_a_first_step_nothing_is_traced(tmp_path):
    assert run(tmp_path / "trace.json.gz", None, 5) == []
    assert not list(tmp_path.iterdir())


def on_gpu(name, start, end, **others):
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    device = {"device_type": DeviceType.CUDA, "is_user_annotation": False}
    return SimpleNamespace(name=name, time_range=span, **device | others)


def test_on_a_gpu_only_kernels_and_copies_count_not_annotations_or_the_host():
    events = [
        on_gpu("gemm", 0.0, 6000.0), on_gpu("gemm", 6000.0, 9000.0), on_gpu("copy", 8000.0, 10000.0),
        on_gpu("norm", 19000.0, 20000.0), on_gpu("a step", 0.0, 90000.0, is_user_annotation=True),
        on_gpu("aten::mm", 0.0, 90000.0, device_type=DeviceType.CPU),
        *(on_gpu(f"small {i}", 0.0, float(i)) for i in range(12)),
    ]  # fmt: skip
    busy, _, *rows = profile_report(events, GPU, 2)
    assert busy == "the GPU was busy for 55.0% of that time"
    assert [row.split() for row in rows[:3]] == [
        ["4.500", "74.6%", "1", "gemm"],
        ["1.000", "16.6%", "0", "copy"],
        ["0.500", "8.3%", "0", "norm"],
    ]
    assert len(rows) == 10 and rows[3].endswith("small 11")


def test_overlapping_spans_count_once():
    assert busy_fraction([(4.0, 10.0), (0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == 0.9
