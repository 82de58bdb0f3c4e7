"""Draws the results of `run.py`: each objective's curves by our defaults beside TRL's, on the same data.

python -m benchmarks.real_models.plot RESULTS.json… --output FOLDER
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.real_models.recipes import OURS, TRL

Record = dict[str, Any]
TITLES = {
    "smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma 3 270M", "questions": "questions and answers",
    "calls": "tool calls", "topics": "text", "pairs": "pairs", "prompts": "short answers",
}  # fmt: skip
COLOURS = {OURS: "C3", TRL: "C0"}
DISTANCE = 0.1  # beta: a difference of log-probabilities to a margin of rewards
SMOOTHED = 5  # steps of a moving average of rewards


def label(run: Record) -> str:
    return f"{run['library']}{', LoRA' if 'LoRA' in run['label'] else ''}"


def style(run: Record) -> Record:
    return {"color": COLOURS[run["library"]], "linestyle": "--" if "LoRA" in run["label"] else "-", "label": label(run)}


def fractions(points: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Steps as fractions of the run: libraries take steps of different sizes over the same data."""
    last = points[-1][0]
    return [step / last for step, _ in points], [value for _, value in points]


def validation_curve(run: Record, before: Record | None) -> list[list[float]]:
    """[[step, value], …]: the validation loss; of pairs the mean margin of the rewards, which begins at 0."""
    if run["data"] != "pairs":
        return [[r["step"], r["validation_loss"]] for r in run["validations"]]
    if run["library"] == OURS:
        name = "validation_rewards/margins"
        return [[r["step"], r[name]] for r in run["validations"] if name in r]
    start = before["after"]["differences"] if before else run["validations"][0]["differences"]
    return [[r["step"], DISTANCE * (mean(r["differences"]) - mean(start))] for r in run["validations"]]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def smoothed(points: Sequence[Sequence[float]]) -> list[list[float]]:
    values = [value for _, value in points]
    return [[points[i][0], mean(values[max(0, i + 1 - SMOOTHED) : i + 1])] for i in range(len(points))]


def draw(runs: Sequence[Record], model: str, path: Path, about: str) -> None:
    """A panel for each kind of data and objective, with every library's run of it."""
    from matplotlib.figure import Figure

    trained = [r for r in runs if r["model"] == model and "validations" in r and r["label"].startswith("default")]
    before = {r["data"]: r for r in runs if r["model"] == model and r["before"] and "after" in r}
    panels = dict.fromkeys((r["data"], r["settings"].get("objective", "sft")) for r in trained)
    columns = 3
    figure = Figure(figsize=(4 * columns, 3 * -(-len(panels) // columns)), layout="constrained")
    for number, (data, objective) in enumerate(panels, 1):
        axes = figure.add_subplot(-(-len(panels) // columns), columns, number)
        for run in trained:
            if (run["data"], run["settings"].get("objective", "sft")) != (data, objective):
                continue
            reward = data == "prompts"
            points = smoothed(run["curves"]["reward"]) if reward else validation_curve(run, before.get(data))
            axes.plot(*fractions(points), marker="" if reward else ".", **style(run))
        what = {"prompts": "reward", "pairs": "margin of held-out pairs"}.get(data, "validation loss, nats a token")
        axes.set_title(f"{objective.upper()}, {TITLES[data]}: {what}", fontsize=9)
        axes.set_xlabel("part of the run", fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(f"{TITLES[model]}, all settings are defaults ({about})", fontsize=10)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args()
    files = [json.loads(path.read_text()) for path in args.results]
    runs = [run for file in files for run in file["runs"]]
    about = f"{files[0]['gpu']}, {files[0].get('date', '')[:10]}"
    args.output.mkdir(parents=True, exist_ok=True)
    for model in dict.fromkeys(run["model"] for run in runs):
        path = args.output / f"real-models-{model}.png"
        draw(runs, model, path, about)
        print(path)


if __name__ == "__main__":
    main()
