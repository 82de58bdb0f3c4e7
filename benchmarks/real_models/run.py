"""Trains real models by lists of recipes, many at a time, and measures them: one file with all curves, and a table.

    python -m benchmarks.real_models.run defaults trl --model smollm2=FOLDER --output results.json

A small model leaves a GPU idle most of the time, so that several processes share one. Runs that are not finished in
time are left out. With `--steps 2 --most 2` everything is tried on a CPU.
"""

import argparse
import contextlib
import gc
import json
import os
import queue
import shutil
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from benchmarks.real_models.recipes import SETS, TRL, Recipe

Record = dict[str, Any]
CURVES = (
    "loss",
    "reward",
    "rewards/margins",
    "rewards/accuracies",
    "grad_norm",
    "divergence",
    "completions/mean_length",
)
DIGITS = 5
VALIDATIONS = 5
TRIAL_GRPO = {"prompts": 2, "generations": 2, "max_completion_length": 8}


@dataclass(frozen=True)
class Place:
    """Where a process finds things. steps, most: for a trial; None for all."""

    models: dict[str, str]
    data: Path
    exports: Path
    device: str
    steps: int | None
    most: int | None
    given: Sequence[str]  # KEY=VALUE, of every run of ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=SETS)
    parser.add_argument("--model", nargs="+", required=True, metavar="NAME=FOLDER", help="smollm2=…, gemma3=…")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="recipes whose name has one of these")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of all runs of ours")
    parser.add_argument("--processes", type=int, default=10, help="that share a GPU")
    parser.add_argument("--minutes", type=float, default=60.0, help="until what is not finished is left out")
    parser.add_argument("--steps", type=int, help="of every run")
    parser.add_argument("--most", type=int, help="validation records")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    args.output.parent.mkdir(parents=True, exist_ok=True)
    models = dict(item.split("=", 1) for item in args.model)
    recipes = {
        r.name: r
        for kind in args.sets
        for model in models
        for r in SETS[kind](model)
        if any(text in r.name for text in args.only)
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        from benchmarks.real_models.data import write

        write(Path(folder) / "data", args.most)
        gpus = number_of_gpus()
        place = Place(
            models, Path(folder) / "data", Path(folder), "cuda" if gpus else "cpu", args.steps, args.most, args.set
        )
        results = run_all(recipes, place, gpus, args.processes, deadline, args.output)
    print(table(results))


def number_of_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def run_all(
    recipes: dict[str, Recipe], place: Place, gpus: int, processes: int, deadline: float, output: Path
) -> list[Record]:
    """A recipe with a teacher starts when the teacher is there. The file is written again after every result."""
    spawn = get_context("spawn")
    tasks, found = spawn.Queue(), spawn.Queue()
    os.environ |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "TOKENIZERS_PARALLELISM": "false"}
    names = [name for name, recipe in recipes.items() if recipe.teacher not in recipes]
    waiting = {name: recipe for name, recipe in recipes.items() if recipe.teacher in recipes}
    workers: list[SpawnProcess] = []
    for number in range(min(len(recipes), max(1, gpus) * processes)):
        visible = {"CUDA_VISIBLE_DEVICES": str(number % gpus)} if gpus else {}
        teachers = {recipe.teacher for recipe in recipes.values()}
        workers.append(spawn.Process(target=work, args=(tasks, found, place, visible, teachers), daemon=True))
        workers[-1].start()
    for name in names:
        tasks.put(recipes[name])
    results: list[Record] = []
    about = {"gpu": "none"} if place.device == "cpu" else gpu_and_versions()
    while len(results) < len(recipes) and time.monotonic() < deadline and any(w.is_alive() for w in workers):
        with contextlib.suppress(queue.Empty):
            results.append(found.get(timeout=1))
            print(f"{len(results)}/{len(recipes)} {line(results[-1])}", flush=True)
            for name in [name for name, recipe in waiting.items() if recipe.teacher == results[-1]["name"]]:
                tasks.put(waiting.pop(name))
            output.write_text(json.dumps({**about, "given": list(place.given), "runs": results}))
    for worker in workers:
        worker.kill()
        worker.join()
    for name in recipes.keys() - {result["name"] for result in results}:
        print(f"{name}: not finished in time")
    return results


def work(tasks: Any, found: Any, place: Place, visible: dict[str, str], teachers: set[str | None]) -> None:
    """A process: takes recipes until there are none. It imports torch once, after it knows its GPU."""
    os.environ |= visible
    from benchmarks.real_models.measure import Measure

    measure = Measure(place.data, place.device, place.most)
    while True:
        recipe = tasks.get()
        result = {**asdict(recipe), "name": recipe.name}
        begun = time.monotonic()
        try:
            found.put(
                result | run(recipe, place, measure, recipe.name in teachers) | {"total": time.monotonic() - begun}
            )
        except Exception:
            found.put(result | {"error": traceback.format_exc()})
        free_memory()


