"""Monitoring of a run: a progress bar (or lines, without a terminal), metrics.jsonl, and the loggers.

Every line of metrics.jsonl is an object with "step", which counts from 1. A step is one line, and so is a validation
with its sample and its accuracy: the file has all of it or nothing. A number that is not finite is null. The loggers
get the same records.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self, TextIO

import torch
from tqdm import tqdm

from ligermodels.errors import CheckpointError, InputError, shorten, silence_closed
from ligermodels.training.reporting.loggers import Logger
from ligermodels.units import counted, duration, loss_text, memory_size
from ligermodels.weights.reading import open_for_reading, parse_json
from ligermodels.weights.writing import replace_file

METRICS_FILE, COMPLETIONS_FILE = "metrics.jsonl", "completions.jsonl"
UNTIMED_STEPS = 2  # the first steps of a process compile and allocate
RECENT_STEPS = 50  # the throughput is their median
SLOW = 10  # tokens per second; below it decimals are shown
SHOWN = {  # beside the loss
    "rewards/accuracies": "accuracy", "rewards/margins": "margin", "reward": "reward", "accuracy": "accuracy",
    "margin": "margin", "divergence": "divergence",
}  # fmt: skip
SAMPLE_CHARACTERS = 400  # of a sample on the console; metrics.jsonl has all of it
MAX_EXPONENT = 700  # exp() of more than 709 overflows


class Validation(NamedTuple):
    """A validation of a model.

    loss: of the objective. values: other numbers, by name. per_token: whether the loss is in nats per token, so that it
    has a perplexity. floor: the lowest loss that any model can reach, if known. answers: how many questions the model
    answered correctly, and how many there are. sample: a prompt and its continuation.
    """

    loss: float
    values: Mapping[str, float] = {}
    per_token: bool = True
    floor: float | None = None
    answers: tuple[int, int] | None = None
    sample: str | None = None


class Metrics:
    """The progress bar, the printed lines and the metrics file of one run. A context manager.

    folder: the folder of the run. steps: steps of the whole run. device: of this rank; on a GPU its peak memory is
    shown.
    done: steps already completed when a run is resumed; later records in the metrics file are removed.
    flops_per_token, peak: model FLOPs per token, and peak FLOP/s of all devices together, as in `flops`; MFU is shown
    if both are known.
    loggers: get every record, and are closed at the end. log_every: steps between the lines that are printed where
    there is no progress bar; 0 for no lines and no bar. enabled: False on all ranks but the first, where nothing is
    printed or written.
    """

    def __init__(
        self, folder: Path, *, steps: int, device: torch.device, done: int = 0, flops_per_token: int | None = None,
        peak: float | None = None, loggers: Sequence[Logger] = (), log_every: int = 1, enabled: bool = True,
    ) -> None:  # fmt: skip
        self.steps, self.device = steps, device
        self.mfu_at_one_token_per_second = flops_per_token / peak if flops_per_token and peak else None
        self.loggers, self.log_every = loggers, log_every
        self.file: TextIO | None = None
        if enabled:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = reopen_metrics(folder / METRICS_FILE, done)
        self.bar = tqdm(
            total=steps, initial=done, dynamic_ncols=True,
            disable=not (enabled and log_every and sys.stderr.isatty()),
            bar_format="{percentage:3.0f}%|{bar:12}| {n_fmt}/{total_fmt}{postfix}",
        )  # fmt: skip
        if not self.bar.disable and self.bar.ncols == 0:  # some containers have terminals without a width
            self.bar.disable = True
        self.write_failed = False
        self.completed = self.skipped = self.tokens = 0  # of the steps of this process
        self.seconds = 0.0  # time of these steps
        self.speeds: list[float] = []  # tokens per second of each timed step
        self.timed_since = 0.0
        self.resume_clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.file:
            with suppress(OSError):  # the failed write was already reported
                self.file.close()
        for logger in self.loggers:
            logger.close()

    def resume_clock(self) -> None:
        """Restarts the timer of the step. Call after work that is not training and prints nothing."""
        self.clock = time.perf_counter()

    def step(
        self, step: int, loss: float, grad_norm: float, learning_rate: float, *, tokens: int,
        values: Mapping[str, float] = {}, skipped: bool = False,
    ) -> None:  # fmt: skip
        """Records a step. Call it after the loss was read, which waits for the device.

        The step's time is the time since the last call. step: counts from 1. tokens: positions over all ranks and
        micro-batches. values: the objective's metrics, by name. skipped: whether the update was skipped.
        """
        now = time.perf_counter()
        self.completed += 1
        self.skipped += skipped
        self.tokens += tokens
        self.seconds += now - self.clock
        record = {"step": step, "loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate, **values}
        if skipped:
            record["skipped"] = True
        if self.completed > UNTIMED_STEPS:
            self.speeds.append(tokens / (now - self.clock))
            record["tokens_per_second"] = round(self.speeds[-1], None if self.speeds[-1] >= SLOW else 2)
            if self.mfu_at_one_token_per_second:
                record["mfu"] = round(self.speeds[-1] * self.mfu_at_one_token_per_second, 4)
        else:
            self.timed_since = now
        seconds_left = self.seconds_left(now, self.steps - step)
        if seconds_left is not None:
            record["seconds_left"] = round(seconds_left)
        if self.device.type == "cuda":
            record["peak_memory_gib"] = round(self.peak_memory / 2**30, 2)
        self.write(record)

        shown = [f"{words} {values[name]:z.2f}" for name, words in SHOWN.items() if name in values]
        eta = [] if seconds_left is None else [f"ETA {duration(seconds_left)}"]
        short = [*eta, f"loss {loss_text(loss)}", *shown]
        status = [*short, f"grad norm {significant(grad_norm)}", f"lr {learning_rate:.1e}", *self.costs()]
        if not self.bar.disable:
            self.bar.set_postfix_str(self.longest_that_fits(status, [*short, *self.costs()], short), refresh=False)
            self.bar.update()
        elif self.log_every and (step % self.log_every == 0 or step == self.steps):
            self.say(f"step {step}/{self.steps}, {', '.join(status)}")
        self.clock = now

    def longest_that_fits(self, *choices: Sequence[str]) -> str:
        """Returns the first choice that fits the width of the terminal, which would otherwise cut a number in half.

        choices: the longest first. Returns the last one if none fits.
        """
        room = (self.bar.ncols or 0) - len(f"100%|{'':12}| {self.steps}/{self.steps}, ")
        texts = [", ".join(choice) for choice in choices]
        return next((text for text in texts if len(text) <= room), texts[-1])

    def validation(self, step: int, found: Validation) -> None:
        """Records a validation, as one record."""
        loss, floor, unit = found.loss, found.floor, " nats/token" if found.per_token else ""
        record: dict[str, Any] = {"step": step, "validation_loss": loss}
        gap = "" if floor is None else f", floor {loss_text(floor)}, gap {loss_text(loss - floor)}"
        line = f"validation loss {loss_text(loss)}{unit}{gap}"
        if found.per_token:
            record["validation_perplexity"] = perplexity = math.inf if loss > MAX_EXPONENT else math.exp(loss)
            line += f", perplexity {perplexity:.4g}"
        record |= {f"validation_{name}": value for name, value in found.values.items()}
        shown = [f", {words} {found.values[name]:z.2f}" for name, words in SHOWN.items() if name in found.values]
        lines = ["".join([line, *shown])]
        if floor is not None:
            record["floor"] = floor
        if found.answers is not None:
            record["correct"], record["questions"] = found.answers
            lines.append(f"{found.answers[0]} of {found.answers[1]} questions answered correctly")
        if found.sample is not None:
            record["sample"] = found.sample
            lines.append(shorten(found.sample, SAMPLE_CHARACTERS))
        self.write(record)
        for line in lines:
            self.say(f"step {step}: {line}")

    def say(self, line: str) -> None:
        """Prints a line, above the progress bar. The time before it does not count as training time.

        The run continues if the reader of a pipe has left, or the disk of a log file is full.
        """
        if self.file:
            try:
                self.bar.write(line)
                sys.stdout.flush()
            except BrokenPipeError:
                silence_closed(sys.stdout)
            except OSError:
                pass  # the buffer keeps the line until there is room
        self.resume_clock()

    def write(self, record: dict[str, Any]) -> None:
        """Writes a record to the metrics file and the loggers.

        If the disk is full, the run continues with one warning; records that do not fit into the buffer are lost.
        """
        if not self.file:
            return
        infinite = (name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value))
        record = record | dict.fromkeys(infinite)
        try:
            self.file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self.file.flush()
            self.write_failed = False
        except OSError as error:
            if not self.write_failed:
                self.say(
                    f"warning: {self.file.name}: not written: {error.strerror}; make room there, the run continues"
                )
            self.write_failed = True
        for logger in self.loggers:
            logger.write(record)

    def records(self) -> list[dict[str, Any]]:
        """The records of the metrics file, in order, also if it was renamed or removed during the run."""
        if not self.file:
            return []
        with open(os.dup(self.file.fileno()), "rb") as stream:
            stream.seek(0)
            return parse_records(stream.read(), Path(self.file.name))

    def summary(self) -> str:
        """Returns the steps of this process, their tokens and time, throughput, MFU, peak memory and the number of
        skipped updates."""
        skipped = [f"{counted(self.skipped, 'update')} skipped"] if self.skipped else []
        done = f"{counted(self.completed, 'step')}, {counted(self.tokens, 'token')} in {duration(self.seconds)}"
        return ", ".join([done, *self.costs(), *skipped])

    def costs(self) -> list[str]:
        """Returns throughput, MFU and peak memory, as far as they are known."""
        shown = []
        if self.speeds:
            shown.append(f"{self.tokens_per_second:,.{0 if self.tokens_per_second >= SLOW else 2}f} tokens/s")
            if self.mfu_at_one_token_per_second:
                shown.append(f"MFU {self.tokens_per_second * self.mfu_at_one_token_per_second:.1%}")
        if self.device.type == "cuda":
            shown.append(memory_size(self.peak_memory))
        return shown

    def seconds_left(self, now: float, steps: int) -> float | None:
        """The ETA, from the timed steps and the validations between them; None before the first timed step."""
        timed = self.completed - UNTIMED_STEPS
        return (now - self.timed_since) / timed * steps if timed > 0 else None

    @property
    def peak_memory(self) -> int:
        """Peak allocated memory of this rank's GPU in bytes."""
        return torch.cuda.max_memory_allocated(self.device)

    @property
    def tokens_per_second(self) -> float:
        """The median over the last steps."""
        return median(self.speeds[-RECENT_STEPS:])


