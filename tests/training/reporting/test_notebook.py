"""The live plot of a notebook: drawn as a run goes on, no more than its share of the time, with what came before."""

import json
import sys
from types import ModuleType

import pytest

from ligermodels.training.reporting import curves
from ligermodels.training.reporting.curves import DRAWING_SHARE, NotebookPlot, in_notebook, notebook_plots

PNG = b"\x89PNG\r\n"


class Handle:
    def __init__(self, shown):
        self.shown = shown

    def update(self, image):
        self.shown.append(image)


@pytest.fixture
def shown(monkeypatch):
    """A stand-in for IPython in the kernel of a notebook; the pictures that it was given to show."""
    pictures = []
    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: type("ZMQInteractiveShell", (), {})()
    ipython.version_info = (9, 0)  # which matplotlib looks at when it is first imported
    module.Image = lambda data, format: data

    def display(image, display_id):
        assert display_id
        pictures.append(image)
        return Handle(pictures)

    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return pictures


def record(step):
    return {"step": step, "loss": 5.0 / step, "grad_norm": 1.0, "learning_rate": 1e-3}


def test_a_plot_is_drawn_anew_for_a_share_of_the_time(shown, tmp_path):
    now = [0.0]

    def clock():
        now[0] += 0.5  # of each look: a drawing takes half a second
        return now[0]

    plot = NotebookPlot(tmp_path, [], "sft", clock)
    for step in range(1, 301):
        plot.write(record(step))
        now[0] += 0.1
    drawings = len(shown)
    assert drawings >= 2 and drawings * 0.5 / now[0] <= DRAWING_SHARE * 1.2
    plot.close()
    assert len(shown) == drawings + 1 and all(picture.startswith(PNG) for picture in shown)


def test_a_resumed_run_shows_the_steps_before(shown, tmp_path):
    lines = [json.dumps(record(step)) + "\n" for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    (plot,) = notebook_plots(tmp_path, 2, "sft", print)
    assert plot.records == [record(1), record(2)]
    (new,) = notebook_plots(tmp_path, 0, "sft", print)
    assert new.records == []
    new.close()
    assert shown == []  # nothing to draw


@pytest.mark.parametrize(("objective", "title"), [("sft", "loss, nats per supervised token"), ("grpo", "loss of grpo")])
def test_the_loss_is_titled_by_its_objective(objective, title, shown, tmp_path, monkeypatch):
    titles, draw = [], curves.draw_losses

    def draw_losses(axes, *args):
        draw(axes, *args)
        titles.append(axes.get_title("left"))

    monkeypatch.setattr(curves, "draw_losses", draw_losses)
    (plot,) = notebook_plots(tmp_path, 0, objective, print)
    plot.write(record(1))
    plot.close()
    assert titles == [title]


def test_there_is_no_plot_outside_of_a_notebook_or_without_matplotlib(shown, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = []
    assert notebook_plots(tmp_path, 0, "sft", said.append) == [] and said == ["no live plot: pip install matplotlib"]
    sys.modules["IPython"].get_ipython = lambda: type("TerminalInteractiveShell", (), {})()
    assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert notebook_plots(tmp_path, 0, "sft", said.append) == [] and len(said) == 1


def test_a_run_in_a_notebook_shows_its_plot_in_place_of_lines(shown, tmp_path, monkeypatch, capsys):
    from ligermodels.training import TrainConfig, train

    monkeypatch.setattr(curves, "STEPS_BETWEEN_LOOKS", 1)
    config = TrainConfig(model="qwen2", steps=2, batch_size=1, sequence_length=32, no_export=True, checkpoint_every=0,
                         data=("random",), output=tmp_path / "run")  # fmt: skip
    train(config)
    printed = capsys.readouterr().out
    assert shown and shown[-1].startswith(PNG)
    assert "step 1/2" not in printed and "step 2: validation loss" in printed
