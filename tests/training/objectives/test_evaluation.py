"""The validation loss, and a stop request during validation."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import ligermodels
from ligermodels.training.objectives import evaluation
from ligermodels.training.objectives.evaluation import evaluate
from ligermodels.training.reporting.metrics import Metrics
from ligermodels.training.run.stopping import Stop
from tests.training.data.documents import CPU, distinct, validation
from tests.training.reporting.test_metrics import records

LENGTHS = (9, 5, 7, 3, 8, 6)


@pytest.fixture
def model():
    return ligermodels.create("qwen2", size="tiny", seed=1).train()


def evaluated(model, stop, folder, world=CPU):
    data = SimpleNamespace(validation=validation(distinct(*LENGTHS), 9), floor=None, tokenizer=None, questions=None)
    with Metrics(folder, steps=1, device=CPU.device) as metrics:
        found = evaluate(model, data, 1, world, stop)
        if found is not None:
            metrics.validation(1, found)
    assert model.training
    return records(folder)


def test_the_validation_loss_is_the_mean_over_all_supervised_tokens(model, tmp_path):
    (record,) = evaluated(model, Stop(), tmp_path)
    model.eval()
    documents = [torch.tensor(document.ids)[None] for document in distinct(*LENGTHS)]
    with torch.no_grad():
        summed = sum(model(ids, ids, num_items_in_batch=1).loss.item() for ids in documents)
    mean = summed / (sum(LENGTHS) - len(LENGTHS))
    assert record["validation_loss"] == pytest.approx(mean, rel=1e-6)
    assert record["validation_perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)


def test_a_stop_request_ends_validation_early(model, tmp_path):
    stop, computed = Stop(), []
    model.register_forward_hook(lambda *_: computed.append(setattr(stop, "signal", len(computed) == 1)))
    assert evaluated(model, stop, tmp_path) == []
    assert len(computed) == 2 < len(validation(distinct(*LENGTHS), 9))


def test_a_stop_request_on_another_rank_ends_validation_after_the_current_batch(model, tmp_path, monkeypatch):
    computed = []
    model.register_forward_hook(lambda *_: computed.append(1))
    monkeypatch.setattr(evaluation, "total", lambda note: note + (len(computed) >= 1))
    assert evaluated(model, Stop(), tmp_path, replace(CPU, size=2)) == []
    assert len(computed) == 2