def significant(value: float) -> str:
    """A number with three significant digits: 0.0000123 -> "1.23e-05", 2.1 -> "2.10", 100 -> "100"."""
    return f"{value:#.3g}".removesuffix(".")


def reopen_metrics(path: Path, done: int) -> TextIO:
    """Opens the metrics file to append to it after `done` steps. Removes later records and a truncated last line.

    Raises InputError if the file cannot be read, or a line is damaged.
    """
    data = metrics_bytes(path) if done and os.path.lexists(path) else b""
    kept = [
        line
        for line, record in zip(complete_lines(data), parse_records(data, path), strict=True)
        if record["step"] <= done
    ]
    replace_file(path, b"".join(line + b"\n" for line in kept))
    return path.open("a+", encoding="utf-8")


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl. A last line that a kill or a full disk cut off is ignored.

    Raises InputError if the file cannot be read, or a line is damaged.
    """
    return parse_records(metrics_bytes(file), file)


def metrics_bytes(file: Path) -> bytes:
    with open_for_reading(file) as stream:
        return stream.read()


def complete_lines(data: bytes) -> list[bytes]:
    """The lines that have their end, which is "\\n" alone: a text may contain any other of Unicode's line ends."""
    return data.split(b"\n")[:-1]


def parse_records(data: bytes, file: Path) -> list[dict[str, Any]]:
    """The records of the complete lines. Raises InputError, which names the file and the line, if one is damaged."""
    return [parse_metrics_line(line, f"{file}:{number}") for number, line in enumerate(complete_lines(data), 1)]


def parse_metrics_line(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = parse_json(line, Path(place))
    except CheckpointError as error:
        raise InputError(f"{place}: not a JSON object; remove the line") from error
    if type(record.get("step")) is not int:
        raise InputError(f"{place}: field step is {record.get('step')!r}, not a whole number; remove the line")
    return record


class CompletionsFile:
    """completions.jsonl: what was sampled, in the folder of a run. Appends lines, objects with "step".

    The file is opened with the first lines. Lines of later steps than `done` are then removed: a resumed run samples
    them again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: TextIO | None = None

    def write(self, lines: Iterable[str], done: int) -> None:
        """done: completed steps of the run."""
        if self.file is None:
            self.file = reopen_metrics(self.path, done)
        self.file.writelines(f"{line}\n" for line in lines)
        self.file.flush()
