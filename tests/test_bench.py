"""The benchmark suite without a GPU: checks, computed figures, result files and errors. Times are mocked."""

import importlib
import os
import sys
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import matplotlib.image
import pytest
import torch

from benchmarks import errors_beside_liger, headline, in_turns, ops, plot, results, suite, table, timing
from benchmarks.__main__ import main
from benchmarks.checks import ROUNDING_ERROR, ReferenceResult, evaluate, fresh_inputs, with_layout
from benchmarks.ops import OPS, Op, Provider, random_input, work_per_pass
from ligermodels.losses.divergences import KINDS

SMALL = {
    "rms_norm": (8, 32),
    "add_rms_norm": (8, 32),
    "layer_norm": (8, 32),
    "rope": (2, 8, 4, 2, 16),
    "qk_norm_rope": (2, 8, 4, 2, 16),
    "gated_qk_norm_rope": (2, 8, 4, 1, 16),
    "sigmoid_gate": (2, 8, 4, 16),
    "swiglu": (8, 16),
    "geglu": (8, 16),
    "swiglu_backward": (8, 16),
    "geglu_backward": (8, 16),
    "cross_entropy": (8, 64),
    "linear_cross_entropy": (8, 16, 64),
    "linear_logprobs": (8, 16, 64),
    "linear_logprobs_entropy": (8, 16, 64),
    "linear_logprobs_frozen": (8, 16, 64),
    "linear_logprobs_inference": (8, 16, 64),
    "linear_logprobs_loss": (8, 16, 64),
    "dpo_loss": (2, 4, 16, 64),
    **{f"{name}_loss": (4, 4, 16, 64) for name in ("orpo", "simpo", "kto", "grpo")},
    "jsd_loss": (8, 16, 24, 64),
    **{f"linear_divergence_{kind}": (8, 16, 24, 64) for kind in KINDS},
    "linear_divergence_top_k": (8, 16, 5, 64),
    "norm_linear": (8, 16, 24),
    "gated_linear": (8, 16, 24),
    "nf4_dequantize": (1, 64, 24),
    "fp8_dequantize": (1, 64, 24),
    "mxfp4_dequantize": (1, 64, 24),
    "frozen_linear": (8, 64, 24),
    "nf4_few_rows": (1, 64, 24),
    "attention": (1, 8, 4, 2, 16, 0, 0, 0, 1),
    "gather_keys": (2, 5, 3, 2, 2, 16),
    "gated_delta_rule": (1, 128, 2, 2),
    "causal_conv": (16, 8),
    "gated_rms_norm": (8, 2),
    "mamba2_scan": (1, 128, 2),
    "gate_first_rms_norm": (8, 64),
    "experts": (8, 16, 8, 4, 2),
    "biased_experts": (8, 16, 8, 4, 2),
    "adamw": (8, 16),
    "adamw8bit": (8, 256),
}
ENVIRONMENT = {"date": "2026-01-02T03:04:05", "gpu": "a GPU", "driver": "1.2", "versions": {"torch": "2.11.0"}}
TIMING = timing.Timing(ms=2.0, ms_20=1.9, ms_80=2.2, host_us=30.0, host_ahead=True)

suite.import_ops()


