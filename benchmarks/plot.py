"""Draws the newest results: for each op, speed and memory against size; for training steps, one bar per provider.

python -m benchmarks.plot [--results FOLDER] [--output FOLDER]
"""

import argparse
import math
from pathlib import Path

from benchmarks import results

PROVIDERS = ("liger", "quack", "torch.compile", "ligermodels", "cut-cross-entropy", "transformers", "pytorch")
COLOURS = {provider: f"C{index}" for index, provider in enumerate(PROVIDERS)}  # the same colours in every plot
PANELS = {"share": "% of the limit", "peak_mib": "peak memory, MiB"}
SCALE = {"share": 100.0, "peak_mib": 1.0}

STEP_MODEL = "llama-3-8b"
STEP_PROVIDERS = {  # and what their charts call them: bf16 weights that are rounded to nearest lose small updates
    "hugging face": "Hugging Face, bf16 weights",
    "hugging face + liger": "+ Liger, bf16 weights",
    "hugging face + liger, fp32 weights": "+ Liger, fp32 weights",
    "ligermodels and its AdamW": "ligermodels, exact bf16 weights",
}
STEP_COLOURS = ("C6", "C0", "C9", "C1")
STEP_PANELS = {"tokens_per_second": "tokens/s (higher is better)", "peak_gib": "peak memory, GiB (lower is better)"}
CHECKPOINTING = {"none": "no activation checkpointing", "full": "every block checkpointed"}


def timed_rows(report: dict) -> list[dict]:
    """The rows of the op's last pass (the only ones with peak memory), from the smallest shape to the largest."""
    rows = [row for row in report["rows"] if "peak_mib" in row]
    return sorted(rows, key=lambda row: math.prod(map(int, row["shape"].split("x"))))


def lines(report: dict, quantity: str) -> dict[str, dict[str, float]]:
    """{provider: {shape: value}}. Shapes at which a provider was not timed are omitted."""
    values_by_provider: dict[str, dict[str, float]] = {}
    for row in timed_rows(report):
        values_by_provider.setdefault(row["provider"], {})[row["shape"]] = SCALE[quantity] * row[quantity]
    return values_by_provider


def style(provider: str) -> dict:
    """The line style. A variant such as "ligermodels, in place" has the colour of its provider and is dashed."""
    base, _, variant = provider.partition(", ")
    return {"color": COLOURS.get(base), "linestyle": "--" if variant else "-"}


def draw(report: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(row["shape"] for row in timed_rows(report)))
    kinds = sorted({row["pass"] for row in timed_rows(report)})
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (quantity, title) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for provider, values in sorted(lines(report, quantity).items()):
            places = [shapes.index(shape) for shape in values]
            axes.plot(places, list(values.values()), marker="o", label=provider, **style(provider))
        axes.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right", fontsize=7)
        # Memory is negative if an op runs in place and the gradients are subtracted.
        axes.set_ylim(bottom=min(0.0, 1.1 * axes.dataLim.ymin))
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.suptitle(f"{report['op']}, {', '.join(kinds)} ({report['gpu']}, {report['date'][:10]})", fontsize=10)
    figure.savefig(path, dpi=90)


def training_step_report(folder: Path) -> dict | None:
    """The newest report of whole training steps of STEP_MODEL in which every provider of the chart ran, if any."""
    complete = [
        report
        for report in results.reports(folder)
        if report.get("model") == STEP_MODEL and {row.get("provider") for row in report["rows"]} >= set(STEP_PROVIDERS)
    ]
    return max(complete, key=lambda report: report["date"], default=None)


def draw_training_step(report: dict, path: Path) -> None:
    """Two panels of grouped bars, speed and memory. A provider without a result gets a label and no bar."""
    from matplotlib.figure import Figure

    rows = {(row["provider"], row["recompute"]): row for row in report["rows"]}
    width = 0.8 / len(STEP_PROVIDERS)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, (quantity, title) in zip(figure.subplots(1, 2), STEP_PANELS.items(), strict=True):
        for index, provider in enumerate(STEP_PROVIDERS):
            measured = [rows.get((provider, mode)) for mode in CHECKPOINTING]
            values = [row and row.get(quantity) for row in measured]
            places = [group + (index - (len(STEP_PROVIDERS) - 1) / 2) * width for group in range(len(CHECKPOINTING))]
            heights, colour = [value or 0 for value in values], STEP_COLOURS[index]
            bars = axes.bar(places, heights, width, label=STEP_PROVIDERS[provider], color=colour)
            missing = ["not run" if row is None else "out of\nmemory" for row in measured]
            labels = [f"{value:,}" if value else text for value, text in zip(values, missing, strict=True)]
            axes.bar_label(bars, labels, fontsize=7, padding=2)
        axes.set_xticks(range(len(CHECKPOINTING)), CHECKPOINTING.values(), fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.margins(y=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(STEP_PROVIDERS), fontsize=8)
    shape = f"{report['batch']} × {report['length']} tokens a step, computed in bf16"
    figure.suptitle(
        f"Full fine-tuning of {report['model']}, {shape} ({report['gpu']}, {report['date'][:10]})", fontsize=10
    )
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=results.FOLDER)
    parser.add_argument("--output", type=Path, default=results.FOLDER / "plots")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for op, report in results.latest(args.results).items():
        draw(report, args.output / f"{op}.png")
        print(args.output / f"{op}.png")
    if training_step := training_step_report(args.results):
        path = args.output / f"train-step-{STEP_MODEL}.png"
        draw_training_step(training_step, path)
        print(path)


if __name__ == "__main__":
    main()
