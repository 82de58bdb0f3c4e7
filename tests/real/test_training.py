"""Training of a trained model's first blocks (tests/test_notebooks.py trains all): LoRA that lowers the loss of
held-out chats, whose results PEFT and transformers read, and a step of reinforcement learning."""

import importlib
import json
import math
from pydoc_data.topics import topics

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import ligermodels
from ligermodels.training import TrainConfig, train
from ligermodels.training.objectives import evaluation
from ligermodels.training.objectives.grpo import grpo
from ligermodels.training.objectives.grpo.policy import policy_loss
from tests.kernels.error_budget import relative_error
from tests.real.conftest import DEVICES, tokenizer_of

STEPS = 8
ANSWER = 160  # characters
HELD_OUT = 20  # every so many chats
loop = importlib.import_module("ligermodels.training.loop")
REWARD = (
    "def short(completions, **columns):\n    return [-float(len(messages[0]['content'])) for messages in completions]\n"
)


def chats():
    """Questions about topics of Python's documentation; the answers are how its pages begin."""
    for name in sorted(topics):
        text = " ".join(topics[name].split("\n\n", 2)[1].split())[:ANSWER]
        question = f"What does Python's documentation say about {name!r}?"
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": text}]}


def write(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


@pytest.fixture(scope="module", autouse=True)
def bare_runs():
    """Runs without what these tests do not read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw_curves", lambda *_: None)
        patch.setattr(evaluation, "SAMPLE_TOKENS", 4)
        yield


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module")
def run(device, shallow, tmp_path_factory):
    """A LoRA run: in fp32 on a CPU, over a base in bf16 on a GPU."""
    path = tmp_path_factory.mktemp("lora")
    records = list(chats())
    held_out = write(path / "held-out.jsonl", records[::HELD_OUT])
    data = write(path / "chats.jsonl", [record for i, record in enumerate(records) if i % HELD_OUT])
    settings = {
        "model": str(shallow), "data": (data,), "validation_data": (held_out,), "steps": STEPS,
        "lora_rank": 8, "lora_export": "adapter", "batch_size": 1, "sequence_length": 96, "eval_every": STEPS,
        "learning_rate": 1e-3, "checkpoint_every": 0, "output": path / "run",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path / "cache"))
        return train(TrainConfig(**settings))


@pytest.fixture(scope="module")
def ids(device, shallow):
    text = topics["lambda"]
    return torch.tensor([tokenizer_of(shallow).encode(text)[:64]], device=device)


@torch.no_grad()
def adapted_logits(folder, run, device, ids):
    model = ligermodels.load(folder, dtype=torch.float32, device=device)
    ligermodels.load_adapter(model, run.exported)
    return model, model(ids).logits


def test_eight_steps_of_lora_lower_the_loss_of_held_out_chats(run):
    losses = [record["validation_loss"] for record in run.metrics if "validation_loss" in record]
    assert len(losses) == 2 and losses[1] < losses[0] - 0.3
    assert all(math.isfinite(record["loss"]) for record in run.metrics if "loss" in record)


@torch.no_grad()
def test_peft_reads_the_adapter_and_transformers_the_merged_export(run, device, ids, shallow, tmp_path):
    """With the logits of ours, within the rounding of merged weights, which are exported in fp32."""
    model, expected = adapted_logits(shallow, run, device, ids)
    base = AutoModelForCausalLM.from_pretrained(shallow, dtype=torch.float32, device_map=device).eval()
    assert relative_error(base(ids).logits, expected.double()) > 0.05
    found = peft.PeftModel.from_pretrained(base, run.exported).eval()(ids).logits
    assert relative_error(found, expected.double()) < 1e-5 and torch.equal(found.argmax(-1), expected.argmax(-1))

    ligermodels.export(model, tmp_path / "merged", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", device_map=device).eval()
    found = merged(ids).logits
    assert found.dtype == torch.float32
    assert relative_error(found, expected.double()) < 1e-5 and torch.equal(found.argmax(-1), expected.argmax(-1))


def test_the_first_update_of_grpo_has_ratios_of_exactly_one(device, shallow, tmp_path, monkeypatch):
    """The log-probabilities of the completions, taken after sampling, are those of the first update to the bit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "rewards.py").write_text(REWARD)
    prompts = [{"prompt": chat["messages"][:1]} for chat in list(chats())[:4]]
    equal, differences = [], []

    def watched(options, row, logprobs, only):
        old, new = row.old_logprobs[: len(row.places)], logprobs.detach()[: len(row.places)]
        equal.append(torch.equal(old, new))
        differences.append((old - new).abs().max().item())
        return policy_loss(options, row, logprobs, only)

    monkeypatch.setattr(grpo, "policy_loss", watched)
    settings = {
        "model": str(shallow), "objective": "grpo", "data": (write(tmp_path / "prompts.jsonl", prompts),),
        "reward": (f"{tmp_path / 'rewards.py'}:short",), "prompts": 2, "generations": 2, "max_completion_length": 8,
        "iterations": 2, "steps": 2, "warmup": 0, "learning_rate": 1e-6, "eval_every": 9,
        "checkpoint_every": 0, "no_export": True, "output": tmp_path / "run",
    }  # fmt: skip
    metrics = [record for record in train(TrainConfig(**settings)).metrics if "reward" in record]
    updates = len(equal) // 2
    assert equal == [True] * updates + [False] * updates and max(differences) < 1.0
    assert metrics[0]["clip_ratio/region_mean"] == 0
    if device == "cpu":  # where all is fp32, and the engine that samples differs in the order of sums alone
        assert metrics[0]["sampling/sampling_logp_difference/max"] < 1e-4
