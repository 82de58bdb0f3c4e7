"""Writes the runs that the board shows beside one's own, from the files that `gather.py` makes: those of the tables of
docs/real-models.md, with their curves, without their answers. A run in a later file replaces one of the same name.

    python -m benchmarks.real_models.publish benchmarks/results/*-real-models.json
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

import ligermodels
from benchmarks.real_models.plot import MODELS, Record, objective

SETS = {"exact": "default", "fp32": "fp32 weights", "nearest": "bf16 rounded to nearest", "trl": "TRL"}
SHOWN = re.compile(r"before|default( LoRA)?|(rank=16,)?lr=\S+")
MEASURED = {  # behind the last step: their names in a run's metrics
    "correct": "validation_correct", "reward": "validation_reward",
    "prose_perplexity": "prose_perplexity", "prose_change": "prose_change", "margin": "validation_rewards/margins",
}  # fmt: skip
TARGET = Path(ligermodels.__file__).parent / "board" / "published.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE")
    TARGET.write_text(published([json.loads(file.read_text())["runs"] for file in parser.parse_args().results]))


def published(files: Sequence[Sequence[Record]]) -> str:
    """The content of the board's file."""
    named: dict[str, Record] = {}
    for runs in files:
        shown = [run_of_board(run) for run in with_changes(runs) if SHOWN.fullmatch(run["label"])]
        named |= {run["name"]: run for run in reversed(shown)}  # of several measurements of a file the first is kept
    lines = ",\n".join(json.dumps(run, ensure_ascii=False, separators=(",", ":")) for run in named.values())
    return f"[\n{lines}\n]\n"


def with_changes(runs: Sequence[Record]) -> list[Record]:
    """The runs with the change of the perplexity of prose, as a fraction; each file has prose of its own."""
    before = {run["model"]: run["prose_perplexity"] for run in reversed(runs) if run["label"] == "before"}
    return [
        run | {"prose_change": round(run["prose_perplexity"] / before[run["model"]] - 1, 4)}
        if "prose_perplexity" in run and run["label"] != "before" else run
        for run in runs
    ]  # fmt: skip


def run_of_board(run: Record) -> Record:
    kind, step = objective(run), run.get("steps", 0)
    before = run["label"] == "before"
    data = run["data"] if kind == "sft" else kind
    of_sweep = f"learning rate {run['settings'].get('learning_rate', 'default')}"
    what = "before training" if before else SETS.get(run["set"], of_sweep)
    lora = " LoRA" if run["settings"].get("lora_rank") or "LoRA" in run["label"] else ""
    curves = dict(run.get("curves", {}))
    if points := run.get("validation"):
        curves["validation_rewards/margins" if run["data"] == "pairs" else "validation_loss"] = points
    # The validation loss of other objectives is their own, and this one is that of the answers.
    loss = "validation_loss" if kind == "sft" else "nats_per_token"
    for name, metric in {"loss": loss, **MEASURED}.items():
        if name in run:
            earlier = [point for point in curves.get(metric, []) if point[0] != step]
            curves[metric] = [*earlier, [step, run[name]]]
    about = {"model": MODELS[run["model"]], "data": run["data"], "objective": kind, "library": run["library"]}
    taken = {"steps": step, **({"seconds": run["seconds"]} if "seconds" in run else {})}
    settings = about | run.get("chosen", {}) | run["settings"] | taken
    return {"name": f"{MODELS[run['model']]}: {data}{lora}, {what}", "settings": settings, "curves": curves}


if __name__ == "__main__":
    main()
