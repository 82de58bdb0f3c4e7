import json

import torch

from ligermodels.training.metrics import Metrics

CPU = torch.device("cpu")


def test_one_json_object_a_step_and_a_validation(tmp_path, capsys):
    path = tmp_path / "run" / "metrics.jsonl"
    with Metrics(path, steps=2, tokens_per_step=100, device=CPU) as metrics:
        metrics.step(0, loss=2.5, grad_norm=1.5, learning_rate=0.1)
        metrics.step(1, loss=2.25, grad_norm=1.25, learning_rate=0.2)
        metrics.validation(2, loss=0.71, floor=0.56)
    first, second, validation = map(json.loads, path.read_text().splitlines())
    assert first.pop("tokens_per_second") > 0
    assert first == {"step": 0, "loss": 2.5, "grad_norm": 1.5, "lr": 0.1}
    assert second["loss"] == 2.25
    assert validation == {"step": 2, "validation_loss": 0.71, "floor": 0.56}
    assert "validation loss 0.710 nats/token, floor 0.560, gap 0.150" in capsys.readouterr().out


def test_other_ranks_write_nothing(tmp_path):
    with Metrics(tmp_path / "metrics.jsonl", steps=1, tokens_per_step=1, device=CPU, enabled=False) as metrics:
        metrics.step(0, loss=1.0, grad_norm=1.0, learning_rate=0.1)
        metrics.validation(1, loss=1.0, floor=None)
    assert not list(tmp_path.iterdir())


def test_speed_leaves_out_the_steps_that_compile(tmp_path):
    with Metrics(tmp_path / "metrics.jsonl", steps=5, tokens_per_step=1, device=CPU) as metrics:
        metrics.speeds = [1.0]
        assert metrics.tokens_per_second == 1.0
        metrics.speeds = [1.0, 2.0, 100.0, 100.0, 101.0]
        assert metrics.tokens_per_second == 100.0
