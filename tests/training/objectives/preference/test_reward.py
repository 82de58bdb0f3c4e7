"""Reward models are trained on pairs, exported as the Hub's classifiers, and used as reward functions."""

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import ligermodels
from ligermodels.errors import InputError
from ligermodels.training import TrainConfig, plan, train
from ligermodels.training.reward_function import RewardModelFunction
from tests.training.small_models import save_model, validations

WORDS = ("good", "kind", "warm"), ("bad", "rude", "cold")
PAIRS = [
    {"prompt": f"Sentence {n}: it is", "chosen": f" {good} and {n}.", "rejected": f" {bad} and {n}.", "margin": 0.5}
    for n in range(40)
    for good, bad in zip(*WORDS, strict=True)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    texts = [pair["prompt"] + pair[side] for pair in PAIRS for side in ("chosen", "rejected")]
    save_model(folder / "base", texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        train(settings(folder, steps=30, eval_every=30, center_rewards=0.01))
    return folder


def settings(folder, **fields):
    usual = {"pairs": 16, "learning_rate": 3e-3, "validation_fraction": 0.2, "checkpoint_every": 0, "max_length": 64}
    files = {"model": str(folder / "base"), "data": (str(folder / "pairs.jsonl"),), "output": folder / "run"}
    return TrainConfig(**({"objective": "reward"} | usual | files | fields))


def test_unseen_pairs_are_ordered_and_metrics_have_the_names_of_trl(folder):
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    found = {record["step"]: record for record in records if "validation_loss" in record}
    assert found[30]["validation_accuracy"] >= 0.9 > found[0]["validation_accuracy"]
    last = next(record for record in reversed(records) if "loss" in record)
    assert last["min_reward"] < last["mean_reward"] < last["max_reward"] and last["margin"] > 0.5
    assert abs(last["mean_reward"]) < last["margin"]


@torch.no_grad()
def test_the_reward_function_scores_as_transformers_reads_the_export(folder):
    reward = RewardModelFunction.load(folder / "run/model")
    prompts, completions = ["Sentence 3: it is"] * 2, [" kind and 3.", " rude and 3."]
    scores = reward(prompts, completions, column=[1, 2])
    assert scores[0] > scores[1]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "run/model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "run/model")
    for score, prompt, completion in zip(scores, prompts, completions, strict=True):
        ids = torch.tensor([[*tokenizer(prompt + completion).input_ids, tokenizer.eos_token_id]])
        assert score == pytest.approx(model(ids).logits.item(), abs=1e-4)
    with pytest.raises(InputError, match="completion 1: is longer than 128 tokens"):
        reward(prompts, [" kind.", " rude." * 200])
    with pytest.raises(InputError, match="base: is a language model; train a reward model with --objective reward"):
        RewardModelFunction.load(folder / "base")


def test_a_reward_model_is_trained_further_and_lora_exports_its_head(folder):
    again = train(settings(folder, model=str(folder / "run/model"), steps=1, output=folder / "again"))
    assert validations(again)[0]["validation_accuracy"] >= 0.9
    lora = train(
        settings(folder, steps=2, lora_rank=2, share_prompts=False, lora_export="adapter", output=folder / "lora")
    )
    config = json.loads((lora.exported / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["score"] and config["task_type"] == "SEQ_CLS"
    with pytest.warns(UserWarning, match="new one"):
        model = ligermodels.load(folder / "base", reward_model=True)
    ligermodels.load_adapter(model, lora.exported)
    assert torch.equal(model.score.weight, lora.model.score.weight)


def test_what_a_reward_model_cannot_do_is_refused(folder):
    with pytest.raises(InputError, match=r"--model .*: is a reward model, which --objective reward trains"):
        plan(settings(folder, model=str(folder / "run/model"), objective="dpo", center_rewards=None))
    with pytest.raises(InputError, match=r"--beta .*has no effect under --objective reward"):
        plan(settings(folder, beta=0.2))
    with pytest.raises(InputError, match=r"--center-rewards .*has no effect under --objective dpo"):
        plan(settings(folder, objective="dpo", center_rewards=0.1))
