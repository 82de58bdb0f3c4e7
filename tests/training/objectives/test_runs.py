"""Whole runs of the objectives on preferences: references, resume, the division of a step, and that they learn."""

import json
import math
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.kernels.losses.linear_logprobs import linear_logprobs
from ligermodels.kernels.losses.linear_logprobs_loss import LogProbsLoss
from ligermodels.layers import lm_head
from ligermodels.layers.decoder import CausalLM
from ligermodels.memory.blocks import HeadOp
from ligermodels.training import TrainConfig, plan, train
from ligermodels.training.data import embedded
from ligermodels.training.objectives.preference.pairs import DPO
from ligermodels.training.preparing import prepare
from ligermodels.training.settings.settings import config_of_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
COMMON = {"model": "qwen2", "data": ("pairs.jsonl",), "pairs": 8, "steps": 2, "eval_every": 9, "max_length": 64,
          "learning_rate": 1e-3, "warmup": 0, "no_export": True}  # fmt: skip

COMMON_EXPORT = {"no_export": False, "output": Path("first")}


@pytest.fixture(autouse=True)
def pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    records = [
        {"prompt": f"{n} plus {n} is", "chosen": f" {2 * n}." + " Good." * (n % 3), "rejected": f" {2 * n}? No."}
        for n in range(60)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))


def run(objective="dpo", **settings):
    given = COMMON | {"objective": objective} | settings
    if objective == "kto":
        given["examples"] = given.pop("pairs")
    return train(TrainConfig(**given))


def steps(result):
    return [record for record in result.metrics if "loss" in record]


MEASURED = {
    "orpo": {"objective": "orpo"},
    "kto": {"objective": "kto", "examples": 8, "pairs": None, "loss": ("apo_zero_unpaired",)},
}
REFERENCES = {
    "precomputed": {},
    "model": {"reference": "model"},
    "ema": {"reference": "ema:0.5/1"},
    "base": {"lora_rank": 4},
    "base, in blocks that are checkpointed": {"lora_rank": 4, "activation_checkpointing": "full"},
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_a_policy_that_equals_its_reference_has_a_loss_of_ln_2_to_the_bit(kind):
    first, second = steps(run(**REFERENCES[kind]))
    assert first["loss"] == torch.tensor(math.log(2)).item() and first["rewards/margins"] == 0.0
    assert second["loss"] < first["loss"] and second["rewards/margins"] > 0


def test_a_step_says_how_many_tokens_its_shared_prompts_save():
    config = TrainConfig(**COMMON, objective="dpo")
    computed = []
    for share in (True, False):
        made = prepare(replace(config, share_prompts=share), World(torch.device("cpu")))
        batches = made.objective.data.training.step(0, 8, World(torch.device("cpu"))).batches
        computed.append(sum(batch.tokens for batch in batches))
    assert steps(run(steps=1))[0]["tokens_saved"] == pytest.approx(1 - computed[0] / computed[1])
    assert "tokens_saved" not in steps(run(steps=1, share_prompts=False))[0]


def test_a_mixture_of_experts_with_lora_of_the_experts_starts_at_its_base():
    first, second = steps(run(model="qwen3_moe", lora_rank=4, lora_targets=("all-linear", "experts")))
    assert first["loss"] == torch.tensor(math.log(2)).item() and second["loss"] < first["loss"]


def test_all_references_that_stay_as_they_are_lead_to_the_same_losses():
    precomputed, model = run(reference="precomputed", steps=3), run(reference="model", steps=3)
    assert [record["loss"] for record in steps(precomputed)] == pytest.approx(
        [record["loss"] for record in steps(model)], abs=1e-6
    )


def test_a_precomputed_reference_is_read_from_the_cache_by_the_next_run(capsys, monkeypatch):
    def printed():
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("reference: "))

    before = steps(run())[1]["loss"]
    assert "precomputed in" in printed()
    computed = []
    monkeypatch.setattr(CausalLM, "eval", lambda model: computed.append(1) or model.train(False))
    assert steps(run(eval_every=9))[1]["loss"] == before
    assert ", from " in printed() and len(computed) == 1  # the validation at the end
    run(seed=1)
    assert "precomputed in" in printed()


@pytest.mark.parametrize(
    ("exported", "file", "change", "trained"),
    [
        ({}, "model/config.json", {"rope_theta": 20.0}, {"model": "first/model"}),
        (
            {"lora_rank": 4, "lora_export": "adapter"},
            "adapter/adapter_config.json",
            {"lora_alpha": 64.0},
            {"model": None, "adapter": "first/adapter"},
        ),
    ],
)
def test_a_precomputed_reference_is_of_all_that_the_forward_reads(exported, file, change, trained, tmp_path):
    """Of equal weights with another rope_theta, or another alpha."""
    base = run("orpo", no_export=False, output=tmp_path / "base").exported
    run("orpo", **COMMON_EXPORT, **exported, model=str(base))
    again = {"reference": "precomputed", "steps": 1} | trained
    run(**again)
    described = tmp_path / "first" / file
    described.write_text(json.dumps(json.loads(described.read_text()) | change))
    assert steps(run(**again))[0]["loss"] == torch.tensor(math.log(2)).item()


