"""The loss curve benchmark without a GPU, with a tiny model."""

import json
import sys

import pytest
import torch

from benchmarks import results, train_curve
from benchmarks.train_curve import REFERENCE, RUNS, distance, verdict

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 600, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip


def test_both_libraries_train_from_the_same_weights_on_the_same_data(tmp_path, monkeypatch):
    monkeypatch.setitem(train_curve.MODELS, "tiny", TINY)
    monkeypatch.setattr(train_curve, "VOCABULARY", 600)
    monkeypatch.setattr(train_curve, "VOCABULARY_STORIES", 100)
    monkeypatch.setattr(results, "environment", lambda: {"date": "2026-01-01T00:00:00", "gpu": "none"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["--model", "tiny", "--steps", "24", "--batch", "2", "--length", "16", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["train_curve", *arguments])
    train_curve.main()
    report = json.loads((tmp_path / "2026-01-01-000000-train-curve-tiny.json").read_text())
    curves = report["losses"]
    assert list(curves) == list(RUNS) and {len(curve) for curve in curves.values()} == {24}
    for curve in curves.values():
        assert curve == pytest.approx(curves[REFERENCE], rel=2e-3)
    assert curves[REFERENCE][-1] < curves[REFERENCE][0] == pytest.approx(6.4, abs=0.1)  # ln 600
    assert 0.2 < report["floor"] < 0.6
    assert (tmp_path / "plots/train-curve-tiny.png").stat().st_size > 10_000


def test_distances_between_curves():
    flat, early, late = [1.0] * 100, [3.0] * 2 + [1.0] * 98, [1.0] * 50 + [1.5] * 50
    assert list(distance(flat, early).values()) == pytest.approx([(8 / 100) ** 0.5, 0.2, 0.0])
    assert list(distance(late, flat).values()) == pytest.approx([(12.5 / 100) ** 0.5, 0.5, 0.5])


def test_a_run_within_the_noise_is_no_farther_from_the_reference_runs_than_they_are_from_each_other():
    def curves(ours):
        shift = {"hugging face": 0.0, "hugging face, rows reversed": 0.2, "ligermodels": ours}
        return {name: [2.0 + by] * 100 for name, by in shift.items()}

    assert verdict(curves(0.1))["ours_within_noise"]
    far = verdict(curves(0.4))
    assert not far["ours_within_noise"]
    assert far["noise"]["mean of the last 50 steps"] == pytest.approx(0.2)
    assert far["ours_from_theirs"]["ligermodels"]["mean of the last 50 steps"] == pytest.approx(0.3)
