"""README's table and its chart, computed from the results: medians over runs, and how far runs lie apart.

python -m benchmarks.headline            prints the table
python -m benchmarks.headline --plot     draws benchmarks/results/plots/headline.png too
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks import results

PLOT = results.FOLDER / "plots" / "headline.png"
INK, OURS = "#767676", "#d9480f"  # on white and on black alike


class Side(NamedTuple):
    """One library's runs: files whose names begin with a date of `dates` and end with `name`; fields of their rows.

    value: the field that is compared, `scale` times. noted: a better figure of the peer that only a note beside the
    results holds: it counts where it is the higher.
    """

    label: str
    dates: Sequence[str]
    name: str
    where: dict[str, Any]
    value: str = "tokens_per_second"
    scale: int = 1
    noted: float = 0.0

    def rows(self) -> list[dict]:
        """The rows of all runs."""
        rows = [
            row
            for date in self.dates
            for report in results.reports(results.FOLDER, f"{date}-{self.name}.json")
            for row in report["rows"]
            if self.where.items() <= row.items() and self.value in row
        ]
        if not rows:
            raise ValueError(f"no results of {self.dates} {self.name}")
        return rows

    def values(self) -> list[float]:
        return [self.scale * row[self.value] for row in self.rows()]

    def median(self) -> float:
        return max(statistics.median(self.values()), self.noted)

    def spread(self) -> float:
        """The range of the runs as a share of their median."""
        values = self.values()
        return (max(values) - min(values)) / statistics.median(values)


class Line(NamedTuple):
    title: str
    ours: Side
    peer: Side
    unit: str = ""  # " s" where the value is a time, so that the lower one is the better

    @property
    def factor(self) -> float:
        ours, peer = self.ours.median(), self.peer.median()
        return peer / ours if self.unit else ours / peer


def measured(
    name: str, ours: dict, label: str, peer: dict, *dates: str, value: str = "tokens_per_second"
) -> tuple[Side, Side]:
    """Our side and the peer's of files that hold both."""
    return Side("ligermodels", dates, name, ours, value), Side(label, dates, name, peer, value)


THREE_RUNS = "2026-11-28-*"  # or what makes three of the runs before
NONE, AUTO, FULL = ({"recompute": kind} for kind in ("none", "auto", "full"))
WITH_ADAMW = {"provider": "ligermodels and its AdamW"}
HUGGING_FACE = {"provider": "hugging face"}
LIGER = {"provider": "hugging face + liger"}
FOUR_GPUS = "2026-11-27-19*"
LINES = (
    Line(
        "full fine-tuning, Llama-3-8B (1)",
        *measured("train-step-llama-3-8b-8x2048", WITH_ADAMW | NONE, "Liger-Kernel", LIGER, THREE_RUNS),
    ),
    Line(
        "&nbsp;&nbsp;on four GPUs, rows of 8,192 (2)",
        Side("ligermodels", [FOUR_GPUS], "train-py-llama-3-8b-4-gpus", {"length": 8192}),
        Side(
            "Liger-Kernel", [FOUR_GPUS], "sharded-step-llama-3-8b-2x8192-4-gpus", {"weights": "hugging face + liger"},
            "tokens_per_second_per_gpu", scale=4,
        ),
    ),
    Line(
        "&nbsp;&nbsp;Gemma-3-1B",
        *measured("train-step-gemma-3-1b-4x2048", WITH_ADAMW | NONE, "Hugging Face", HUGGING_FACE | NONE, THREE_RUNS),
    ),
    Line(
        "&nbsp;&nbsp;Qwen3-30B-A3B, 8 of its layers",
        *measured(
            "train-step-qwen3-30b-a3b-8-layers-8x2048",
            WITH_ADAMW | NONE, "Hugging Face", HUGGING_FACE | NONE, THREE_RUNS,
        ),
    ),
    Line(
        "&nbsp;&nbsp;Qwen3.5-4B, one row of 32,768 tokens",
        Side("ligermodels", ["2026-11-27-*"], "train-step-qwen3.5-4b-1x32768", WITH_ADAMW | AUTO),
        Side("Liger-Kernel", ["2026-11-26-*"], "train-step-qwen3.5-4b-1x32768", LIGER),
    ),
    Line(
        "&nbsp;&nbsp;Gemma-3-4B with images",
        *measured(
            "image-step-gemma-3-4b-8x2x1528",
            WITH_ADAMW | AUTO, "Hugging Face", HUGGING_FACE | FULL, "2026-11-27-*", THREE_RUNS,
        ),
    ),
    Line(
        "&nbsp;&nbsp;SmolLM2-135M, a step of 16×104",
        *measured(
            "small-steps-smollm2-135m-full-16x104",
            {"provider": "ligermodels"}, "Hugging Face", HUGGING_FACE, THREE_RUNS, value="ms",
        ),
        unit=" ms",
    ),
    Line(
        "LoRA, Llama-3-8B",
        *measured(
            "lora-step-llama-3-8b-8x2048",
            {"provider": "ligermodels, LoRA"} | NONE,
            "PEFT + Liger-Kernel", {"provider": "hugging face + peft + liger, LoRA"} | NONE, "2026-11-23-*", THREE_RUNS,
        ),
    ),
    Line(
        "QLoRA, Llama-3-8B, one row of 2,048",
        *measured(
            "lora-step-llama-3-8b-1x2048",
            {"provider": "ligermodels, QLoRA, offloaded inputs"},
            "Unsloth", {"provider": "unsloth, QLoRA"}, "2026-11-26-*",
        ),
    ),
    Line(
        "DPO with LoRA, Llama-3-8B",
        *measured(
            "dpo-step-llama-3-8b",
            {"provider": "ligermodels"}, "TRL", {"provider": "trl"}, "2026-11-23-214700", THREE_RUNS,
            value="useful_tokens_per_second",
        ),
    ),
    Line(
        "GRPO, a step, Qwen2.5-1.5B",
        *measured(
            "grpo-step-qwen2.5-1.5b",
            {"provider": "ligermodels"}, "TRL", {"provider": "trl"}, "2026-11-24-*", "2026-11-27-*", THREE_RUNS,
            value="step_s",
        ),
        unit=" s",
    ),
    Line(
        "generation, Llama-3-8B, one request",
        Side(
            "ligermodels", ["2026-11-26-*", THREE_RUNS], "generation",
            {"provider": "ligermodels", "case": "llama-3-8b-1"}, "new_tokens_per_s",
        ),
        Side(
            "Hugging Face, compiled", [THREE_RUNS], "generation", HUGGING_FACE | {"case": "llama-3-8b-1"},
            "new_tokens_per_s", noted=144,  # 2026-11-23-notes-generation.md
        ),
    ),
)  # fmt: skip


