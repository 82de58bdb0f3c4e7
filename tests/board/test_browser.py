"""The page in a real browser: it loads without an error, follows runs, starts, stops and resumes them, and chats."""

import json
import os

import pytest

from tests.board import browser as browsing
from tests.board.serving import serving, write_run

pytestmark = pytest.mark.skipif(not browsing.is_installed(), reason=browsing.HINT)
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script> | "</style><svg onload=alert(1)>'
STATE = "return document.querySelector('.detail .state')?.textContent"
# Whether the canvas of the loss has pixels in the colour of its last curve, which lies above the others.
DRAWN = r"""
const canvas = document.querySelector('.chart.large canvas'), last = canvas.chart.curves.at(-1);
if (!last) return false;
const copy = document.createElement('canvas');
[copy.width, copy.height] = [canvas.width, canvas.height];
const context = copy.getContext('2d', {willReadFrequently: true});
context.drawImage(canvas, 0, 0);
const [r, g, b] = last.colour.match(/\w\w/g).map((part) => parseInt(part, 16));
const pixels = context.getImageData(0, 0, copy.width, copy.height).data;
let found = 0;
for (let i = 0; i < pixels.length; i += 4) {
  const away = Math.abs(pixels[i] - r) + Math.abs(pixels[i + 1] - g) + Math.abs(pixels[i + 2] - b);
  found += pixels[i + 3] > 200 && away < 12;
}
return found > 50;
"""
CHART = "document.querySelector('.chart.large canvas').chart"


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    sample = json.dumps({"step": 5, "validation_loss": 1.5, "floor": 0.5, "sample": HOSTILE})
    warned = {"state": "running", "warnings": [{"step": 1, "text": HOSTILE}], "plan": HOSTILE, "resume": HOSTILE}
    write_run(folder / "old", status=warned, lines=[sample], settings=f'model = "qwen2"\nsteps = 9\nseed = "{"<b>"}"\n')
    write_run(folder / "other", settings='model = "llama"\nsteps = 5\n', status={"state": "finished"})
    lines = [{"step": s, "prompt": "2 + 2 =", "completion": HOSTILE, "rewards/exact": 1.0} for s in (1, 2)]
    (folder / "old/completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = dict(os.environ)
    os.environ |= {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with serving(folder) as board:
        board.summary("0:old")
        yield board
        for process in board.actions.processes.started.values():
            if process.poll() is None:
                process.kill()
            process.wait()
    os.environ.clear()
    os.environ |= before


@pytest.fixture(scope="module")
def window(board, tmp_path_factory):
    with browsing.Browser(tmp_path_factory.mktemp("browser")) as window:
        window.open(board.address)
        window.until("return document.querySelectorAll('.run').length === 2")
        yield window


@pytest.fixture(autouse=True)
def no_errors(window):
    yield
    assert window.errors() == []
    assert "ligermodels" in window.run("return document.title")  # no text of a file has run


def test_the_page_shows_runs_curves_and_that_one_has_died(window):
    window.click("[data-run='0:old']")
    window.until("return document.querySelector('.detail')?.innerText.includes('This run died')")
    assert window.until(DRAWN)
    assert window.run("return document.querySelectorAll('.detail :is(img, script, svg)').length") == 0
    box = "document.querySelector('{}').getBoundingClientRect()"
    assert window.run(f"return {box.format('.chart.large')}.bottom <= {box.format('.detail')}.top")
    assert "<img src=x onerror=" in window.run("return document.querySelector('.notice:not(.bad)').textContent")


def test_texts_of_files_stay_texts(window):
    window.click("[data-run='0:old']")
    tabs = "[...document.querySelectorAll('.inner button')].find((b) => b.textContent === arguments[0])"
    for tab, shown in (
        ("samples", ".sample"),
        ("completions", ".completions .text"),
        ("settings", ".inner-page table"),
    ):
        window.until(f"return {tabs}", tab)
        window.run(f"{tabs}.click()", tab)
        window.until(f"return document.querySelector('{shown}')?.textContent")
        assert window.run("return document.querySelectorAll('.detail :is(img, script, svg)').length") == 0
    window.run(f"{tabs}.click()", "samples")
    assert window.until("return document.querySelector('.sample .prompt')?.textContent").startswith("<img src=x")


def test_two_runs_are_compared_by_what_differs(window):
    tabs = "[...document.querySelectorAll('.inner button')].find((b) => b.textContent === 'compare')"
    window.run(f"{tabs}.click()")
    window.until("return document.querySelector('.differences')")
    rows = window.run("return [...document.querySelectorAll('.differences tr')].map((row) => row.innerText)")
    assert any(row.startswith("model") and "qwen2" in row and "llama" in row for row in rows), rows
    window.run(f"{tabs.replace('compare', 'overview')}.click()")


def test_curves_are_zoomed_by_keys_and_shown_on_log_axes(window):
    before = window.run(f"{CHART}.canvas.focus(); return {CHART}.range()")
    press = f"{CHART}.canvas.dispatchEvent(new KeyboardEvent('keydown', {{key: arguments[0]}}))"
    window.run(press, "+")
    inside = window.run(f"return {CHART}.range()")
    assert inside["first"] > before["first"] and inside["last"] < before["last"]
    window.run(press, "0")
    whole = f"const range = {CHART}.range(); return range.first === arguments[0] && range.last === arguments[1]"
    window.until(whole, before["first"], before["last"])
    window.run(press, "ArrowRight")
    window.until(f"return !{CHART}.tip.hidden && {CHART}.tip.textContent.includes('step')")
    window.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'l'}))")
    assert window.until(DRAWN)
    window.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'l'}))")


