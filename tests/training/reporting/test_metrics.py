"""The progress bar, printed lines and metrics.jsonl of a run, also on a full disk and after a resume."""

import json
import math
import os
import re
import resource

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.training.reporting import metrics as module
from ligermodels.training.reporting.metrics import METRICS_FILE, Metrics, Validation, read_metrics, significant

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets: clock.now, in seconds."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(module.time, "perf_counter", lambda: Clock.now)
    return Clock


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]


def run(folder, steps, **options):
    return Metrics(folder, steps=steps, device=CPU, **options)


def test_a_step_is_one_json_object_and_so_is_a_validation_with_its_sample_and_accuracy(tmp_path, capsys):
    with run(tmp_path / "run", 2) as metrics:
        metrics.step(1, loss=2.5, grad_norm=1.5, learning_rate=0.1, tokens=100)
        metrics.step(2, loss=2.25, grad_norm=1.25, learning_rate=0.2, tokens=100)
        metrics.validation(
            2, Validation(loss=0.71, floor=0.56, answers=(58, 60), sample="Once upon a time | there was ü")
        )
    first, second, *others = records(tmp_path / "run")
    assert first == {"step": 1, "loss": 2.5, "grad_norm": 1.5, "learning_rate": 0.1}
    assert second == {"step": 2, "loss": 2.25, "grad_norm": 1.25, "learning_rate": 0.2}
    assert others == [
        {
            "step": 2, "validation_loss": 0.71, "validation_perplexity": math.exp(0.71), "floor": 0.56,
            "correct": 58, "questions": 60, "sample": "Once upon a time | there was ü",
        },
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "step 2: validation loss 0.710 nats/token, floor 0.560, gap 0.150, perplexity 2.034" in out
    assert "step 2: 58 of 60 questions answered correctly\nstep 2: Once upon a time | there was ü\n" in out


def test_a_loss_that_rounds_to_zero_has_no_sign(tmp_path, capsys):
    """The loss of GRPO's validation is a negative mean reward, which may be 0."""
    with run(tmp_path / "run", 1) as metrics:
        metrics.step(1, loss=-1e-9, grad_norm=1.5, learning_rate=0.1, tokens=100, values={"rewards/margins": -1e-9})
        metrics.validation(1, Validation(loss=-0.0, values={"divergence": -1e-9}))
    out = capsys.readouterr().out
    assert "validation loss 0.000" in out and "divergence 0.00" in out and "-0.0" not in out


def test_a_long_sample_is_cut_on_the_console_alone(tmp_path, capsys):
    sample = "a" * 1700 + " | the end"
    with run(tmp_path, 1) as metrics:
        metrics.validation(1, Validation(0.5, sample=sample))
    assert records(tmp_path)[0]["sample"] == sample
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("step 1: aaa") and line.endswith("aaa | the end") and len(line) == len("step 1: ") + 400


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    with run(tmp_path, 1, enabled=False) as metrics:
        metrics.step(1, loss=1.0, grad_norm=1.0, learning_rate=0.1, tokens=100)
        metrics.validation(1, Validation(loss=1.0))
        metrics.say("something")
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")


def test_non_finite_numbers_are_null_and_skipped_steps_are_marked(tmp_path, capsys):
    with run(tmp_path, 1) as metrics:
        metrics.step(1, loss=math.nan, grad_norm=math.inf, learning_rate=0.1, tokens=100, skipped=True)
        metrics.validation(1, Validation(loss=1000.0))
        metrics.validation(1, Validation(loss=math.nan))
        assert metrics.summary().endswith("1 update skipped")
    assert "perplexity nan" in capsys.readouterr().out
    step, validation, _ = records(tmp_path)
    assert step == {"step": 1, "loss": None, "grad_norm": None, "learning_rate": 0.1, "skipped": True}
    assert validation == {"step": 1, "validation_loss": 1000.0, "validation_perplexity": None}


def test_throughput_mfu_and_eta_leave_out_the_steps_that_compile(tmp_path, clock, capsys):
    with run(tmp_path, 100, flops_per_token=7, peak=1000.0) as metrics:
        for step, seconds in enumerate([60.0, 30.0, 2.0, 2.0, 4.0], 1):
            clock.now += seconds
            metrics.step(step, 1.0, 1.0, 0.1, tokens=100)
            if step == 3:
                clock.now += 6.0
                metrics.validation(step, Validation(1.0))  # counts for the ETA, but for no step
                clock.now += 5.0
                metrics.say("a trace was written")
        assert metrics.tokens_per_second == 50.0
        assert metrics.summary() == "5 steps, 500 tokens in 1:38, 50 tokens/s, MFU 35.0%"
        assert metrics.seconds == 98.0
    speeds = [(r.get("tokens_per_second"), r.get("mfu")) for r in records(tmp_path) if "loss" in r]
    assert speeds == [(None, None), (None, None), (50, 0.35), (50, 0.35), (25, 0.175)]
    last = capsys.readouterr().out.splitlines()[-1]
    left = (2 + 6 + 5 + 2 + 4) / 3 * 95  # seconds
    assert [r.get("seconds_left") for r in records(tmp_path)] == [None, None, 2 * 97, None, 720, round(left)]
    assert last == f"step 5/100, ETA {int(left // 60)}:{left % 60:02.0f}, loss 1.000, grad norm 1.00, lr 1.0e-01, " + (
        "50 tokens/s, MFU 35.0%"
    )


def test_on_a_gpu_the_peak_memory_is_shown(tmp_path, clock, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 13 * 2**28)
    with Metrics(tmp_path, steps=1, device=torch.device("cuda")) as metrics:
        metrics.step(1, 1.0, 1.0, 0.1, tokens=100)
        assert metrics.summary() == "1 step, 100 tokens in 0:00, 3.2 GiB"
    assert records(tmp_path)[0]["peak_memory_gib"] == 3.25
    assert capsys.readouterr().out == "step 1/1, loss 1.000, grad norm 1.00, lr 1.0e-01, 3.2 GiB\n"


def test_a_low_throughput_is_not_rounded_to_zero(tmp_path, clock):
    with run(tmp_path, 3) as metrics:
        for step in (1, 2, 3):
            clock.now += 250
            metrics.step(step, 1.0, 1.0, 0.1, tokens=100)
        assert metrics.summary() == "3 steps, 300 tokens in 12:30, 0.40 tokens/s"
    assert records(tmp_path)[-1]["tokens_per_second"] == 0.4


def test_without_a_terminal_every_step_prints_a_line(tmp_path, capsys):
    with run(tmp_path, 250) as metrics:
        for step in range(1, 251):
            metrics.step(step, 1.0, 1.0, 0.1, tokens=100)
    out, err = capsys.readouterr()
    assert [int(number) for number in re.findall(r"step (\d+)/250", out)] == [*range(1, 251)]
    assert not err


@pytest.fixture
def terminal(monkeypatch):
    """Makes stderr a terminal with this number of columns."""

    def of(columns):
        monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
        monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda file: (columns - 1, 24))

    return of