def test_kto_counts_the_good_and_the_bad_answers_of_a_step():
    first, *_ = steps(run("kto", reference="model"))
    assert first["count/chosen"] + first["count/rejected"] == COMMON["pairs"]


@pytest.mark.parametrize("objective", ["dpo", "orpo", "cpo", "simpo", "kto"])
def test_the_rows_that_a_step_is_divided_into_change_nothing_but_rounding(objective):
    reference = {"reference": "model"} if objective in ("dpo", "kto") else {}
    whole, divided = (steps(run(objective, sequence_length=length, **reference)) for length in (1024, 32))
    for one, other in zip(whole, divided, strict=True):
        names = one.keys() - {"tokens_per_second", "seconds_left"}
        assert {name: one[name] for name in names} == pytest.approx({name: other[name] for name in names}, abs=2e-4)


UNITS = {
    "dpo": {"reference": "model", "ld_alpha": 0.5, "loss": ("sigmoid", "sft=0.2")},
    "orpo": {}, "cpo": {}, "simpo": {"nll_weight": 0.5}, "kto": {"reference": "model"},
}  # fmt: skip


@pytest.mark.parametrize("objective", UNITS)
def test_a_loss_whose_gradients_the_head_forms_is_the_sum_of_those_of_units(objective, monkeypatch):
    """The head takes a few pairs, or judged answers, at a time, as many as it has memory for."""
    settings = UNITS[objective] | {"sequence_length": 1024}  # a step is one row
    whole, called = steps(run(objective, **settings)), []

    def in_units(hidden, weight, targets, row_loss, *, borders, **options):
        assert not options.get("entropy")  # it would have a gradient, for which a frozen head computes logits again
        found = linear_logprobs(hidden, weight, targets, **options)
        ends = [*borders[1:-1:3], borders[-1]]  # one unit, then three at a time
        parts = [slice(a, b) for a, b in pairwise([0, *ends])]
        called.append(len(parts))
        return LogProbsLoss(sum(row_loss(found.logprobs[x], None, x) for x in parts), found.map(torch.detach))

    monkeypatch.setattr(lm_head, "linear_logprobs_loss", in_units)
    divided = steps(run(objective, **settings))
    assert called[:2] == [4, 4]  # of eight units in each step
    for one, other in zip(whole, divided, strict=True):
        names = one.keys() - {"tokens_per_second", "seconds_left"}
        assert {name: one[name] for name in names} == pytest.approx({name: other[name] for name in names}, rel=1e-5)


@pytest.mark.parametrize("objective", ["orpo", "kto"])
def test_the_plan_of_the_head_has_the_longest_pair_or_answer(objective):
    config = TrainConfig(**COMMON | MEASURED[objective] | {"eval_every": None})
    made = prepare(config, World(torch.device("cpu"))).objective
    groups = made.data.training.groups
    lengths = [sum(map(len, groups.piece(number, 0).group.completions)) for number in range(len(groups))]
    assert made.head_op == HeadOp("linear_logprobs_loss", max(lengths)) and len({*lengths}) > 1


@pytest.mark.parametrize("settings", [{"loss": ("aot",)}, {"wpo": True}])
def test_a_loss_that_reads_more_than_a_pair_gets_all_log_probabilities_at_once(settings, monkeypatch):
    monkeypatch.setattr(lm_head, "linear_logprobs_loss", None)
    first, second = steps(run(**settings, sequence_length=1024))
    assert second["loss"] < first["loss"]


@pytest.mark.parametrize("longest", ["trained on", "held out"])
def test_a_loss_that_sorts_the_pairs_of_a_step_is_refused_before_a_run_with_a_step_of_several_rows(longest, tmp_path):
    """The message names the length that just holds every step of training and validation."""
    config = TrainConfig(**COMMON, objective="dpo", loss=("aot",), sequence_length=32, output=tmp_path / "run")
    if longest == "held out":
        records = [{"prompt": f"{n} is", "chosen": " Good." * n, "rejected": " No." * 9} for n in range(1, 13)]
        (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, records)))
        config = replace(config, validation_data=("long.jsonl",))
    with pytest.raises(InputError, match=r"^--loss aot: sorts the pairs of a step, which must be in one row") as error:
        train(config)
    (most,) = re.findall(r"up to \d+ tokens: give --sequence-length (\d+) instead of 32, or lower", str(error.value))
    with pytest.raises(InputError, match=f"a step has up to {most} tokens"):
        train(replace(config, sequence_length=int(most) - 1))
    assert not (tmp_path / "run").exists()
    alone = World(torch.device("cpu"))
    data = prepare(replace(config, sequence_length=int(most)), alone).objective.data
    taken = [*(data.training.step(first, 8, alone) for first in (0, 8)), *data.validation.steps(8, alone)]
    assert [len(step.batches) for step in taken] == [1] * len(taken) and len(taken) > 2