def cell(side: Side, unit: str) -> str:
    """The median, and the peak memory in GiB."""
    value = side.median()
    shown = f"{value:.2f}{unit}" if unit else f"{value:,.0f}"
    peak = max(row.get("peak_gib", 0.0) for row in side.rows())
    return shown + (f", {peak:.{1 if peak < 10 else 0}f}" if peak else "")


def runs(line: Line) -> str:
    """How many runs a side has at least, and how far those of a side lie apart at most."""
    number = min(len(line.ours.values()), len(line.peer.values()))
    return f"{number}, {max(line.ours.spread(), line.peer.spread()):.1%}" if number > 1 else "1"


def table() -> str:
    head = "| tokens/s, peak GiB | ligermodels | best peer | | runs, spread |\n|---|---|---|---|---|\n"
    rows = (
        f"| {line.title} | {cell(line.ours, line.unit)} | {line.peer.label} {cell(line.peer, line.unit)} "
        f"| {line.factor:.2f} × | {runs(line)} |"
        for line in LINES
    )
    return head + "\n".join(rows)


def draw() -> None:
    """Bars of our speed as a multiple of the best peer's, readable on white and on black."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    titles = [line.title.replace("&nbsp;", "").split(" (")[0] for line in LINES]
    factors = [line.factor for line in LINES]
    bars = axes.barh(titles, factors, color=OURS, height=0.62)
    labels = [f"{factor:.2f} ×  {line.peer.label}" for factor, line in zip(factors, LINES, strict=True)]
    axes.bar_label(bars, labels, padding=4, color=INK, fontsize=9)
    axes.axvline(1, color=INK, linewidth=1, linestyle="--")
    axes.invert_yaxis()
    axes.set_xlim(0, max(factors) * 1.16)
    axes.set_title("Speed of ligermodels as a multiple of the best peer's", color=INK, fontsize=11)
    axes.tick_params(colors=INK, labelsize=9)
    for edge in axes.spines.values():
        edge.set_visible(False)
    figure.savefig(PLOT, dpi=110, transparent=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", action="store_true")
    args = parser.parse_args()
    print(table())
    if args.plot:
        draw()


if __name__ == "__main__":
    main()