def free_memory() -> None:
    """Ends the process group of a run of ours too, which TRL's next one would take for its own."""
    import torch

    from ligermodels import distributed

    distributed.stop()
    gc.collect()
    torch.cuda.empty_cache()


def run(recipe: Recipe, place: Place, measure: Any, keep: bool) -> Record:
    """Trains, exports, measures the export, and removes it unless it is a teacher."""
    if recipe.before:
        return {"after": measure(Path(place.models[recipe.model]), recipe.data)}
    if recipe.library == TRL:
        from benchmarks.real_models.trl_runs import train_with_trl as train
    else:
        train = train_with_ours
    output = place.exports / recipe.name
    with (
        open(place.exports / f"{recipe.name}.log", "w") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        trained = train(recipe, place, output, measure)
        exported = Path(trained.pop("exported"))
        free_memory()
        trained["after"] = measure(exported, recipe.data)
    if not keep:
        shutil.rmtree(output)
    return trained


def train_with_ours(recipe: Recipe, place: Place, output: Path, measure: Any) -> Record:
    from ligermodels.training import train

    settings = recipe.settings | dict(map(parsed, place.given))
    if place.steps:
        settings = {name: value for name, value in settings.items() if name != "epochs"} | {"steps": place.steps}
        settings |= TRIAL_GRPO if settings.get("objective") == "grpo" else {}
    if settings.get("objective") == "distill":
        settings["teacher"] = str(place.exports / str(recipe.teacher) / "model")
    settings |= {"model": place.models[recipe.model], "output": output, "checkpoint_every": 0}
    settings |= {"data": str(place.data / f"{recipe.data}-train.jsonl")}
    settings |= {"validation_data": str(place.data / f"{recipe.data}-validation.jsonl")}
    config = with_few_validations(settings)
    began = time.monotonic()
    result = train(config)
    return {
        "exported": str(result.exported), "seconds": time.monotonic() - began, "steps": result.step,
        **curves(result.metrics), "chosen": chosen(output),
    }  # fmt: skip


def parsed(item: str) -> tuple[str, Any]:
    """KEY=VALUE, as on the command line: numbers are numbers."""
    name, value = item.split("=", 1)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def with_few_validations(settings: Record) -> Any:
    """The TrainConfig of these settings, with VALIDATIONS: by default a run has twice as many."""
    from ligermodels import distributed
    from ligermodels.training import TrainConfig
    from ligermodels.training.preparing import prepare

    steps = prepare(TrainConfig(**settings), distributed.start()).config.steps
    return TrainConfig(**settings, eval_every=max(1, steps // VALIDATIONS))


def chosen(output: Path) -> Record:
    """The settings that the run chose, which are in its train.toml."""
    import tomllib

    wanted = ("learning_rate", "batch_size", "sequence_length", "warmup", "pairs", "examples", "prompts", "param_dtype")
    written = tomllib.loads((output / "train.toml").read_text())
    return {name: written[name] for name in wanted if name in written}


def curves(records: Sequence[Record]) -> Record:
    """{curve: [[step, value], …]} of the steps, and the validations with their samples."""
    steps = [record for record in records if "grad_norm" in record]
    validations = [record for record in records if "validation_loss" in record]
    shown = {
        name: [[record["step"], rounded(record[name])] for record in steps if record.get(name) is not None]
        for name in CURVES
    }
    return {
        "curves": {name: curve for name, curve in shown.items() if curve},
        "validations": [{name: rounded(value) for name, value in record.items()} for record in validations],
    }


def rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def gpu_and_versions() -> Record:
    from benchmarks import results

    return results.environment()


def line(result: Record) -> str:
    """One line of the table."""
    if "error" in result:
        return f"{result['name']}: {result['error'].strip().splitlines()[-1]}"
    after = result["after"]
    parts = [f"{name} {after[name]:.4g}" for name in ("loss", "correct", "reward", "prose_perplexity") if name in after]
    if "differences" in after:
        parts.append(f"difference {sum(after['differences']) / len(after['differences']):.2f}")
    for curve in ("reward", "rewards/margins"):
        if values := [value for _, value in result.get("curves", {}).get(curve, [])]:
            ends = values[:5], values[-5:]
            parts.append(f"{curve} " + " -> ".join(f"{sum(end) / len(end):.3f}" for end in ends))
    last = result.get("validations", [])[-1:]
    parts += [f"validation {r['validation_loss']:.4g}" for r in last if "validation_loss" in r]
    parts += [
        f"accuracy {r['validation_rewards/accuracies']:.2f}" for r in last if "validation_rewards/accuracies" in r
    ]
    timed = [
        f"{result[name]:.0f} s" if name != "steps" else f"{result[name]} steps"
        for name in ("steps", "seconds", "total")
        if name in result
    ]
    return f"{result['name']}: " + ", ".join([*parts, *timed])


def table(results: Sequence[Record]) -> str:
    return "\n".join(line(result) for result in sorted(results, key=lambda result: result["name"]))


if __name__ == "__main__":
    main()
