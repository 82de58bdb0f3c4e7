"""How fast the board is: `python -m tests.board.speed`, run by hand; prints the figures of docs/board.md.

50 runs of 100,000 steps: seconds from opening the address until the curves of all runs are drawn, on a board that has
just started and on one that has read everything; the time between two frames while the page scrolls. And the CPU time
of a small run, alone and while the board and a browser watch it.
"""

import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.board import browser
from tests.board.browser import Browser
from tests.board.serving import serving

RUNS, STEPS, DIFFERENT = 50, 100_000, 5
ALL_DRAWN = f"""
const chart = document.querySelector('.chart.large canvas')?.chart;
return chart && chart.curves.filter((curve) => curve.kind === 'line' && curve.steps.length > 100).length >= {RUNS};
"""
SCROLL = """
const done = arguments[arguments.length - 1], frames = [];
let last = performance.now(), count = 0;
function step(now) {
  frames.push(now - last);
  last = now;
  scrollBy(0, count < 60 ? 30 : -30);
  if (++count < 120) requestAnimationFrame(step); else done(frames.slice(2));
}
requestAnimationFrame(step);
"""
TRAIN = ["--model", "qwen2", "--steps", "60", "--eval-every", "60", "--no-export", "--checkpoint-every", "0"]


def write_runs(folder):
    for number in range(RUNS):
        place = folder / f"run-{number:02}"
        place.mkdir(parents=True)
        if number >= DIFFERENT:
            shutil.copy(folder / f"run-{number % DIFFERENT:02}/metrics.jsonl", place)
            continue
        chance = random.Random(number)
        with (place / "metrics.jsonl").open("w") as file:
            for step in range(1, STEPS + 1):
                loss = 2 + 5 * math.exp(-step / 9000) + chance.gauss(0, 0.1)
                record = {"step": step, "loss": loss, "grad_norm": chance.lognormvariate(0, 0.3)}
                record |= {
                    "learning_rate": 1e-3 * (1 - step / STEPS),
                    "tokens_per_second": chance.randint(49_000, 51_000),
                }
                file.write(json.dumps(record) + "\n")
                if step % 10_000 == 0:
                    file.write(json.dumps({"step": step, "validation_loss": loss, "sample": "Once | upon"}) + "\n")


def opened(window, address):
    """Seconds until the curves of all runs are drawn."""
    window.open("about:blank")
    begin = time.perf_counter()
    window.open(address)
    window.until(ALL_DRAWN)
    return time.perf_counter() - begin


def open_many(folder, files):
    with serving(folder) as board, Browser(files) as window:
        first = opened(window, board.address)
        begin = time.perf_counter()
        while any(run.metrics.pending for run in board.library.runs.values()):
            time.sleep(0.1)
        read = time.perf_counter() - begin
        again = median(opened(window, board.address) for _ in range(3))
        frames = window.call("POST", "/execute/async", {"script": SCROLL, "args": []})
    print(f"{RUNS} runs of {STEPS:,} steps: all curves after {first:.2f} s on a board that has just started")
    print(f"  all lines read after {read:.1f} s; then after {again:.2f} s")
    late = sorted(frames)[int(0.95 * len(frames))]
    print(f"  scrolling: {median(frames):.1f} ms between frames, 95 % below {late:.1f} ms")


def train(folder, name):
    """CPU seconds of a small run: unlike its speed, they do not depend on what else the machine does."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "ligermodels", "train", *TRAIN, "--output", str(folder / name)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def train_watched(folder, files):
    alone = train(folder, "alone")
    with serving(folder) as board, Browser(files) as window:
        window.open(board.address)
        begin = time.process_time()
        watched = train(folder, "watched")
        own = time.process_time() - begin
    print(
        f"CPU seconds of a run of 60 steps: alone {alone:.1f}, watched {watched:.1f}; of the board meanwhile {own:.1f}"
    )


def main():
    assert browser.is_installed(), browser.HINT
    print(f"{os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_runs(folder / "many")
        (folder / "one").mkdir()
        open_many(folder / "many", folder / "browser-1")
        train_watched(folder / "one", folder / "browser-2")


if __name__ == "__main__":
    main()
