"""The loss of validation rows, and that it is no reason to leave late."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import ligermodels
from ligermodels.training.reporting import evaluation
from ligermodels.training.reporting.evaluation import evaluate
from ligermodels.training.reporting.metrics import Metrics
from ligermodels.training.runs.stopping import Stop
from tests.training.data.documents import CPU, distinct, validation
from tests.training.reporting.test_metrics import records

LENGTHS = (9, 5, 7, 3, 8, 6)


@pytest.fixture
def model():
    return ligermodels.create("qwen2", size="tiny", seed=1).train()


def evaluated(model, stop, folder, world=CPU):
    data = SimpleNamespace(validation=validation(distinct(*LENGTHS), 9), floor=None, tokenizer=None, questions=None)
    with Metrics(folder, steps=1, tokens_per_step=1, device=CPU.device) as metrics:
        evaluate(model, data, 1, world, metrics, stop, 1)
    assert model.training
    return records(folder)


def test_the_loss_is_the_mean_over_all_predicted_tokens(model, tmp_path):
    (record,) = evaluated(model, Stop(), tmp_path)
    model.eval()
    documents = [torch.tensor(document.ids)[None] for document in distinct(*LENGTHS)]
    with torch.no_grad():
        summed = sum(model(ids, ids, num_items_in_batch=1).loss.item() for ids in documents)
    mean = summed / (sum(LENGTHS) - len(LENGTHS))
    assert record["validation_loss"] == pytest.approx(mean, rel=1e-6)
    assert record["validation_perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)


def test_a_run_that_is_told_to_stop_does_not_wait_for_its_validation(model, tmp_path):
    stop, computed = Stop(), []
    model.register_forward_hook(lambda *_: computed.append(setattr(stop, "requested", len(computed) == 1)))
    assert evaluated(model, stop, tmp_path) == []
    assert len(computed) == 2 < len(validation(distinct(*LENGTHS), 9))


def test_told_by_another_rank_it_ends_after_the_batch_that_was_computed_meanwhile(model, tmp_path, monkeypatch):
    computed = []
    model.register_forward_hook(lambda *_: computed.append(1))
    monkeypatch.setattr(evaluation, "total", lambda note: note + (len(computed) >= 1))
    assert evaluated(model, Stop(), tmp_path, replace(CPU, size=2)) == []
    assert len(computed) == 2