def test_the_scheme_is_the_systems_until_it_is_clicked_and_a_phone_has_room(window):
    dark = "return document.documentElement.dataset.theme === 'dark'"
    for system in ("dark", "light", "dark"):
        window.prefer(system)
        window.until("return document.documentElement.dataset.theme === arguments[0]", system)
    window.click("#theme")
    assert not window.run(dark)
    for system in ("light", "dark"):  # which is followed no more
        window.prefer(system)
        window.until("return matchMedia('(prefers-color-scheme: dark)').matches === arguments[0]", system == "dark")
        assert not window.run(dark)
    window.click("#theme")
    assert window.run(dark)
    window.run("localStorage.clear()")
    window.prefer("light")
    window.resize(500, 900)  # the least that Chromium takes
    window.until("return innerWidth <= 520")
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    window.resize(1440, 1000)


def test_a_run_is_started_followed_stopped_and_resumed_by_clicks(window, board):
    window.click("#tab-start")
    window.until("return document.querySelector('#refusal').textContent.includes('--model is missing')")
    assert window.run("return document.querySelector('#start-run').disabled")
    labels = "[...document.querySelectorAll('.field label')].filter((label) => label.checkVisibility())"
    first = ["--model", "--data", "--objective", "--lora-rank", "--output"]
    assert window.run(f"return {labels}.map((label) => label.textContent)") == first
    window.run("document.querySelector('[data-group=training]').open = true")
    window.type("#field-model", "qwen2")
    peak = window.until("return document.querySelector('.peak')?.textContent")
    for name, value in (("steps", "0"), ("steps", "400")):
        window.type(f"#field-{name}", value)
        if value == "0":
            window.until("return document.querySelector('#refusal').textContent.includes('--steps')")
    window.run("document.querySelector('[data-group=data]').open = true")
    window.type("#field-sequence_length", "32")
    window.type("#field-batch_size", "1")
    window.type("[aria-label='find a setting']", "eval-every")  # which opens its group
    window.type("#field-eval_every", "400")
    window.until("const p = document.querySelector('.peak')?.textContent; return p && p !== arguments[0]", peak)
    window.type("#run-name", "clicked")
    window.until("return !document.querySelector('#start-run').disabled")
    window.click("#start-run")
    window.until(f"{STATE} === 'running'")
    growing = f"return {CHART}.curves.find((c) => c.name === 'clicked')?.steps.length"
    seen = window.until(growing)
    window.until(f"{growing} > arguments[0]", seen)
    window.click("#stop")
    window.until(f"{STATE} === 'stopped'")
    assert "ligermodels train --resume" in window.until("return document.querySelector('#resume-command')?.textContent")
    window.click("#resume")
    window.until(f"{STATE} === 'running'")
    window.until(f"{STATE} === 'finished'")
    assert board.summary("0:clicked")["step"] == 400
    assert window.run(growing) > seen


