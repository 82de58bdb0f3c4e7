"""Draws the newest results: speed and memory of each op against its size, and of training on several GPUs against the
length of the rows.

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

SHARDED = "*-sharded-step-llama-3-8b-2x*-4-gpus.json"
BY_AUTO = "*-train-py-llama-3-8b-4-gpus.json"
SHARDED_LINES = {  # with every block checkpointed, and what the chart calls them
    "hugging face": ("Hugging Face", "C6"),
    "hugging face + liger": ("Hugging Face + Liger-Kernel", "C0"),
    "bf16 weights": ("ligermodels", "C1"),
}
SHARDED_PANELS = {"tokens_per_second": "tokens/s of four GPUs", "peak_gib": "peak memory of a GPU, GiB"}


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


def sharded_rows(folder: Path) -> dict[str, dict[int, dict]]:
    """{line: {tokens of a row: row}} of training on four GPUs, from the newest report of each length."""
    found: dict[str, dict[int, dict]] = {}
    for report in results.reports(folder, SHARDED):
        for row in report["rows"]:
            total = row.get("tokens_per_second_per_gpu", 0) * row.get("gpus", 1)
            found.setdefault(row["weights"], {})[report["length"]] = row | {"tokens_per_second": total}
    lines = {name: found[weights] for weights, (name, _) in SHARDED_LINES.items() if weights in found}
    for report in results.reports(folder, BY_AUTO):
        lines["ligermodels, what it chooses itself"] = {row["length"]: row for row in report["rows"]}
    return lines


def draw_sharded(lines: dict[str, dict[int, dict]], path: Path) -> None:
    """Two panels, speed and memory, against the length of the rows."""
    from matplotlib.figure import Figure

    colours = dict(SHARDED_LINES.values())
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, (quantity, title) in zip(figure.subplots(1, 2), SHARDED_PANELS.items(), strict=True):
        for name, rows in lines.items():
            style = {"color": colours[name]} if name in colours else {"color": "C1", "linestyle": "--"}
            places = [f"{length:,}" for length in sorted(rows)]
            axes.plot(places, [rows[length][quantity] for length in sorted(rows)], marker="o", label=name, **style)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens of a row, 8 rows a step", fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(lines), fontsize=8)
    figure.suptitle("Full fine-tuning of Llama-3-8B, FSDP2 on four H200s; solid: every block checkpointed", fontsize=10)
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
    if lines := sharded_rows(args.results):
        path = args.output / "sharded-step-llama-3-8b.png"
        draw_sharded(lines, path)
        print(path)


if __name__ == "__main__":
    main()
