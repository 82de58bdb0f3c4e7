"""Draws the pictures of docs/real-models.md from the files that `gather.py` makes.

A run in a later file replaces one of the same settings in an earlier file.

python -m benchmarks.real_models.plot benchmarks/results/*-real-models.json --output docs/images
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Points = Sequence[Sequence[float]]
MODELS = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma 3 270M"}
STYLES: dict[str, Record] = {  # fp32 is drawn first and wide: exact lies on it
    "fp32": {"color": "#9ecae1", "linewidth": 5, "label": "ligermodels, fp32 weights"},
    "exact": {"color": "#d62728", "linewidth": 1.5, "label": "ligermodels, default (exact bf16 weights)"},
    "nearest": {"color": "#7f7f7f", "linewidth": 1.5, "label": "ligermodels, bf16 weights rounded to nearest"},
    "trl": {"color": "#1f77b4", "linewidth": 1.5, "linestyle": "--", "label": "TRL's defaults"},
}
RATES = {"full": ("#d62728", 2e-5), "LoRA": ("#1f77b4", 2e-4)}  # the colour, the default learning rate
PERPLEXITIES = {"smollm2": (55, 60, 65, 70, 75, 80), "gemma3": (70, 100, 200, 500, 1000)}  # ticks
DPI, COLOURS = 80, 64


def objective(run: Record) -> str:
    return run["settings"].get("objective", "sft")


def of_defaults(runs: Sequence[Record], model: str, data: str, kind: str) -> dict[str, Record]:
    """{set: the run that trained all weights by the defaults}, in the order of STYLES."""
    found = {
        run["set"]: run
        for run in runs
        if (run["model"], run["data"], objective(run), run["label"]) == (model, data, kind, "default")
    }
    return {name: found[name] for name in STYLES if name in found}


def fractions(points: Points) -> tuple[list[float], list[float]]:
    """Steps as fractions of the run: libraries take steps of different sizes over the same data."""
    last = points[-1][0]
    return [step / last for step, _ in points], [value for _, value in points]


def panel(axes: Any, runs: dict[str, Record], curve: str, title: str) -> None:
    for name, run in runs.items():
        points = run["validation"] if curve == "validation" else run["curves"].get(curve)
        if points:
            axes.plot(*fractions(points), **STYLES[name], marker="o" if curve == "validation" else "", markersize=3)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)


def figure_of(rows: int, columns: int, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def draw_supervised(runs: Sequence[Record], path: Path) -> None:
    """Training and validation loss of chats."""
    figure, panels = figure_of(2, 2, 6.4)
    names = {"questions": "questions and answers", "calls": "tool calls"}
    for row, (data, about) in zip(panels, names.items(), strict=True):
        found = of_defaults(runs, "smollm2", data, "sft")
        panel(row[0], found, "loss", f"{about}: training loss, nats a token")
        panel(row[1], found, "validation", f"{about}: validation loss")
    finish(figure, panels, "SmolLM2-135M-Instruct, supervised fine-tuning of all weights", path)


def draw_preferences(runs: Sequence[Record], path: Path) -> None:
    """The margin of DPO, the reward of GRPO."""
    figure, panels = figure_of(1, 2, 3.9)
    panel(
        panels[0][0],
        of_defaults(runs, "smollm2", "pairs", "dpo"),
        "validation",
        "DPO: margin of chosen over rejected, held-out pairs",
    )
    panel(
        panels[0][1], of_defaults(runs, "smollm2", "prompts", "grpo"), "reward", "GRPO: mean reward of sampled answers"
    )
    finish(figure, panels, "SmolLM2-135M-Instruct, all weights", path)


def finish(figure: Any, panels: Any, title: str, path: Path) -> None:
    """One legend under all panels."""
    for axes in panels[-1]:
        axes.set_xlabel("part of the run", fontsize=9)
    lines = {line.get_label(): line for axes in panels.flat for line in axes.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """A PNG of a few colours, a third as large as one of all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(DPI)
    canvas.draw()
    image = Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def rates(runs: Sequence[Record], model: str, lora: bool, quantity: str) -> dict[float, float]:
    """{learning rate: value} of the questions, where nothing else was varied."""
    wanted = {"lora_rank", "learning_rate"} if lora else {"learning_rate"}
    found = {
        run["settings"]["learning_rate"]: run[quantity]
        for run in runs
        if (run["set"], run["model"], run["data"], objective(run)) == ("sweep", model, "questions", "sft")
        and set(run["settings"]) - {"objective"} == wanted
        and run["settings"].get("lora_rank", 16) == 16
    }
    return dict(sorted(found.items()))


def draw_rates(runs: Sequence[Record], path: Path) -> None:
    """What was learned and what was forgotten, against the learning rate."""
    models = [model for model in MODELS if rates(runs, model, False, "loss")]
    figure, panels = figure_of(2, len(models), 6.2)
    quantities = {"loss": "validation loss, nats a token", "prose_perplexity": "perplexity of other text (prose)"}
    for row, (quantity, about) in zip(panels, quantities.items(), strict=True):
        for axes, model in zip(row, models, strict=True):
            for kind, (colour, default) in RATES.items():
                points = rates(runs, model, kind == "LoRA", quantity)
                axes.plot(list(points), list(points.values()), marker="o", color=colour, label=kind)
                star = {"marker": "*", "markersize": 17, "color": colour, "label": f"{kind}, default"}
                axes.plot([default], [points[default]], **star)
            axes.set_xscale("log")
            axes.set_title(f"{MODELS[model]}: {about}", fontsize=10)
            axes.grid(alpha=0.3)
            if quantity == "prose_perplexity":
                before = [r[quantity] for r in runs if r["label"] == "before" and r["model"] == model]
                axes.axhline(before[0], color="black", linestyle=":", label="before training")
                axes.set_yscale("log")
                axes.set_yticks(PERPLEXITIES[model], map(str, PERPLEXITIES[model]))
                axes.minorticks_off()
                axes.set_xlabel("learning rate", fontsize=9)
    lines = {line.get_label(): line for axes in panels.flat for line in axes.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.suptitle("Questions and answers, 3 epochs, batches of 16", fontsize=11)
    save(figure, path)


PICTURES = {"supervised": draw_supervised, "preferences": draw_preferences, "rates": draw_rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args()
    runs = [run for file in args.results for run in json.loads(file.read_text())["runs"]]
    args.output.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        path = args.output / f"real-models-{name}.png"
        draw(runs, path)
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