def test_a_run_that_cannot_be_planned_is_started_without_a_plan(window, board):
    """A model of the Hub: the board downloads nothing, the run does; here it is offline, and its refusal is shown."""
    window.click("#tab-start")
    window.type("[aria-label='find a setting']", " ")  # shows all again
    window.type("#field-model", "nobody/nothing")
    window.type("#field-data", "random")
    window.until("return document.querySelector('#start-anyway:not([hidden])') !== null")
    assert window.run("return document.querySelector('#start-run').disabled")
    window.type("#run-name", "unplanned")
    window.click("#start-anyway")
    notices = "[...document.querySelectorAll('.notice:not(#refusal)')]"
    window.until(f"return {notices}.some((x) => x.textContent.includes('nobody/nothing'))")
    (log,) = (board.library.folders[0] / ".board").glob("unplanned.log")
    assert "HF_HUB_OFFLINE is set" in log.read_text()


def test_a_chat_answers_from_two_models_side_by_side(window, board):
    if "0:clicked" not in board.library.runs:
        pytest.fail("the run of the test before is missing")
    window.click("#tab-chat")
    options = window.until("return [...document.querySelector('#model-1').options].map((o) => o.value).filter(Boolean)")
    export = next(value for value in options if value.endswith("/model"))
    assert window.run("return document.querySelector('#model-0').value") == export == options[0]
    checkpoint = next(value for value in options if value.endswith(":400"))
    window.choose("#model-0", export)
    window.choose("#model-1", checkpoint)
    window.choose("#mode", "continue")
    window.type("#temperature", "0")
    window.type("#most", "8")
    window.type("#message", "Once upon a time")
    window.click("#send")
    answers = "return Array.from(document.querySelectorAll('[data-done]'), (m) => [m.firstChild.data, m.textContent])"
    window.until(f"{answers}.length === 2")
    (left, said), (right, _) = window.run(answers)
    assert left == right and " tokens" in said  # greedy decoding of the same weights
    window.choose("#model-1", "")
    window.type("#temperature", "5")
    window.type("#message", "Once upon a time")
    window.click("#send")
    window.until(f"{answers}.length === 2")  # those of the second model are gone
    assert window.run(answers)[-1][0]
    window.click("#tab-runs")


def test_a_file_of_500_megabytes_opens_at_once(window, board):
    """Also one whose lines mean harm: the page stays, and shows what can be read."""
    folder = board.library.folders[0] / "huge"
    folder.mkdir()
    lines = b"".join(b'{"step": %d, "loss": %f, "grad_norm": 1.0}\n' % (i, 3 + 1e4 / (i + 1e4)) for i in range(20_000))
    with (folder / "metrics.jsonl").open("wb") as stream:
        while stream.tell() < 500_000_000:
            stream.write(lines)
            stream.write(b'{"step": 1, "sample": "' + b"x" * 2_000_000 + b"\n")
    board.library.look_again()
    window.until("return document.querySelector('[data-run=\"0:huge\"]')")
    window.click("[data-run='0:huge']")
    window.until(f"return {CHART}.curves.some((c) => c.name === 'huge')")
    assert len(board.library.runs["0:huge"].metrics.blocks) <= 2 * 4096
