"""`--sampler vllm` against a stand-in for vLLM: weights are those of the step, results those of the own engine."""

import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ligermodels import distributed
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.training import TrainConfig, train
from ligermodels.training.objectives.grpo import grpo, sampling
from ligermodels.training.objectives.grpo.policy import sampler_correction
from ligermodels.training.preparing import prepare
from tests.training.objectives.grpo.vllm_stand_in import make_module

REWARD = (
    "def even(completion_ids, **columns): return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]"
)
GENERATION = ["wake weights", "load", "reset", "wake kv_cache", "generate", "sleep"]


@pytest.fixture
def vllm(monkeypatch):
    module = make_module()
    monkeypatch.setitem(sys.modules, "vllm", module)
    yield module
    distributed.stop()  # the engine's start makes a process group


@pytest.fixture
def config(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{n} plus {n} is"}) for n in range(40)))

    def make(**changes):
        given = {
            "model": "qwen2", "objective": "grpo", "data": (str(tmp_path / "prompts.jsonl"),), "prompts": 2,
            "generations": 4, "max_completion_length": 4, "warmup": 0, "learning_rate": 1e-2, "steps": 2,
            "eval_every": 100, "no_export": True, "reward": (f"{tmp_path / 'rewards.py'}:even",), "sampler": "vllm",
            "output": tmp_path / "run",
        }  # fmt: skip
        return TrainConfig(**(given | changes))

    return make


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 4}], ids=["full", "lora"])
def test_every_generation_samples_with_the_weights_of_its_step(vllm, config, lora):
    """Log-probabilities agree with those of the update to rounding; with weights a step old they would differ by more
    than 1e-2. LoRA's update is merged."""
    before = dict(os.environ)
    records = [record for record in train(config(**lora)).metrics if "reward" in record]
    assert len(records) == 2 and all(record["completions/max_length"] == 4 for record in records)
    assert [record["sampling/sampling_logp_difference/max"] < 1e-4 for record in records] == [True, True]
    # Two steps, then the validation's greedy completions.
    assert vllm.LLM.calls == ["start", "sleep", *GENERATION * 3]
    assert dict(os.environ) == before


def test_weights_of_the_step_before_are_noticed(vllm, config, monkeypatch):
    """What the test above would see if the second generation kept the first one's weights."""
    first = []

    def stale(model, dtype, fresh=sampling.hub_weights):
        first[:] = first or [(name, tensor.clone()) for name, tensor in fresh(model, dtype)]
        return first

    monkeypatch.setattr(sampling, "hub_weights", stale)
    records = [record for record in train(config()).metrics if "reward" in record]
    assert records[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert records[1]["sampling/sampling_logp_difference/max"] > 1e-2


def test_sharded_fp32_weights_are_pushed_in_the_compute_dtype(vllm, config):
    """One process with parameters wider than the compute dtype takes the path of FSDP2."""
    records = train(config(dtype="bfloat16", param_dtype="float32", steps=1)).metrics
    assert records[0]["sampling/sampling_logp_difference/mean"] < 0.05  # bf16 rounds logits to 2^-8


def prepared(config):
    run = prepare(config, World(torch.device("cpu")))
    run.model.to_empty(device="cpu").initialize(0)
    return run.model, run.objective


def test_greedy_samples_are_those_of_the_own_engine(vllm, config):
    model, objective = prepared(config())
    own = grpo.Sampler(objective.tokenizer, objective.sampler.size)
    prompts = objective.data.training.prompts(0, 4, objective.world)
    found, expected = (s.sample(model, prompts, objective.sampling_plan(0)) for s in (objective.sampler, own))
    for (one,), (other,) in zip(found, expected, strict=True):
        assert (one.ids, one.text, one.finish_reason) == (other.ids, other.text, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    "ended, stop, text, reason",
    [(True, (), "the old mill", "stop"), (False, (), "the old mill", "length"), (True, ("d m",), "the ol", "stop")],
)
def test_the_text_ends_at_a_stop_token_the_limit_or_a_stop_text(vllm, config, ended, stop, text, reason):
    _, objective = prepared(config())
    end = objective.tokenizer.eos_token_id
    (encoded,) = objective.tokenizer.encode_batch(["the old mill"])
    ids = [token for token in encoded if token != end] + [end] * ended
    plan = replace(objective.sampling_plan(1.0), stop=stop, max_new_tokens=len(ids) + ended)
    (prompt,) = objective.data.training.prompts(0, 1, objective.world)
    output = SimpleNamespace(token_ids=ids, logprobs=[{token: SimpleNamespace(logprob=-1.0)} for token in ids])
    sample = objective.sampler.sample_of(0, 0, prompt, output, plan, {end})
    assert (sample.text, sample.finish_reason) == (text, reason)
    assert sample.ids == ids[: len(sample.ids)] and (len(sample.ids) < len(ids)) == bool(stop)


def test_the_plan_counts_a_copy_of_the_weights_and_a_cache_while_it_samples(vllm, config):
    model, objective = prepared(config())
    kept, generating = objective.sampler.memory(model, torch.float32)
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    cache = objective.sampler.size.cache_bytes(model, torch.float32)
    assert kept == 0 and weights + cache < generating < weights + cache + 8 * 8 * 1024 + 1


def test_the_start_of_an_engine_leaves_the_random_state_alone(vllm, config):
    model, objective = prepared(config())
    torch.manual_seed(5)
    before = torch.get_rng_state()
    objective.sampler.start_engine(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_sampler_is_corrected_by_default(config):
    assert sampler_correction(config()) == "sequence_mask"
    assert sampler_correction(config(sampler="own")) is None
    assert sampler_correction(config(sampler_correction="none")) is None
    assert sampler_correction(config(sampler_correction="token_mask")) == "token_mask"


def test_one_line_where_vllm_is_not_installed_or_cannot_start(config, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)  # import fails
    with pytest.raises(InputError, match=r"^--sampler vllm: needs vllm, but cannot import it: .*; pip install vllm$"):
        grpo.GRPO(config(), World(torch.device("cpu")))
    (tmp_path / "vllm.py").write_text("raise OSError('libcudart.so: cannot open shared object file')")
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"cannot import it: libcudart.so: cannot open shared object file; pip"):
        grpo.GRPO(config(), World(torch.device("cpu")))
    module = make_module()
    monkeypatch.setitem(sys.modules, "vllm", module)
    model, objective = prepared(config())

    def refuse(**settings):
        raise ValueError("Model architectures ['Qwen2'] are not supported for now.\nmore")

    monkeypatch.setattr(module, "LLM", refuse)
    prompts = objective.data.training.prompts(0, 2, objective.world)
    with pytest.raises(InputError, match=r"^--sampler vllm: vLLM cannot start: .* for now\.; leave it out to") as error:
        objective.sampler.sample(model, prompts, objective.sampling_plan(1.0))
    assert "\n" not in str(error.value)
