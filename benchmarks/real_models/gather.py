"""Makes one compact file of results of `run.py`: what the pictures and docs/real-models.md show.

    python -m benchmarks.real_models.gather exact=FILE… fp32=FILE nearest=FILE trl=FILE sweep=FILE… --output FILE

Each run gets the name of its set. Curves are averaged over parts of the run, and only runs by the defaults keep theirs
and their answers. Differences of log-probabilities become the margin that training gained.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Curve = list[list[float]]
POINTS = 48  # of a curve
CURVES = ("loss", "reward")
BETA = 0.1  # a difference of log-probabilities to a margin of rewards, of DPO and KTO
ABOUT = ("model", "data", "label", "library", "settings", "chosen", "steps")
MEASURED = ("loss", "correct", "reward", "prose_perplexity")
ANSWERS = {"questions": "samples", "calls": "calls", "prompts": "brief"}
SAMPLES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="SET=FILE")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    files = [(item.split("=", 1)[0], json.loads(Path(item.split("=", 1)[1]).read_text())) for item in args.files]
    starts = {
        run["model"]: mean(run["after"]["differences"])
        for _, file in reversed(files)  # of several measurements the first is kept
        for run in file["runs"]
        if run["before"] and run["data"] == "pairs"
    }
    runs = [compact(name, run, starts) for name, file in files for run in file["runs"] if "after" in run]
    about = {key: files[0][1][key] for key in ("date", "gpu", "driver", "versions")}
    lines = ",\n".join(json.dumps(run, ensure_ascii=False) for run in runs)
    args.output.write_text(json.dumps(about)[:-1] + f', "runs": [\n{lines}\n]}}\n')


def compact(name: str, run: Record, starts: dict[str, float]) -> Record:
    """starts: {model: the mean difference of the untrained model}."""
    found = {"set": name} | {key: run[key] for key in ABOUT if run.get(key) is not None}
    if "seconds" in run:
        found["seconds"] = round(run["seconds"])
    after = run["after"]
    found |= {key: round(after[key], 4) for key in MEASURED if key in after}
    if "differences" in after:
        found["margin"] = round(BETA * (mean(after["differences"]) - starts[run["model"]]), 4)
    if name == "sweep" or "LoRA" in run["label"]:
        return found
    if run["data"] in ANSWERS:
        found["answers"] = after[ANSWERS[run["data"]]][:SAMPLES]
    found["curves"] = {key: thinned(curve) for key, curve in run.get("curves", {}).items() if key in CURVES}
    found["validation"] = validation(run, starts)
    return found


def validation(run: Record, starts: dict[str, float]) -> Curve:
    """[[step, value], …]: the validation loss; of pairs the margin of the rewards, which begins at 0."""
    records = run.get("validations", [])
    if run["data"] != "pairs":
        return [[r["step"], round(r["validation_loss"], 4)] for r in records if "validation_loss" in r]
    if run["library"] == "trl":
        start = starts[run["model"]]
        return [[r["step"], round(BETA * (mean(r["differences"]) - start), 4)] for r in records]
    return [[r["step"], r["validation_rewards/margins"]] for r in records if "validation_rewards/margins" in r]


def thinned(points: Sequence[Sequence[float]]) -> Curve:
    """The means of at most POINTS neighbouring parts, each at its last step."""
    size = -(-len(points) // POINTS)
    parts = [points[first : first + size] for first in range(0, len(points), size)]
    return [[part[-1][0], float(f"{mean([value for _, value in part]):.4g}")] for part in parts]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
