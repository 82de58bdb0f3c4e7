"""Replays of captured micro-batches have the bits of micro-batches that run."""

import json
from types import SimpleNamespace

import pytest
import torch

import ligermodels
from ligermodels.hub.models import select_architecture
from ligermodels.training import TrainConfig, loop, micro_batches, train
from ligermodels.training.data.rows.run_rows import Batch
from ligermodels.training.micro_batches import Graph, MicroBatches
from ligermodels.training.objectives import Share, Work
from tests.cases import CASES
from tests.conftest import DEVICE
from tests.kernels.error_budget import relative_error
from tests.reference_model import tokens
from tests.suites import of_families, quick, slow
from tests.training.launching import records
from tests.training.small_models import RAW, save_model

TEXTS = [" ".join(f"word{number * 7 % 40}" for number in range(start, start + 3 + start % 9)) for start in range(240)]
MEASURED = ("loss", "grad_norm", "validation_loss")
FAMILIES = [name for name in of_families(CASES) if not select_architecture(CASES[name], name)[0].takes_images]
HEADS_OF_64 = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 64,
}  # fmt: skip

KINDS = ["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "granitemoehybrid", "lfm2"]  # of mixers and experts


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
        with torch.random.fork_rng():
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
        {"lora_rank": 4, "lora_dropout": 0.3},
        {"micro_batch_size": 2, "data": "answers", "activation_checkpointing": "full"},
        pytest.param({"micro_batch_size": 1, "model": "experts"}, marks=slow),
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
    own = captured[0]
    assert any(isinstance(known, Graph) for known in own.graphs.values())
    own.refresh(own.parameters)
    assert own.graphs
    own.parameters[0].data = own.parameters[0].data.clone()
    own.refresh(own.parameters)
    assert not own.graphs


def test_small_micro_batches_of_one_gpu_are_captured(monkeypatch):
    monkeypatch.setattr(micro_batches, "peak_flops", lambda device, dtype: 1e15)
    memory = SimpleNamespace(peak=40, gradients=10, activations=20, loss=5, block=3)

    def captures(flops=100, tokens=10**11, total=100, size=1, capturable=True, device="cuda", model=None, **config):
        plan = SimpleNamespace(flops=flops, micro_batch_size=1, total=total, memory=memory)
        settings = {"sequence_length": tokens, "dtype": "bfloat16", "compile": False, "offload": ()}
        run = SimpleNamespace(
            config=SimpleNamespace(**(settings | {"optimizer_in_backward": False} | config)), plan=plan,
            world=SimpleNamespace(device=torch.device(device), size=size), model=model or ligermodels.create(RAW),
            objective=SimpleNamespace(is_capturable=capturable),
        )  # fmt: skip
        return micro_batches.captures_graphs(run)

    assert captures()  # 0.01 s of products, 75 of 100 bytes
    assert not captures(tokens=10**12)
    assert not captures(total=80)
    assert not captures(size=2)
    assert not captures(capturable=False)
    assert not captures(device="cpu")
    assert (
        not captures(compile=True) and not captures(offload=("optimizer",)) and not captures(optimizer_in_backward=True)
    )
    model = ligermodels.create(RAW | {"attention_dropout": 0.1}).train()
    assert captures(model=model)
    model.checkpoint_activations()
    assert not captures(model=model)


class LossOnly:
    """Stands for an objective: the loss of a batch over the step's supervised tokens."""

    @staticmethod
    def loss(model, batch, work):
        return Share(model(**batch.arguments(), num_items_in_batch=work.counts[0]).loss)


@pytest.mark.parametrize("name", quick(FAMILIES, KINDS))
def test_a_replay_has_the_loss_and_gradients_of_other_documents(name, captured):
    """In the kinds of layers that models have: later batches differ in their tokens and in where documents end."""
    exact = torch.float64 if DEVICE == "cpu" else torch.float32
    model = ligermodels.create(CASES[name], seed=0).to(DEVICE, exact).train()
    own = MicroBatches(model, LossOnly, None, captures=True)
    for seed, ends in enumerate([(7, 12), (5, 9, 12), (1, 2, 12), (12,)]):
        ids = tokens(CASES[name], 1, 12, seed=seed).to(DEVICE)
        offsets = torch.tensor([0, *ends], dtype=torch.int32, device=DEVICE)
        batch = Batch(ids, ids, offsets, 12, torch.tensor([12], device=DEVICE))
        work = Work((), torch.tensor([12 - len(ends), 12], device=DEVICE), 1, 12)
        expected = own.run(batch, work).loss
        gradients = {p: p.grad for p in model.parameters()}
        model.zero_grad()
        share = own.backward(batch, work)
        torch.testing.assert_close(share.loss, expected, rtol=1e-6, atol=0)
        for p, gradient in gradients.items():
            assert (p.grad is None) == (gradient is None)
            assert gradient is None or relative_error(p.grad, gradient) <= (1e-9 if DEVICE == "cpu" else 1e-4)
        model.zero_grad()
    assert len(captured) == 1 and own.captures
