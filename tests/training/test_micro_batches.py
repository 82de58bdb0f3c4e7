"""Micro-batches that are captured and replayed train as those that run, to the bit."""

import json

import pytest
import torch

from ligermodels.training import TrainConfig, loop, train
from ligermodels.training.micro_batches import Graph, MicroBatches
from tests.conftest import DEVICE
from tests.training.launching import records
from tests.training.small_models import save_model

TEXTS = [" ".join(f"word{number * 7 % 40}" for number in range(start, start + 3 + start % 9)) for start in range(240)]
MEASURED = ("loss", "grad_norm", "validation_loss")
HEADS_OF_64 = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("graphs")
    (base / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    pairs = [dict(zip(("prompt", "completion"), text.split(" ", 1), strict=True)) for text in TEXTS]
    (base / "answers.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    save_model(base / "dense", TEXTS, dtype=dtype, **HEADS_OF_64)
    save_model(base / "experts", TEXTS, dtype=dtype, **HEADS_OF_64, **EXPERTS)
    return base


@pytest.fixture
def captured(monkeypatch):
    """The micro-batches that are captured. On a CPU a capture runs them and takes back what they did, and a replay
    runs them."""
    found, record = [], MicroBatches.record

    def run_to_know(self, step):
        gradients = {p: gradient.clone() for p, gradient in self.gradients.items()}
        step()
        for p, gradient in gradients.items():
            self.gradients[p].copy_(gradient)
        return step

    def note(self, step):
        found.append(self)
        return run_to_know(self, step) if DEVICE == "cpu" else record(self, step)

    monkeypatch.setattr(MicroBatches, "record", note)
    return found


def run(folder, output, monkeypatch, graphs, *, model="dense", data="texts", **settings):
    monkeypatch.setattr(loop, "captures_graphs", lambda run: graphs)
    common = {"steps": 8, "batch_size": 4, "sequence_length": 48, "learning_rate": 1e-2, "deterministic": True}
    config = {"model": folder / model, "data": [str(folder / f"{data}.jsonl")], "output": output} | common | settings
    return train(TrainConfig(**config))


def measured(output):
    return [{name: record[name] for name in MEASURED if name in record} for record in records(output)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora_rank": 4},
        {"micro_batch_size": 2, "data": "answers", "activation_checkpointing": "full"},
        {"micro_batch_size": 1, "model": "experts"},
    ],
    ids=str,
)
def test_replays_train_as_runs_do(folder, tmp_path, monkeypatch, captured, settings):
    plain = run(folder, tmp_path / "plain", monkeypatch, False, **settings)
    assert not captured
    replayed = run(folder, tmp_path / "replayed", monkeypatch, True, **settings)
    graphs = [known for known in captured[0].graphs.values() if isinstance(known, Graph)]
    assert len(graphs) == len(captured) >= 1 + ("micro_batch_size" in settings)  # of first micro-batches, and of later
    assert measured(tmp_path / "replayed") == measured(tmp_path / "plain")
    for (name, got), expected in zip(replayed.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(got, expected), name


def test_what_cannot_be_captured_runs(folder, tmp_path, monkeypatch, captured):
    plain = run(folder, tmp_path / "plain", monkeypatch, False)

    def refuse(self, step):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(MicroBatches, "record", refuse)
    with pytest.warns(UserWarning, match="without CUDA graphs: operation not permitted when stream is capturing$"):
        run(folder, tmp_path / "refused", monkeypatch, True)
    assert measured(tmp_path / "refused") == measured(tmp_path / "plain")
    assert plain.metrics[-1]["step"] == 8


def test_graphs_of_weights_that_moved_are_dropped(folder, tmp_path, monkeypatch, captured):
    run(folder, tmp_path / "run", monkeypatch, True)
    micro_batches = captured[0]
    assert any(isinstance(known, Graph) for known in micro_batches.graphs.values())
    micro_batches.drop_moved()
    assert micro_batches.graphs
    parameter = micro_batches.parameters[0]
    parameter.data = parameter.data.clone()
    micro_batches.drop_moved()
    assert not micro_batches.graphs
