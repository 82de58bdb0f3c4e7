"""Settings that have no effect or contradict an objective, and what a run says about its data."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.hub import create, export
from ligermodels.training import TrainConfig
from ligermodels.training.objectives import OBJECTIVES, make_objective
from ligermodels.training.objectives.grpo.judging import GenerationWatch, RewardedGeneration
from ligermodels.training.objectives.grpo.reward_worker import RewardFunction
from ligermodels.training.objectives.preference.kto import KTO
from ligermodels.training.objectives.preference.pairs import PairWatch
from ligermodels.training.objectives.preference.references import ModelReference, ReferenceSpec, parse_reference
from ligermodels.training.planning.contradictions import refuse_contradictions

ALONE = World(torch.device("cpu"))


def refusal(objective, **settings):
    config = TrainConfig(model="qwen2", data=("preferences",), objective=objective, **settings)
    with pytest.raises(InputError) as error:
        refuse_contradictions(config)
        make_objective(config, ALONE)
    return str(error.value)


@pytest.mark.parametrize(
    ("objective", "settings", "words"),
    [
        ("sft", {"beta": 0.1}, "--beta (elsewhere rl_beta) has no effect under --objective sft, only under dpo"),
        (
            "sft",
            {"max_length": 64},
            "--max-length has no effect under --objective sft, only under dpo, orpo, cpo, simpo, reward, kto: give "
            "--sequence-length",
        ),
        (
            "dpo",
            {"gamma": 0.5},
            "--gamma (elsewhere simpo_gamma) has no effect under --objective dpo, only under simpo: leave",
        ),
        ("dpo", {"batch_size": 8}, "--batch-size has no effect under --objective dpo, only under sft, distill: give"),
        ("kto", {"pairs": 8}, "--pairs has no effect under --objective kto"),
        ("orpo", {"reference": "model"}, "has no effect under --objective orpo, only under dpo, kto"),
        ("simpo", {"loss": ("hinge",)}, "--loss (elsewhere loss_type) has no effect under --objective simpo"),
        ("dpo", {"loss": ("sigmoyd",)}, "loss_type 'sigmoyd' is unknown; did you mean 'sigmoid'?"),
        ("dpo", {"loss": ("sigmoid", "sft=x")}, "--loss sft=x: must have a weight, as sft=0.2"),
        ("dpo", {"loss": ("sigmoid", "sft=nan")}, "--loss sft=nan: must have a weight, as sft=0.2"),
        ("dpo", {"loss": ("hinge",), "label_smoothing": 0.1}, "label_smoothing has no effect on loss_type hinge"),
        ("dpo", {"discopop_tau": 0.1}, "--discopop-tau goes with --loss discopop"),
        ("dpo", {"f_divergence": "forward_kl:1"}, "only alpha_divergence has a number"),
        ("dpo", {"reference": "base"}, "--reference base goes with --lora-rank, which is missing"),
        ("dpo", {"reference": "adapter"}, "--reference adapter goes with --adapter, which is missing"),
        ("dpo", {"reference": "ema:2/5"}, "--reference ema:2/5: must be like ema:0.6/512"),
        ("dpo", {"reference": "base", "lora_rank": 4, "modules_to_save": ("norm",)}, "trains weights of the base"),
        ("cpo", {"loss": ("sigmoid", "hinge")}, "--objective cpo has one loss without a weight"),
        ("kto", {"reference": "precomputed"}, "--reference precomputed: KTO compares prompts with other examples'"),
        ("kto", {"loss": ("sigmoid",)}, "--loss sigmoid: of --objective kto must be one of kto, apo_zero_unpaired"),
    ],
)
def test_a_setting_without_effect_and_a_contradiction_are_refused_by_name(objective, settings, words):
    assert words in refusal(objective, **settings)


@pytest.mark.parametrize("loss", ["aot", "aot_unpaired"])
def test_a_loss_that_sorts_the_pairs_of_a_step_is_refused_on_several_ranks(loss):
    config = TrainConfig(model="qwen2", objective="dpo", loss=("sigmoid", loss))
    with pytest.raises(InputError, match=f"^--loss {loss}: sorts the pairs of a step, .* but there are 2: start one"):
        make_objective(config, replace(ALONE, size=2))


def test_every_objective_can_be_made():
    for name, kind in OBJECTIVES.items():
        needed = {"distill": {"teacher": "folder"}, "grpo": {"reward": ("exact",)}}.get(name, {})
        assert type(make_objective(TrainConfig(model="qwen2", objective=name, **needed), ALONE)) is kind


def test_references_are_named_by_kind_with_their_numbers():
    assert parse_reference("ema") == ReferenceSpec("ema", None, 0.6, 512)
    assert parse_reference("ema:0.25/8") == ReferenceSpec("ema", None, 0.25, 8)
    assert parse_reference("model:my/model") == ReferenceSpec("model", "my/model")


def values(accuracy, chosen, rejected):
    return {"rewards/accuracies": accuracy, "logps/chosen": chosen, "logps/rejected": rejected}


def test_labels_that_leak_are_told_once():
    watch = PairWatch()
    steps = [values(0.0, -50.0, -60.0), *[values(1.0, -50.0, -60.0)] * 7]  # at first a policy equals its reference
    lines = [line for step, found in enumerate(steps, 1) for line in watch.warnings(found, step)]
    assert len(lines) == 1 and lines[0].startswith("accuracy 1.0 in each of the steps 2 to 6")
    watch = PairWatch()
    steps[2] = values(0.9, -50.0, -60.0)
    assert not [line for step, found in enumerate(steps, 1) for line in watch.warnings(found, step)]


def test_labels_that_a_resumed_policy_has_learned_are_no_leak():
    watch = PairWatch()
    assert not [line for step in range(40, 60) for line in watch.warnings(values(1.0, -50.0, -60.0), step)]


def test_kto_advises_a_weight_that_counts_the_weight_given():
    config = TrainConfig(model="qwen2", data=("x",), objective="kto", desirable_weight=0.5, undesirable_weight=2.0)
    objective = KTO(config, World(torch.device("cpu")))
    for good, bad, weight in ((100, 100, "--desirable-weight 2.00"), (800, 100, "--undesirable-weight 3.00")):
        objective.data = SimpleNamespace(training=SimpleNamespace(labels=(good, bad)))
        (line,) = objective.advice()
        assert line.endswith(weight)


@pytest.mark.parametrize(("good", "bad"), [(43, 14), (14, 43), (100, 1), (7, 3)])
def test_a_weight_that_kto_advises_is_enough(good, bad):
    objective = KTO(TrainConfig(model="qwen2", data=("x",), objective="kto"), World(torch.device("cpu")))
    objective.data = SimpleNamespace(training=SimpleNamespace(labels=(good, bad)))
    flag, weight = objective.advice()[0].split()[-2:]
    objective.options[flag[2:].replace("-", "_")] = float(weight)
    assert not objective.advice()


def test_a_reward_model_is_no_reference(tmp_path):
    model = create("qwen2", size="tiny", reward_model=True)
    model.initialize(0)
    export(model, tmp_path / "reward")
    reference = ModelReference(
        TrainConfig(model="qwen2", data=("x",), dtype="float32"), World(torch.device("cpu")), str(tmp_path / "reward"),
        None,
    )  # fmt: skip
    with pytest.raises(InputError, match="is a reward model, without logits of tokens"):
        reference.build(create("qwen2", size="tiny", device="meta"))


def test_chosen_answers_that_fall_by_more_than_the_rejected_are_told():
    watch = PairWatch()
    assert watch.warnings(values(0.5, -50.0, -60.0), 1) == []
    assert watch.warnings(values(0.7, -65.0, -90.0), 2) == []
    (line,) = watch.warnings(values(0.7, -65.0, -70.0), 3)
    assert line.startswith("the chosen answers have lost 15 nats, more than the rejected: raise --beta")


def generation(without_spread, clipped=0.5):
    return {"frac_reward_zero_std": without_spread, "reward": 0.25, "completions/clipped_ratio": clipped}


def test_groups_without_spread_and_completions_without_an_end_are_told_once():
    watch = GenerationWatch(keeps_all=False)
    assert watch.warnings({"loss": 0.0}) == watch.warnings(generation(0.8)) == []  # the first: a later update
    (line,) = watch.warnings(generation(0.81))
    assert line.startswith("81% of the prompts got equal rewards for all completions, and teach nothing")
    (line,) = watch.warnings(generation(1.0, clipped=1.0))
    assert line.startswith("every completion reached --max-completion-length: raise it, or name a text that ends one")
    assert watch.warnings(generation(1.0, clipped=1.0)) == []


def test_rewards_that_are_none_for_a_whole_generation_are_named_once():
    watch, functions = GenerationWatch(keeps_all=False), [RewardFunction(name, name, None) for name in ("a", "b")]
    samples = [[1.0, None], [None, None]]
    for rewards in (samples, [[None, None], [0.0, 1.0]], samples):
        watch.look(RewardedGeneration([SimpleNamespace(rewards=rewards)], {}), functions)
        warned = watch.warnings({})
    named = [line.partition(": is None for all 2 completions of a generation")[0] for line in watch.absent.values()]
    assert named == ["--reward b", "--reward a"] and warned == []


def test_ten_generations_in_a_row_without_spread_end_a_run():
    watch = GenerationWatch(keeps_all=False)
    for share in [1.0] * 9 + [0.99] + [1.0] * 9:
        watch.refuse_useless(generation(share))
    with pytest.raises(InputError, match=r"^10 generations in a row had no prompt .* \(mean reward 0.25\): nothing"):
        watch.refuse_useless(generation(1.0))
    watch = GenerationWatch(keeps_all=True)
    for _ in range(20):
        watch.refuse_useless(generation(1.0))