@pytest.fixture
def op(monkeypatch):
    """The only registered op: y = 2 x, bound by memory bandwidth, with mocked times."""
    registry = {}
    for module in (ops, suite):
        monkeypatch.setattr(module, "OPS", registry)
    monkeypatch.setattr(results, "environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(timing, "ceilings", lambda: {timing.COPY: 4000.0, timing.MATMUL: 600.0})
    monkeypatch.setattr(timing, "num_input_sets", lambda size: 2)
    monkeypatch.setattr(timing, "measure", lambda function, sets, passes: (dict.fromkeys(passes, TIMING), 3 * 2**20))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    op = Op("double", [(4, 8), (64, 8)], lambda *shape: [random_input(*shape)], lambda x: 2 * x, work)
    op.provider("pytorch")(lambda *shape: lambda x: x + x)
    return op


def work(rows, columns):
    return work_per_pass(4e9, 8e9)


def rows_by_provider(op):
    rows = suite.run_op(op, op.providers)["rows"]
    return {name: [row for row in rows if row["provider"] == name] for name in op.providers}


def test_every_op_has_the_providers_pytorch_and_ligermodels_and_a_shape_bound_by_the_host():
    assert set(OPS) == set(SMALL)
    for op in OPS.values():
        assert {"pytorch", "ligermodels"} <= set(op.providers), op.name
        assert 64 in op.shapes[-1], op.name
        assert all(set(provider.shapes) <= set(op.shapes) for provider in op.providers.values()), op.name
        assert list(op.work(*op.shapes[0]))[-1] in ("forward+backward", "forward"), op.name


@pytest.mark.parametrize("name", SMALL)
def test_pytorch_and_ligermodels_are_correct_for_every_op(name, request):
    if name.endswith("_backward"):  # the provider launches the kernel directly
        request.getfixturevalue("kernels")
    op, shape = OPS[name], SMALL[name]
    reference_result = ReferenceResult(op, shape)
    for provider in {"pytorch", "ligermodels", "ligermodels, gradients in the forward"} & set(op.providers):
        make, _, layout = op.providers[provider]
        result = evaluate(with_layout(layout, make(*shape)), fresh_inputs(op, shape))
        assert reference_result.error_ratio(result) <= op.max_error_ratio, provider


def test_a_provider_that_is_not_installed_or_fails_is_listed_with_its_reason(op):
    @op.provider("missing")
    def missing(*shape):
        import nowhere_to_be_found

        return nowhere_to_be_found.double

    @op.provider("broken", shapes=[(4, 8)])
    def broken(*shape):
        raise RuntimeError("no kernel for this device\nand a long story")

    rows = rows_by_provider(op)
    for row in rows["missing"]:
        assert (row["status"], row["reason"]) == ("not installed", "No module named 'nowhere_to_be_found'")
    assert [row["shape"] for row in rows["missing"]] == ["4x8", "64x8"]
    (row,) = rows["broken"]
    assert (row["shape"], row["status"]) == ("4x8", "failed")
    assert row["reason"] == "RuntimeError: no kernel for this device"
    assert [row["status"] for row in rows["pytorch"]] == 6 * ["ok"]
    assert "failed: RuntimeError: no kernel for this device" in table.format_row(row)


def double_with_scaled_gradient(scale):
    """A function that computes 2 x and multiplies its gradient by `scale`."""

    def double(x):
        y = 2 * x
        y.register_hook(lambda dy: scale * dy)
        return y

    return double


WRONG = {
    "a wrong output": lambda x: 2.2 * x,
    "a wrong gradient": double_with_scaled_gradient(0.95),
    "a NaN gradient": double_with_scaled_gradient(float("nan")),
    "another shape": lambda x: 2 * x[:1],
    "one zeroed column": lambda x: torch.cat((2 * x[:, :-1], 0 * x[:, -1:]), 1),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_provider_is_marked_wrong_and_not_timed(op, fault):
    op.provider("wrong")(lambda *shape: WRONG[fault])
    rows = rows_by_provider(op)["wrong"]
    assert [row["status"] for row in rows] == ["wrong", "wrong"]
    assert all("ms" not in row for row in rows)


def test_the_error_is_a_multiple_of_the_bf16_error_of_the_reference():
    op = OPS["rms_norm"]
    reference_result = ReferenceResult(op, (32, 64))
    expected = reference_result.expected
    perturbation = 1 + 3 * reference_result.bf16_errors[0]
    assert reference_result.error_ratio(expected) == 0.0
    assert reference_result.error_ratio([perturbation * expected[0], *expected[1:]]) == pytest.approx(
        3 * reference_result.bf16_errors[0] / max(reference_result.bf16_errors[0], ROUNDING_ERROR), rel=1e-3
    )
    assert 0.5e-3 < reference_result.bf16_errors[0] < 4e-3


def test_rates_and_fractions_of_the_ceiling(op):
    forward, backward, both = rows_by_provider(op)["pytorch"][:3]
    assert [row["pass"] for row in (forward, backward, both)] == ["forward", "backward", "forward+backward"]
    assert [row["rate"] for row in (forward, backward, both)] == [2000.0, 4000.0, 6000.0]
    assert [row["share"] for row in (forward, backward, both)] == [0.5, 1.0, 1.5]
    assert (forward["ms"], forward["ms_20"], forward["ms_80"], forward["host_us"]) == (2.0, 1.9, 2.2, 30.0)
    assert "peak_mib" not in forward and both["peak_mib"] == 3.0


def test_matrix_products_are_rated_in_tflops_and_a_limit_function_is_timed_in_the_same_run(op, monkeypatch):
    op.ceiling, op.work = timing.MATMUL, lambda *shape: {"forward+backward": 1.2e12}
    (row,) = rows_by_provider(op)["pytorch"][:1]
    assert (row["rate"], row["share"]) == (600.0, 1.0)
    op.limit_function = lambda *shape: lambda: None
    monkeypatch.setattr(timing, "median_time", lambda function, count: 1.5)
    assert rows_by_provider(op)["pytorch"][0]["share"] == 0.75


def test_peak_memory_can_exclude_the_gradients(op):
    op.exclude_gradients = True
    op.provider("pytorch", shapes=[(64, 8)])(lambda *shape: lambda x: x + x)
    op.shapes, op.inputs = [(64, 8)], lambda rows, columns: [random_input(rows, columns, 1024)]  # a gradient of 1 MiB
    assert rows_by_provider(op)["pytorch"][2]["peak_mib"] == 2.0


def test_a_row_reports_that_the_host_waits_for_the_device(op, monkeypatch):
    waiting = dict.fromkeys(work(1, 1), TIMING._replace(host_ahead=False))
    monkeypatch.setattr(timing, "measure", lambda *arguments: (waiting, 0))
    row = rows_by_provider(op)["pytorch"][0]
    assert row["status"] == "ok" and "host waits" in row["reason"] and "host waits" in table.format_row(row)


class EventRecorder:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def record(self):
        self.log.append(self.name)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("forward", ["begin", "forward", "end"]),
        ("backward", ["forward", "begin", "backward", "end"]),
        ("forward+backward", ["begin", "forward", "backward", "end"]),
    ],
)
def test_only_the_pass_is_timed_and_no_gradient_is_accumulated(kind, expected):
    log = []

    class Logged(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            log.append("forward")
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            log.append("backward")
            return 2 * dy

    leaves = [torch.ones(3, requires_grad=True) for _ in range(2)]
    sets = [timing.Inputs([x], [x], [torch.ones(3)]) for x in leaves]
    call = timing.make_call(Logged.apply, sets, kind)
    for _ in range(2):
        call(EventRecorder(log, "begin"), EventRecorder(log, "end"))
    assert log == 2 * expected
    assert all(x.grad is None for x in leaves)


@pytest.mark.parametrize("restore_inputs", [True, False])
def test_inputs_that_a_provider_overwrites_are_restored_after_each_call(op, restore_inputs):
    seen = []
    op.restore_inputs = restore_inputs

    @op.provider("overwriting", layout=lambda x: (x.detach(),))
    def overwriting(*shape):
        def double(x):
            seen.append(x.sum().item())
            return x.mul_(2)

        return double

    sets = suite.make_input_sets(suite.Case(op, (4, 8)), op.providers["overwriting"], overwriting())
    call = timing.make_call(overwriting(), sets[:1], "forward")
    del seen[:]
    for _ in range(3):
        call(timing.HostEvent(), timing.HostEvent())
    assert len(set(seen)) == (1 if restore_inputs else 3)


def test_rotated_inputs_exceed_twice_the_cache_size(monkeypatch):
    properties = type("Properties", (), {"L2_cache_size": 60 * 2**20})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    for mib in (1, 7, 59, 60, 119, 120, 500):
        sets = timing.num_input_sets(mib * 2**20)
        assert sets * mib > 120 or sets == timing.MAX_CALLS, mib
        assert sets == 1 or (sets - 1) * mib <= 120, mib


def test_interleaved_providers_take_turns_and_failed_or_wrong_ones_are_listed(op, monkeypatch):
    op.provider("other")(lambda *shape: lambda x: 2 * x)
    op.provider("wrong")(lambda *shape: lambda x: 3 * x)
    op.provider("broken")(lambda *shape: lambda x: x @ x)
    order = []

    def host_times(call, count):
        order.append(call)
        return [0.001 * len(order)] * count

    monkeypatch.setattr(timing, "host_times", host_times)
    monkeypatch.setattr(timing, "device_times", lambda call, count, sleep: ([sleep] * count, True))
    rows = in_turns.run_shape(suite.Case(op, (4, 8)), op.providers)
    assert len(order) == 4 * in_turns.ROUNDS and order[:4] * in_turns.ROUNDS == order
    assert [(row["provider"], row.get("pass")) for row in rows] == [
        ("wrong", None), ("broken", None), ("pytorch", "forward"), ("pytorch", "forward+backward"),
        ("other", "forward"), ("other", "forward+backward"),
    ]  # fmt: skip
    assert rows[0]["status"] == "wrong" and "times the reference's bf16 error" in rows[0]["reason"]
    middle = 1 + 4 * (in_turns.ROUNDS - 1) / 2  # host µs of the first call: 1 in its first turn, 5 in the second
    assert rows[1]["status"] == "failed"
    assert rows[2]["host_us"] == pytest.approx(middle) and rows[2]["ms"] == pytest.approx(2 + 0.02 * middle)
    assert rows[2]["host_us_20"] < middle and rows[5]["host_us"] == pytest.approx(middle + 3)


def test_long_calls_are_repeated_less_often():
    assert [timing.num_calls(ms) for ms in (0.01, 20.0, 1000.0)] == [30, 25, 3]
    assert list(timing.batch_sizes(25)) == [10, 10, 5]


def test_a_batch_enqueued_too_late_is_repeated_once_with_a_longer_sleep(monkeypatch):
    def device_times(*in_time, sleep=3.0):
        answers, sleeps = iter(in_time), []

        def batch_times(call, count, sleep):
            sleeps.append(sleep)
            return count * [float(len(sleeps))], next(answers)

        monkeypatch.setattr(timing, "batch_times", batch_times)
        return *timing.device_times(None, 20, sleep), sleeps

    assert device_times(True, True) == (10 * [1.0] + 10 * [2.0], True, [3.0, 3.0])
    assert device_times(False, True, True) == (10 * [2.0] + 10 * [3.0], True, [3.0, 6.0, 3.0])
    assert device_times(False, False, False) == (10 * [2.0] + 10 * [3.0], False, [3.0, 6.0, 3.0])
    longest = timing.MAX_SLEEP_MS
    assert device_times(False, True, sleep=longest) == (10 * [1.0] + 10 * [2.0], False, [longest, longest])


def test_a_saved_report_is_read_back_and_the_newest_is_used(op, tmp_path, capsys):
    op.provider("missing")(lambda *shape: importlib.import_module("nowhere_to_be_found"))
    assert main(["double", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    assert path.name == "2026-01-02-030405-double.json" and str(path) in capsys.readouterr().out
    report = results.latest(tmp_path)["double"]
    assert {key: report[key] for key in ENVIRONMENT} == ENVIRONMENT
    assert report["ceilings"] == {timing.COPY: 4000.0, timing.MATMUL: 600.0}
    assert [row["status"] for row in report["rows"]] == 2 * (3 * ["ok"] + ["not installed"])
    results.save(tmp_path, "double", report | {"date": "2026-01-02T03:05:00", "rows": []})
    results.save(tmp_path, "train-step", ENVIRONMENT)
    assert results.latest(tmp_path) == {"double": report | {"date": "2026-01-02T03:05:00", "rows": []}}


def test_a_report_contains_the_gpu_its_driver_and_the_package_versions(monkeypatch, tmp_path):
    nvidia_smi = tmp_path / "nvidia-smi"
    nvidia_smi.write_text("#!/bin/sh\necho 580.1\n")
    nvidia_smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(results, "PACKAGES", ("torch", "nowhere-to-be-found"))
    environment = results.environment()
    assert datetime.fromisoformat(environment.pop("date")).date()
    versions = {"torch": version("torch"), "nowhere-to-be-found": "not installed"}
    assert environment == {"gpu": "a GPU", "driver": "580.1", "versions": versions}


def test_only_the_named_provider_runs(op, tmp_path, capsys):
    op.provider("other")(lambda *shape: lambda x: 2 * x)
    assert main(["--provider", "other", "--output", str(tmp_path)]) == 0
    rows = results.latest(tmp_path)["double"]["rows"]
    assert {row["provider"] for row in rows} == {"other"} and len(rows) == 6


def test_plots_show_the_last_pass_from_the_smallest_shape_to_the_largest():
    def row(shape, provider, kind, share, **more):
        return {"status": "ok", "shape": shape, "provider": provider, "pass": kind, "share": share} | more

    report = {
        "rows": [
            row("16384x4096", "ours", "forward", 0.9),
            row("16384x4096", "ours", "forward+backward", 0.8, peak_mib=384.0),
            row("16384x512", "ours", "forward+backward", 0.5, peak_mib=48.0),
            row("16384x512", "theirs", "forward+backward", 0.4, peak_mib=96.0),
            {"status": "failed", "shape": "16384x4096", "provider": "theirs", "reason": "broken"},
        ]
    }
    speed, memory = plot.lines(report, "share"), plot.lines(report, "peak_mib")
    assert speed == {"ours": {"16384x512": 50.0, "16384x4096": 80.0}, "theirs": {"16384x512": 40.0}}
    assert list(speed["ours"]) == ["16384x512", "16384x4096"]
    plain, variant = plot.style("ligermodels"), plot.style("ligermodels, in place")
    assert plain["color"] == variant["color"] != plot.style("liger")["color"] and plain != variant
    assert memory == {"ours": {"16384x512": 48.0, "16384x4096": 384.0}, "theirs": {"16384x512": 96.0}}


def test_plots_are_drawn_from_the_newest_report_of_each_op(op, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot, "draw", lambda report, path, draw=plot.draw: (drawn.append(report), draw(report, path)))
    report = suite.run_op(op, op.providers)
    for date, rows in (("2026-01-02T03:04:05", []), ("2026-01-03T00:00:00", report["rows"])):
        results.save(tmp_path, "double", report | {"date": date, "rows": rows})
    monkeypatch.setattr(sys, "argv", ["plot", "--results", str(tmp_path), "--output", str(tmp_path / "plots")])
    plot.main()
    assert [report["date"] for report in drawn] == ["2026-01-03T00:00:00"]
    (path,) = (tmp_path / "plots").iterdir()
    height, width, _ = matplotlib.image.imread(path).shape
    assert path.name == "double.png" and width > 2 * height > 600


def test_the_chart_of_several_gpus_takes_the_newest_report_of_each_length(tmp_path):
    def save(date, length, rate):
        rows = [{"weights": name, "gpus": 4, "tokens_per_second_per_gpu": rate, "peak_gib": 9.0} for name in lines]
        report = {"date": date, "length": length, "rows": [*rows, {"weights": "fp32 weights"}]}
        results.save(tmp_path, f"sharded-step-llama-3-8b-2x{length}-4-gpus", report)

    lines = list(plot.SHARDED_LINES)
    for date, length, rate in (("2026-01-03", 4096, 30), ("2026-01-02", 4096, 20), ("2026-01-02", 8192, 10)):
        save(f"{date}T00:00:00", length, rate)
    auto = {"length": 8192, "tokens_per_second": 50, "peak_gib": 1.0}
    results.save(tmp_path, "train-py-llama-3-8b-4-gpus", {"date": "2026-01-02T00:00:00", "rows": [auto]})
    found = plot.sharded_rows(tmp_path)
    rates = {name: {length: row["tokens_per_second"] for length, row in rows.items()} for name, rows in found.items()}
    peers = {name: {4096: 120, 8192: 40} for name, _ in plot.SHARDED_LINES.values()}
    assert rates == peers | {"ligermodels, what it chooses itself": {8192: 50}}
    plot.draw_sharded(found, tmp_path / "chart.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "chart.png").shape
    assert width > 2 * height > 600


def refused(capsys, *arguments):
    """The one line on stderr of a command that ends with status 2."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and not out
    return err


def test_an_unknown_op_or_provider_is_refused_with_the_nearest(capsys):
    assert "no op 'rmsnorm'; the nearest is 'rms_norm'" in refused(capsys, "rmsnorm")
    assert "no provider 'ligr'; the nearest is 'liger'" in refused(capsys, "rope", "--provider", "ligr")
    assert "no provider 'quack'" in refused(capsys, "rope", "--provider", "quack")


def test_without_a_gpu_one_line_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "a GPU is needed" in refused(capsys, "rope")


@pytest.mark.gpu
def test_a_copy_reaches_the_ceiling_and_a_synchronizing_call_is_detected():
    x = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    sets = [timing.Inputs([x], [], [])]
    timings, peak = timing.measure(torch.clone, sets, ["forward"])
    rate = 2 * x.nbytes / timings["forward"].ms / 1e6
    assert 0.7 < rate / timing.ceilings()[timing.COPY] < 1.1
    assert timings["forward"].host_ahead and peak == x.nbytes
    waiting, _ = timing.measure(lambda x: x[:1].clone() * x[0].item(), sets, ["forward"])
    assert not waiting["forward"].host_ahead


def test_a_provider_is_a_function_of_the_shape(op):
    @op.provider("mine", shapes=[(64, 8)], layout=lambda x: (x.T,))
    def mine(rows, columns):
        assert (rows, columns) == (64, 8)
        return lambda x: 2 * x.T

    assert op.providers["mine"] == Provider(mine, [(64, 8)], op.providers["mine"].layout)
    rows = rows_by_provider(op)["mine"]
    assert [(row["shape"], row["status"]) for row in rows] == 3 * [("64x8", "ok")]


def test_errors_beside_liger_have_a_row_for_each_tensor_and_the_reason_where_a_library_fails(monkeypatch, capsys):
    swiglu = errors_beside_liger.COMPARISONS["swiglu"]

    def broken():
        raise RuntimeError("no such | kernel")

    monkeypatch.setitem(errors_beside_liger.COMPARISONS, "swiglu", replace(swiglu, shapes=[(6, 20)], liger=broken))
    assert errors_beside_liger.main(["swiglu"]) == 0
    table = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    dtypes, tensors = ("float32", "bfloat16"), ("output", "dgate", "dup")
    assert [row[:4] for row in table] == [["swiglu", "6x20", dtype, name] for dtype in dtypes for name in tensors]
    assert {row[5] for row in table} == {"RuntimeError: no such / kernel"}
    for row, limit in zip(table, [1e-6] * 3 + [1e-2] * 3, strict=True):
        assert all(0 < float(row[column]) < limit for column in (4, 6))


@pytest.mark.parametrize("file", sorted(Path(results.__file__).parent.glob("[!_]*.py")), ids=lambda file: file.stem)
def test_every_script_can_be_imported(file):
    importlib.import_module(f"benchmarks.{file.stem}")


def test_the_table_of_the_readme_is_computed_from_the_results():
    assert headline.table() in (Path(__file__).parents[1] / "README.md").read_text()


def test_a_line_has_the_median_of_its_runs_and_their_range(monkeypatch, tmp_path):
    for second, rate in enumerate((100, 104, 101)):
        report = {"date": f"2026-01-01T00:00:0{second}", "rows": [{"provider": "ours", "tokens_per_second": rate}]}
        report["rows"].append({"provider": "peer", "tokens_per_second": rate / 2, "peak_gib": 7.26})
        results.save(tmp_path, "a-step", report)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    line = headline.Line(
        "a step", *headline.measured("a-step", {"provider": "ours"}, "Peer", {"provider": "peer"}, "*")
    )
    assert (line.factor, headline.runs(line)) == (2, "3, 4.0%")
    assert (headline.cell(line.ours, ""), headline.cell(line.peer, "")) == ("101", "50, 7.3")
    with pytest.raises(ValueError, match="another-step"):
        line.ours._replace(name="another-step").rows()
