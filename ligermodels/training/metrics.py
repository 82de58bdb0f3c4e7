"""What a run says of itself: a progress bar, and metrics.jsonl with one JSON object a step and one a validation."""

import json
import time
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self, TextIO

import torch
from tqdm import tqdm


class Metrics:
    """Bar and file of one run; on ranks other than the first it does nothing. A context manager."""

    def __init__(
        self, path: Path, steps: int, tokens_per_step: int, device: torch.device, enabled: bool = True
    ) -> None:
        """tokens_per_step: positions over all ranks and micro-batches, padding included."""
        self.tokens_per_step = tokens_per_step
        self.device = device
        self.file: TextIO | None = None
        if enabled:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("w", encoding="utf-8")
        self.bar = tqdm(total=steps, unit="step", dynamic_ncols=True, disable=not enabled)
        self.speeds: list[float] = []
        self.resume_clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()
        if self.file:
            self.file.close()

    def resume_clock(self) -> None:
        self.clock = time.perf_counter()

    def step(self, step: int, loss: float, grad_norm: float, learning_rate: float) -> None:
        """Call when the step's loss has been read, which waits for the device: its time is that since the last call."""
        now = time.perf_counter()
        speed = self.tokens_per_step / (now - self.clock)
        self.clock = now
        self.speeds.append(speed)
        record = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": learning_rate,
            "tokens_per_second": round(speed),
        }
        if self.device.type == "cuda":
            record["peak_memory_gib"] = round(self.peak_memory_gib, 2)
        self.write(record)
        self.bar.set_postfix_str(f"loss {loss:.3f}, {self.tokens_per_second:,.0f} tokens/s", refresh=False)
        self.bar.update()

    def validation(self, step: int, loss: float, floor: float | None) -> None:
        """Nats per predicted token. The time spent on it does not count as training."""
        self.write({"step": step, "validation_loss": loss} | ({} if floor is None else {"floor": floor}))
        beside = "" if floor is None else f", floor {floor:.3f}, gap {loss - floor:.3f}"
        self.say(f"step {step}: validation loss {loss:.3f} nats/token{beside}")
        self.resume_clock()

    def say(self, line: str) -> None:
        """Prints a line, above the bar while there is one."""
        if self.file:
            self.bar.write(line)

    def write(self, record: dict[str, Any]) -> None:
        if self.file:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()

    def summary(self) -> str:
        memory = f", peak memory {self.peak_memory_gib:.1f} GiB" if self.device.type == "cuda" else ""
        return f"{self.tokens_per_second:,.0f} tokens/s{memory}"

    @property
    def peak_memory_gib(self) -> float:
        return torch.cuda.max_memory_allocated(self.device) / 2**30

    @property
    def tokens_per_second(self) -> float:
        """The median step, leaving out the first two, which compile and allocate, as soon as there are others."""
        return median(self.speeds[2:][-50:] or self.speeds)