@pytest.mark.parametrize(
    "columns, shown",
    [
        (97, ", ETA 0:00, loss 0.500, grad norm 1.00, lr 1.0e-01, 50 tokens/s, MFU 35.0%"),
        (96, ", ETA 0:00, loss 0.500, 50 tokens/s, MFU 35.0%"),
        (60, ", ETA 0:00, loss 0.500"),
    ],
)
def test_a_narrow_terminal_shows_fewer_numbers_and_cuts_none(columns, shown, tmp_path, capsys, terminal, clock):
    terminal(columns)
    with run(tmp_path, 3, flops_per_token=7, peak=1000.0) as metrics:
        for step in (1, 2, 3):
            clock.now += 2
            metrics.step(step, 0.5, 1.0, 0.1, tokens=100)
        metrics.bar.refresh()
    line = capsys.readouterr().err.splitlines()[-1].split("\r")[-1].rstrip()
    assert line.endswith("| 3/3" + shown) and len(line) < columns


def test_on_a_terminal_without_a_width_every_step_prints_a_line(tmp_path, capsys, terminal):
    terminal(1)  # tqdm leaves one column free
    with run(tmp_path, 2) as metrics:
        metrics.step(1, 0.5, 1.0, 0.1, tokens=100)
    out, err = capsys.readouterr()
    assert out == "step 1/2, loss 0.500, grad norm 1.00, lr 1.0e-01\n" and "|" not in err


