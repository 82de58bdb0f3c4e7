"""What a run says of itself: a progress bar, or lines where there is no terminal, and metrics.jsonl.

Of metrics.jsonl every line is an object with "step", which counts updates from 1: one a step, and one a validation, a
sample and a count of right answers. A number that is not finite is null. The same goes to the run's loggers.
"""

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self, TextIO

import torch
from tqdm import tqdm

from ligermodels.errors import InputError, silence_closed_stdout
from ligermodels.training.reporting.loggers import Logger
from ligermodels.units import counted, duration, memory_size

METRICS_FILE = "metrics.jsonl"
WARMUP_STEPS = 2  # of a process: they compile and allocate, and are not timed
RECENT = 50  # steps whose median speed is shown
SLOW = 10  # tokens a second, below which their decimals count
LARGEST_EXPONENT = 700  # of e: beyond 709 a float overflows


class Metrics:
    """Bar, lines and file of one run; on ranks other than the first it does nothing. A context manager.

    folder: of the run. steps: of the whole run, `done` of which a resumed run has taken already; what its file says of
    later ones is removed. tokens_per_step: positions over all ranks and micro-batches, padding included.
    flops_per_token, peak: as `flops` has them, the latter of all devices together; None where unknown.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        tokens_per_step: int,
        device: torch.device,
        done: int = 0,
        flops_per_token: int | None = None,
        peak: float | None = None,
        loggers: Sequence[Logger] = (),
        enabled: bool = True,
    ) -> None:
        self.steps = steps
        self.tokens_per_step = tokens_per_step
        self.device = device
        self.share_of_peak = flops_per_token / peak if flops_per_token and peak else None  # of one token a second
        self.loggers = loggers
        self.file: TextIO | None = None
        if enabled:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = continued(folder / METRICS_FILE, done)
        self.bar = tqdm(
            total=steps, initial=done, dynamic_ncols=True, disable=not (enabled and sys.stderr.isatty()),
            bar_format="{percentage:3.0f}%|{bar:12}| {n_fmt}/{total_fmt}{postfix}",
        )  # fmt: skip
        if not self.bar.disable and self.bar.ncols == 0:  # as in some containers, whose terminals have no width
            self.bar.disable = True
        self.full = False
        self.taken = self.skipped = 0
        self.seconds = 0.0  # of this process's steps
        self.speeds: list[float] = []
        self.timed_since = 0.0
        self.resume_clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()
        if self.file:
            with suppress(OSError):  # of which was said what there is to say
                self.file.close()
        for logger in self.loggers:
            logger.close()

    def resume_clock(self) -> None:
        """Call after what is not training and says nothing."""
        self.clock = time.perf_counter()

    def step(self, step: int, loss: float, grad_norm: float, learning_rate: float, *, skipped: bool = False) -> None:
        """Call when the step's loss has been read, which waits for the device: its time is that since the last call.

        step: counts from 1. skipped: the weights were not updated.
        """
        now = time.perf_counter()
        self.taken += 1
        self.skipped += skipped
        self.seconds += now - self.clock
        record = {"step": step, "loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate}
        if skipped:
            record["skipped"] = True
        if self.taken > WARMUP_STEPS:
            self.speeds.append(self.tokens_per_step / (now - self.clock))
            record["tokens_per_second"] = round(self.speeds[-1], None if self.speeds[-1] >= SLOW else 2)
            if self.share_of_peak:
                record["share_of_peak"] = round(self.speeds[-1] * self.share_of_peak, 4)
        else:
            self.timed_since = now
        if self.device.type == "cuda":
            record["peak_memory_gib"] = round(self.peak_memory / 2**30, 2)
        self.write(record)

        short = [*self.time_left(now, self.steps - step), f"loss {loss:.3f}"]
        status = [*short, f"grad norm {grad_norm:.2f}", f"lr {learning_rate:.1e}", *self.costs()]
        if not self.bar.disable:
            self.bar.set_postfix_str(self.fitting(status, [*short, *self.costs()], short), refresh=False)
            self.bar.update()
        else:
            self.say(f"step {step}/{self.steps}, {', '.join(status)}")
        self.clock = now

    def fitting(self, *choices: Sequence[str]) -> str:
        """The first of them, longest first, that the terminal has room for: half a number would be a wrong one."""
        room = (self.bar.ncols or 0) - len(f"100%|{'':12}| {self.steps}/{self.steps}, ")
        texts = [", ".join(choice) for choice in choices]
        return next((text for text in texts if len(text) <= room), texts[-1])

    def validation(self, step: int, loss: float, floor: float | None = None) -> None:
        """loss, floor: nats per predicted token; floor: the entropy of the data, where it is known."""
        perplexity = math.inf if loss > LARGEST_EXPONENT else math.exp(loss)
        record = {"step": step, "validation_loss": loss, "validation_perplexity": perplexity}
        self.write(record | ({} if floor is None else {"floor": floor}))
        beside = "" if floor is None else f", floor {floor:.3f}, gap {loss - floor:.3f}"
        self.say(f"step {step}: validation loss {loss:.3f} nats/token{beside}, perplexity {perplexity:.4g}")

    def sample(self, step: int, text: str) -> None:
        self.write({"step": step, "sample": text})
        self.say(f"step {step}: {text}")

    def skill(self, step: int, right: int, asked: int) -> None:
        self.write({"step": step, "right_answers": right, "questions": asked})
        self.say(f"step {step}: {right} of {asked} questions answered right")

    def say(self, line: str) -> None:
        """Prints a line, above the bar while there is one. What led to it is not timed as training.

        Where the reader of a pipe has left, or the disk that a log is on is full, the run goes on all the same.
        """
        if self.file:
            try:
                self.bar.write(line)
                sys.stdout.flush()
            except BrokenPipeError:
                silence_closed_stdout()
            except OSError:
                pass  # kept until there is room, as far as the buffer goes
        self.resume_clock()

    def write(self, record: dict[str, Any]) -> None:
        """No line is worth a run: where the disk is full, that is said, and what is not buffered is lost."""
        if not self.file:
            return
        record = {name: None if unbounded(value) else value for name, value in record.items()}
        try:
            self.file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self.file.flush()
            self.full = False
        except OSError as error:
            if not self.full:
                self.say(f"warning: {self.file.name}: not written: {error.strerror}; make room there, the run goes on")
            self.full = True
        for logger in self.loggers:
            logger.write(record)

    def finish(self) -> None:
        """Ends the bar, and says what the steps took, if any; what is said later stands below."""
        self.bar.close()
        if self.taken:
            self.say(self.summary())

    def summary(self) -> str:
        left_out = [f"{counted(self.skipped, 'update')} skipped"] if self.skipped else []
        speed = [] if self.speeds else ["too few steps to tell tokens/s"]
        return ", ".join([*speed, *self.costs(), *left_out])

    def costs(self) -> list[str]:
        """Speed, share of the peak and memory, as far as they are known."""
        shown = []
        if self.speeds:
            shown.append(f"{self.tokens_per_second:,.{0 if self.tokens_per_second >= SLOW else 2}f} tokens/s")
            if self.share_of_peak:
                shown.append(f"{self.tokens_per_second * self.share_of_peak:.1%} of peak")
        if self.device.type == "cuda":
            shown.append(memory_size(self.peak_memory))
        return shown

    def time_left(self, now: float, steps: int) -> list[str]:
        """By the steps that are timed, with all that came between them."""
        timed = self.taken - WARMUP_STEPS
        return [f"ETA {duration((now - self.timed_since) / timed * steps)}"] if timed > 0 else []

    @property
    def peak_memory(self) -> int:
        """Bytes of this rank's GPU."""
        return torch.cuda.max_memory_allocated(self.device)

    @property
    def tokens_per_second(self) -> float:
        """The median of the last steps."""
        return median(self.speeds[-RECENT:])


def unbounded(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def continued(path: Path, done: int) -> TextIO:
    """The file opened to go on after `done` steps: what it says of later ones, a line cut off among it, is removed."""
    lines = path.read_text(encoding="utf-8").splitlines() if done and path.exists() else []
    if lines and not complete(lines[-1]):
        lines.pop()
    kept = [line for number, line in enumerate(lines, 1) if step_of(line, f"{path}:{number}") <= done]
    beside = path.with_name(f".{path.name}")
    beside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(beside, path)
    return path.open("a", encoding="utf-8")


def complete(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def step_of(line: str, place: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f'{place}: is no object with "step"; remove the line') from error
