"""References: their log-probabilities are those of a model without dropout."""

import json
from pathlib import Path

import pytest
import torch

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.training import TrainConfig, plan
from ligermodels.training.objectives import RunSetup
from ligermodels.training.objectives.preference.references import row_logprobs
from ligermodels.training.preparing import prepare
from tests.training.small_models import save_model


@pytest.fixture
def dropping(tmp_path):
    """DPO with LoRA and dropout, whose reference is a moving average of the policy: (objective, policy)."""
    records = [{"prompt": f"{n} plus {n} is", "chosen": f" {2 * n}.", "rejected": f" {n}."} for n in range(1, 41)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    config = TrainConfig(
        model="qwen2", objective="dpo", data=(str(tmp_path / "pairs.jsonl"),), pairs=4, steps=2, lora_rank=4,
        lora_dropout=0.5, share_prompts=False, reference="ema:0.5/1", max_length=64,
    )  # fmt: skip
    run = prepare(config, World(torch.device("cpu")))
    model = run.model.to_empty(device="cpu")
    model.initialize(0)
    for name, parameter in model.named_parameters():  # LoRA's B is 0 at the start, and hides the dropout
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.1)
    run.objective.prepare(model, RunSetup(Path()))
    return run.objective, model.train()


def check_reference_without_dropout(objective, model):
    batch = objective.data.training.step(0, 4, objective.world).batches[0]
    found = objective.reference.logprobs(model, batch)
    expected = model.eval()(**batch.model_inputs, logprobs={}).logprobs.logprobs[: batch.supervised]
    assert torch.equal(found, expected.detach())


def test_a_reference_has_no_dropout_and_leaves_that_of_the_policy(dropping):
    objective, model = dropping
    batch = objective.data.training.step(0, 4, objective.world).batches[0]
    first, second = (model(**batch.model_inputs, logprobs={}).logprobs.logprobs for _ in range(2))
    assert not torch.equal(first, second)  # the policy has it
    assert torch.equal(row_logprobs(model, batch), row_logprobs(model, batch)) and model.training
    check_reference_without_dropout(objective, model)


@pytest.fixture
def folder(tmp_path):
    """A policy, with pairs and prompts."""
    texts = [f"{n} plus {n} is {2 * n}." for n in range(40)]
    save_model(tmp_path / "policy", texts)
    pairs = [{"prompt": f"{n} plus {n} is", "chosen": f" {2 * n}.", "rejected": f" {n}."} for n in range(1, 41)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": pair["prompt"]}) for pair in pairs))
    return tmp_path


OBJECTIVES = {
    "dpo": {"data": ("pairs.jsonl",), "pairs": 4, "max_length": 64},
    "grpo": {"data": ("prompts.jsonl",), "prompts": 2, "max_completion_length": 8, "reward": ("length",), "beta": 0.1},
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_reference_with_another_vocabulary_is_refused_before_the_run(folder, monkeypatch, objective):
    monkeypatch.chdir(folder)
    save_model("foreign", ["Quite other words, of which this tokenizer has its own pieces."] * 9)
    save_model("larger", ["The same words."], vocab_size=384)
    (folder / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "bare" / name).write_bytes((folder / "foreign" / name).read_bytes())

    def planned(reference):
        return plan(TrainConfig(model="policy", objective=objective, steps=2, reference=reference,
                                **OBJECTIVES[objective]))  # fmt: skip

    assert planned("model:policy").memory.beside > planned("model:policy").parameters.total
    assert planned("model:bare").memory.beside  # without a tokenizer, the size is all that is known
    with pytest.raises(
        InputError,
        match=r"^--reference model:foreign: token \d+ is '.+' in the tokenizer of policy, '.+' in its own; take a "
        "model with the same vocabulary$",
    ):
        planned("model:foreign")
    with pytest.raises(
        InputError,
        match=r"^--reference model:larger: has a vocabulary of 384 tokens, the policy 320; take a model with the same "
        "tokenizer$",
    ):
        planned("model:larger")