def test_a_run_continues_when_the_reader_of_its_pipe_has_left(tmp_path, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe, run(tmp_path, 2) as metrics:
        monkeypatch.setattr("sys.stdout", pipe)
        for step in (1, 2):
            metrics.step(step, 1.0, 1.0, 0.1, tokens=100)
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


def test_a_run_continues_while_its_disk_is_full_and_warns_once(tmp_path, capsys, monkeypatch):
    """Also if its log file is on the full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with run(tmp_path, 6) as metrics, open(tmp_path / "log", "w") as log:
        metrics.step(1, 1.0, 1.0, 0.1, tokens=100)
        resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.file.tell() + 30, limits[1]))  # a third of a line
        try:
            metrics.step(2, 1.0, 1.0, 0.1, tokens=100)
            metrics.step(3, 1.0, 1.0, 0.1, tokens=100)
            monkeypatch.setattr("sys.stdout", log)
            metrics.say("x" * 1000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        monkeypatch.undo()
        metrics.step(4, 1.0, 1.0, 0.1, tokens=100)
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    warning = "not written: File too large; make room there, the run continues"
    assert warned == [f"warning: {tmp_path / METRICS_FILE}: {warning}"]
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4]
    assert (tmp_path / "log").read_text() == "x" * 1000 + "\n"


def test_on_a_terminal_a_progress_bar_replaces_the_lines(tmp_path, capsys, terminal):
    terminal(120)
    with run(tmp_path, 4, done=1) as metrics:
        for step in (2, 3, 4):
            metrics.step(step, 0.5, 1.0, 0.1, tokens=100)
        metrics.bar.refresh()
    out, err = capsys.readouterr()
    assert not out
    assert "4/4, ETA 0:00, loss 0.500, grad norm 1.00, lr 1.0e-01, " in err and "tokens/s" in err


def test_a_resumed_run_has_every_step_exactly_once(tmp_path):
    with run(tmp_path, 9) as metrics:
        for step in (1, 2, 3, 4):
            metrics.step(step, loss=float(step), grad_norm=1.0, learning_rate=0.1, tokens=100)
            metrics.validation(step, Validation(0.1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # where the process was killed
    with run(tmp_path, 9, done=3) as metrics:
        metrics.step(4, loss=40.0, grad_norm=1.0, learning_rate=0.1, tokens=100)
    losses = [(r["step"], r["loss"]) for r in records(tmp_path) if "loss" in r]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert [r["step"] for r in records(tmp_path) if "validation_loss" in r] == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_error_names_a_damaged_line_of_a_resumed_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl:2: .*remove the line"):
        run(tmp_path, 9, done=2)


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\r", "\x0b", "\x0c", "\x1c"], ids=ascii)
def test_a_sample_may_contain_every_line_end_of_unicode(end, tmp_path):
    with run(tmp_path, 2) as metrics:
        metrics.validation(1, Validation(0.5, sample=f"one{end}two"))
    with run(tmp_path, 2, done=1) as metrics:
        metrics.step(2, 1.0, 1.0, 0.1, tokens=100)
        assert metrics.records() == read_metrics(tmp_path / METRICS_FILE) == records(tmp_path)
    assert [r.get("sample") for r in records(tmp_path)] == [f"one{end}two", None]


DAMAGE = {
    "invalid UTF-8": b'{"step": 1, "sample": "\xff"}\n',
    "a number beyond every float": b'{"step": 1e400}\n',
    "a number beyond 64 bits": b'{"step": %d}\n' % 10**30,
    "deep lists": b'{"step": 1, "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "a list": b"[1]\n",
    "no step": b'{"loss": 1}\n',
    "a step that is true": b'{"step": true}\n',
    "zero bytes": b"\0" * 20 + b"\n",
}


@pytest.mark.parametrize("line", DAMAGE.values(), ids=DAMAGE)
def test_the_error_names_a_line_that_cannot_be_read(line, tmp_path):
    (tmp_path / METRICS_FILE).write_bytes(b'{"step": 1}\n' + line + b'{"step": 2}\n')
    for read in (lambda: run(tmp_path, 9, done=2), lambda: read_metrics(tmp_path / METRICS_FILE)):
        with pytest.raises(InputError, match=rf"{METRICS_FILE}:2: .*remove the line"):
            read()


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_metrics_file_that_is_no_file_is_refused(make, tmp_path):
    make(tmp_path / METRICS_FILE)
    for read in (lambda: run(tmp_path, 9, done=2), lambda: read_metrics(tmp_path / METRICS_FILE)):
        with pytest.raises(InputError, match=f"{METRICS_FILE}: is not a regular file"):
            read()


def test_the_records_stay_when_their_file_is_removed_during_the_run(tmp_path):
    with run(tmp_path, 2) as metrics:
        metrics.step(1, 1.0, 1.0, 0.1, tokens=100)
        (tmp_path / METRICS_FILE).unlink()
        metrics.step(2, 0.5, 1.0, 0.1, tokens=100)
        assert [record["loss"] for record in metrics.records()] == [1.0, 0.5]
        metrics.step(3, 0.25, 1.0, 0.1, tokens=100)
        assert [record["loss"] for record in metrics.records()] == [1.0, 0.5, 0.25]


def test_a_metrics_file_is_not_written_through_a_link_of_its_temporary_name(tmp_path):
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / f".{METRICS_FILE}").symlink_to("elsewhere")
    with run(tmp_path, 1) as metrics:
        metrics.step(1, 1.0, 1.0, 0.1, tokens=100)
    assert (tmp_path / "elsewhere").read_text() == "mine" and len(records(tmp_path)) == 1


def test_loggers_get_every_record_and_are_closed_when_the_run_fails(tmp_path):
    class Recorder:
        seen: list

        def __init__(self):
            self.seen = []

        def write(self, record):
            self.seen.append(record)

        def close(self):
            self.seen.append("closed")

    recorder = Recorder()
    with pytest.raises(KeyboardInterrupt), run(tmp_path, 2, loggers=[recorder]) as metrics:
        metrics.step(1, 1.0, 1.0, 0.1, tokens=100)
        metrics.validation(1, Validation(2.0))
        raise KeyboardInterrupt
    assert recorder.seen == [*records(tmp_path), "closed"]


@pytest.mark.parametrize("steps, speed", [(2, ""), (3, ", 100 tokens/s")])
def test_the_summary_has_the_steps_of_this_process_their_tokens_and_time(steps, speed, tmp_path, clock):
    with run(tmp_path, 3 + steps, done=3) as metrics:
        for step in range(4, 4 + steps):
            clock.now += 1
            metrics.step(step, 1.0, 1.0, 0.1, tokens=100)
        assert metrics.summary() == f"{steps} steps, {steps}00 tokens in 0:0{steps}{speed}"


@pytest.mark.parametrize(("every", "shown"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (0, [])])
def test_a_line_is_printed_every_few_steps_and_at_the_end(every, shown, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: every == 0)
    with run(tmp_path, 5, log_every=every) as metrics:
        for step in range(1, 6):
            metrics.step(step, 1.0, 0.000012345, 0.1, tokens=100)
    out, err = capsys.readouterr()
    assert [int(line.split("/")[0].removeprefix("step ")) for line in out.splitlines()] == shown
    assert err == "" and all("grad norm 1.23e-05, " in line for line in out.splitlines())
    assert len(records(tmp_path)) == 5


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0.00"), (0.0123456, "0.0123"), (2.1, "2.10"), (99.96, "100"), (1234.0, "1.23e+03")]
)
def test_a_norm_has_three_significant_digits(value, shown):
    assert significant(value) == shown