@pytest.mark.parametrize("kind", ["ema:0.5/2", "precomputed"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(kind, tmp_path):
    whole = run(reference=kind, steps=4, checkpoint_every=3, output=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed/checkpoints/step-000004")
    resumed = train(config_of_run(tmp_path / "killed"))
    assert [r["loss"] for r in steps(resumed)] == [r["loss"] for r in steps(whole)]
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("objective", ["orpo", "kto"])
def test_mean_logits_are_those_of_the_model_over_the_tokens_of_each_side(objective):
    """Of the weights before the first step, over all of its rows; without the flag there are none."""
    config = TrainConfig(**COMMON | MEASURED[objective], mean_logits=True, sequence_length=32)
    made = prepare(config, World(torch.device("cpu")))
    model = made.model.to_empty(device="cpu")
    model.initialize(config.seed)
    sums = {True: [0.0, 0], False: [0.0, 0]}
    for batch in made.objective.data.training.step(0, 8, World(torch.device("cpu"))).batches:
        inputs = batch.model_inputs | {"labels": None, "rows": None}
        logits = model(**inputs).logits[0, batch.rows[: batch.supervised]].mean(-1)
        chosen = batch.sides == 0 if batch.desirable is None else batch.desirable
        for good, part in zip(chosen.tolist(), logits.split(batch.completions.diff().tolist()), strict=True):
            sums[good] = [sums[good][0] + part.sum().item(), sums[good][1] + len(part)]
    found = steps(train(replace(config, steps=1)))[0]
    for side, good in (("chosen", True), ("rejected", False)):
        assert found[f"logits/{side}"] == pytest.approx(sums[good][0] / sums[good][1], rel=1e-4, abs=1e-6)
    assert not [name for name in steps(run(objective, steps=1))[0] if name.startswith("logit")]


def test_a_step_without_an_update_does_not_mix_the_reference(monkeypatch):
    """Step 2 is not finite: its loss is infinite, and weights and reference stay those of step 1."""
    loss, found = DPO.loss, []

    def infinite_in_step_2(self, model, batch, work):
        share = loss(self, model, batch, work)
        found.append({name: weight.clone() for name, weight in self.tensors().items()})
        return share._replace(loss=share.loss + math.inf) if len(found) == 2 else share

    monkeypatch.setattr(DPO, "loss", infinite_in_step_2)
    run(reference="ema:0.5/1", steps=3, on_nan="skip", sequence_length=1024)  # one row a step
    first, second, third = found[:3]
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(second[name], third[name]) for name in first)


def test_a_continued_adapter_is_its_own_reference(tmp_path):
    (tmp_path / "base").mkdir()
    base = run(no_export=False, steps=2, output=tmp_path / "first").exported
    lora = {"model": str(base), "lora_rank": 4, "lora_export": "adapter", "no_export": False}
    adapter = run(**lora, output=tmp_path / "lora").exported
    continued = {"model": str(base), "adapter": str(adapter)}
    first, second = steps(run(**continued))
    assert first["loss"] == torch.tensor(math.log(2)).item() and second["loss"] < first["loss"]
    assert steps(run(**continued, reference="base"))[0]["rewards/margins"] > 0


def test_embedded_preferences_are_learned_from_new_weights_on_unseen_pairs(monkeypatch):
    few = (embedded.EmbeddedSplit("preferences", seed, size) for seed, size in ((0, 200), (1, 40)))
    monkeypatch.setitem(embedded.EMBEDDED_GROUPS, "preferences", tuple(few))
    settings = {"objective": "dpo", "data": ("preferences",), "pairs": 16, "steps": 6, "eval_every": 6}
    result = train(TrainConfig(model="qwen2", **settings, reference="model", no_export=True))
    (validation,) = [record for record in result.metrics if record["step"] == 6 and "validation_loss" in record]
    assert validation["validation_rewards/accuracies"] >= 0.9 and validation["validation_loss"] < math.log(2)


def test_the_plan_has_the_peak_of_each_phase_and_the_reference_beside_the_model():
    precomputed = plan(TrainConfig(**COMMON, objective="dpo"))
    assert [*precomputed.phases] == ["precompute", "train"]
    assert precomputed.phases["precompute"] < precomputed.phases["train"] and "peak, precompute" in precomputed.text()
    beside = plan(TrainConfig(**COMMON, objective="dpo", reference="model"))
    assert beside.memory.beside == 4 * beside.parameters.total
    assert beside.phases == {"train": precomputed.phases["train"] + beside.memory.beside}
    assert "8 pairs a step" in beside.step
