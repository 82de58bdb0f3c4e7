"""The pictures of docs/board.md: `python -m tests.board.screenshots RUNS`, run by hand over a folder of runs.

The folder has runs with exports; one more is started in it, and stopped again.
"""

import sys
import tempfile
from pathlib import Path

from tests.board.browser import Browser
from tests.board.serving import serving

DOCS = Path(__file__).parents[2] / "docs" / "images"
SETTINGS = {
    "model": "qwen2",
    "learning_rate": "0.002",
    "checkpoint_every": "20",
    "steps": "240",
    "batch_size": "4",
    "eval_every": "20",
}
LOADED = "return document.querySelector('.chart.large canvas')?.chart.curves.length >= arguments[0]"


def take(window, name):
    DOCS.mkdir(exist_ok=True)
    window.run("document.activeElement?.blur()")
    window.picture(DOCS / f"board-{name}.png")


def main(folder):
    with tempfile.TemporaryDirectory() as files, serving(folder) as board, Browser(Path(files)) as window:
        board.post("/api/start", {"name": "qwen2-lr-0.002", "settings": SETTINGS})
        window.resize(1360, 1480)
        window.prefer("light")
        window.open(board.address)
        window.until(LOADED, 4)
        board.summary("0:qwen2-lr-0.002", lambda run: (run["step"] or 0) >= 45)
        window.click("[data-run='0:qwen2-lr-0.002']")
        window.until("return document.querySelector('.detail .state')?.textContent === 'running'")
        window.until("return document.querySelector('.numbers')?.innerText.includes('ETA')")
        take(window, "runs")
        board.post("/api/stop", {"run": "0:qwen2-lr-0.002"})

        window.resize(1360, 1010)
        window.click("#tab-start")
        window.type("#field-model", "llama:1b")
        window.type("#field-data", "stories")
        window.type("#run-name", "llama-1b")
        window.until("return document.querySelector('.peak')?.textContent.includes('GiB')")
        window.run("scrollTo(0, 0)")
        take(window, "form")

        window.click("#tab-chat")
        options = window.until("return Array.from(document.querySelector('#model-1').options, (o) => o.value)")
        steps = [value for value in options if value.startswith("0:qwen2:")]
        window.choose("#model-0", steps[-1])
        window.choose("#model-1", steps[0])
        window.choose("#mode", "continue")
        window.type("#temperature", "0")
        window.type("#most", "60")
        for text in ("Once upon a time", "On Monday Gus found 10 marbles"):
            window.type("#message", text)
            before = window.run("return document.querySelectorAll('[data-done]').length")
            window.click("#send")
            window.until("return document.querySelectorAll('[data-done]').length === arguments[0] + 2", before)
        take(window, "chat")

        window.click("#tab-runs")
        window.resize(500, 1150)
        window.prefer("dark")
        window.click("[data-run='0:qwen2']")
        window.run("scrollTo(0, 0)")
        window.until("return document.querySelector('.detail h2')?.textContent === 'qwen2'")
        window.run("document.querySelector('.stage').scrollIntoView()")
        take(window, "phone")
        assert window.errors() == []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
