"""Draws speed and memory against size, one PNG an op and one line a provider, from each op's newest results.

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=results.FOLDER)
    parser.add_argument("--output", type=Path, default=results.FOLDER / "plots")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for op, report in results.latest(args.results).items():
        draw(report, args.output / f"{op}.png")
        print(args.output / f"{op}.png")


if __name__ == "__main__":
    main()
