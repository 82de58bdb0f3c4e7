"""One step of our objectives is one step of TRL's trainers on transformers' model: the loss, and the updated weights.

Same weights, same records, same tokens; plain SGD, because the first steps of AdamW amplify gradients that are nothing
but rounding. One micro-batch: TRL averages the means of several.
"""

import inspect
import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import ligermodels
from ligermodels.distributed import World
from ligermodels.training import TrainConfig
from ligermodels.training.checkpoints import Progress
from ligermodels.training.objectives import RunSetup
from ligermodels.training.preparing import prepare
from tests.training.small_models import save_model

RATE, BETA, UNITS = 0.5, 0.3, 8
PAIRS = [
    {"prompt": f"{n} plus {n} is", "chosen": f" {2 * n}." + " Good." * (n % 3), "rejected": f" {2 * n}? No."}
    for n in range(UNITS + 1)
]
JUDGED = [{"prompt": p["prompt"], "completion": p["chosen" if n % 2 else "rejected"], "label": bool(n % 2)}
          for n, p in enumerate(PAIRS)]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Policy, reference and reward model, with one tokenizer; weights of a size at which losses differ clearly."""
    folder = tmp_path_factory.mktemp("trl")
    texts = [pair["prompt"] + pair[side] for pair in PAIRS for side in ("chosen", "rejected")]
    for name, seed in (("policy", 0), ("reference", 1)):
        save_model(folder / name, texts, seed=seed, pad_token_id=0)
    scores = ligermodels.load(folder / "policy", reward_model=True)
    with torch.no_grad():
        scores.score.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    ligermodels.export(scores, folder / "scores")
    for source in (folder / "policy").glob("*token*"):
        (folder / "scores" / source.name).write_bytes(source.read_bytes())
    return folder


def trained_by_trl(folder, kind, arguments, records, tmp_path, **options):
    """(loss, weights by name, logged) of TRL's trainer after one step."""
    name = "scores" if kind is RewardTrainer else "policy"
    auto = AutoModelForSequenceClassification if kind is RewardTrainer else AutoModelForCausalLM
    model = auto.from_pretrained(folder / name, dtype=torch.float32)
    settings = {
        "output_dir": str(tmp_path), "per_device_train_batch_size": UNITS, "gradient_accumulation_steps": 1,
        "max_steps": 1, "learning_rate": RATE, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False,
    }  # fmt: skip
    given = {
        "args": arguments(**settings | options.pop("settings")),
        "train_dataset": Dataset.from_list(records[:UNITS]),
    }
    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    trainer = kind(model=model, processing_class=tokenizer, **given, **options)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer.train()
    assert max(float((p.detach() - before[name]).abs().max()) for name, p in model.named_parameters()) > 1e-2
    logged = next(record for record in trainer.state.log_history if "loss" in record)
    return logged["loss"], dict(model.named_parameters()), logged


def trained_by_us(folder, records, tmp_path, **settings):
    """(loss, the model, metrics, the objective) after one step of the same update."""
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, records[:UNITS])))
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("\n".join(map(json.dumps, [r | {"prompt": f"and {r['prompt']}"} for r in records])))
    name = "scores" if settings["objective"] == "reward" else "policy"
    config = TrainConfig(
        model=str(folder / name), data=(str(data),), validation_data=(str(held_out),), steps=1, sequence_length=1024,
        **settings,
    )  # fmt: skip
    run = prepare(config, World(torch.device("cpu")))
    objective, model = run.objective, ligermodels.load(folder / name)
    objective.prepare(model, RunSetup(Path()))
    work = objective.work(model, Progress())
    assert work.units == UNITS
    (batch,) = work.batches
    share = objective.loss(model, batch, work)
    share.loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad
    sums, maxima = ({n: float(v) for n, v in values.items()} for values in (share.sums, share.maxima))
    return share.loss.item(), model, dict(work.metrics) | objective.metrics(sums, maxima, 1), objective


def assert_same_step(ours, theirs, names, tmp_path):
    """Weights, by the Hub's names, agree where the step has changed them."""
    loss, model, metrics, _ = ours
    assert loss == pytest.approx(theirs[0], rel=1e-4, abs=1e-5)
    assert {name: metrics[name] for name in names} == pytest.approx(
        {n: theirs[2][n] for n in names}, rel=1e-3, abs=1e-4
    )
    ligermodels.export(model, tmp_path / "stepped")
    auto = type(model).__name__.endswith("SequenceClassification")
    read = (AutoModelForSequenceClassification if auto else AutoModelForCausalLM).from_pretrained(
        tmp_path / "stepped", dtype=torch.float32
    )
    for name, weight in read.named_parameters():
        torch.testing.assert_close(weight, theirs[1][name], rtol=1e-4, atol=2e-5, msg=name)


SHOWN = ["rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected"]


def test_dpo(folder, tmp_path):
    reference = AutoModelForCausalLM.from_pretrained(folder / "reference", dtype=torch.float32)
    theirs = trained_by_trl(
        folder, DPOTrainer, DPOConfig, PAIRS, tmp_path, ref_model=reference,
        settings={"max_length": 64, "beta": BETA, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]},
    )  # fmt: skip
    ours = trained_by_us(
        folder, PAIRS, tmp_path, objective="dpo", pairs=UNITS, max_length=64, beta=BETA, loss=("sigmoid", "sft=0.2"),
        reference=f"model:{folder / 'reference'}", mean_logits=True,
    )  # fmt: skip
    assert_same_step(
        ours, theirs, [*SHOWN, "logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy"], tmp_path
    )


def test_kto(folder, tmp_path):
    """Without the estimate of the divergence, which TRL makes of other completions than we."""
    reference = AutoModelForCausalLM.from_pretrained(folder / "reference", dtype=torch.float32)
    settings = {"max_length": 64, "beta": BETA, "loss_type": "apo_zero_unpaired", "desirable_weight": 1.2}
    theirs = trained_by_trl(folder, KTOTrainer, KTOConfig, JUDGED, tmp_path, ref_model=reference, settings=settings)
    ours = trained_by_us(
        folder, JUDGED, tmp_path, objective="kto", examples=UNITS, max_length=64, beta=BETA,
        loss=("apo_zero_unpaired",), desirable_weight=1.2, reference=f"model:{folder / 'reference'}",
    )  # fmt: skip
    assert_same_step(ours, theirs, SHOWN, tmp_path)


def test_reward(folder, tmp_path):
    records = [pair | {"margin": 0.1 * n} for n, pair in enumerate(PAIRS)]
    settings = {"max_length": 64, "center_rewards_coefficient": 0.05}
    theirs = trained_by_trl(folder, RewardTrainer, RewardConfig, records, tmp_path, settings=settings)
    ours = trained_by_us(folder, records, tmp_path, objective="reward", pairs=UNITS, max_length=64, center_rewards=0.05)
    assert_same_step(ours, theirs, ["accuracy", "margin", "mean_reward", "min_reward", "max_reward"], tmp_path)


@pytest.mark.parametrize("kind", ["cpo", "simpo"])
def test_cpo_and_simpo(folder, tmp_path, kind):
    settings = {"max_length": 64, "beta": BETA, "max_completion_length": 60}
    settings |= {"loss_type": "simpo", "simpo_gamma": 0.4, "cpo_alpha": 0.0} if kind == "simpo" else {"cpo_alpha": 0.7}
    theirs = trained_by_trl(folder, CPOTrainer, CPOConfig, PAIRS, tmp_path, settings=settings)
    own = {"gamma": 0.4} if kind == "simpo" else {"nll_weight": 0.7}
    ours = trained_by_us(folder, PAIRS, tmp_path, objective=kind, pairs=UNITS, max_length=64, beta=BETA, **own)
    assert_same_step(ours, theirs, SHOWN, tmp_path)


class CompletionORPO(ORPOTrainer):
    """TRL's ORPO with the likelihood of the chosen completion alone, as in ours; TRL adds that of its prompt."""

    def concatenated_forward(self, model, batch):
        chosen, *others, _ = super().concatenated_forward(model, batch)
        lengths = (batch["chosen_labels"][:, 1:] != -100).sum(1)
        return chosen, *others, -(chosen * lengths).sum() / lengths.sum()


def test_orpo(folder, tmp_path):
    settings = {"max_length": 64, "beta": BETA, "max_completion_length": 60}
    theirs = trained_by_trl(folder, CompletionORPO, ORPOConfig, PAIRS, tmp_path, settings=settings)
    ours = trained_by_us(folder, PAIRS, tmp_path, objective="orpo", pairs=UNITS, max_length=64, beta=BETA)
    assert_same_step(ours, theirs, [*SHOWN, "nll_loss", "log_odds_chosen"], tmp_path)


def odd(completion_ids, **_):
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]


def completions_by_prompt(objective):
    """(token ids of the prompt, those of a completion, its log-probabilities) of what was sampled, by the prompt."""
    rollouts, count = objective.rollouts, objective.config.generations
    sampled = defaultdict(list)
    for number, (begin, end) in enumerate(itertools.pairwise(rollouts.offsets.tolist())):
        first, last = rollouts.prompt_offsets[number // count : number // count + 2].tolist()
        ids = rollouts.prompts[first:last].tolist(), rollouts.ids[begin:end].tolist()
        sampled[objective.tokenizer.decode(ids[0])].append((*ids, rollouts.sampling_logprobs[begin:end].tolist()))
    return sampled


GENERATED = {"generations": 4, "max_completion_length": 6, "temperature": 0.7}
GENERATED_BY_TRL = {"per_device_train_batch_size": 4 * UNITS, "num_generations": 4, "max_completion_length": 6,
                    "temperature": 0.7}  # fmt: skip
PROMPTS = [{"prompt": pair["prompt"]} for pair in PAIRS]


def reinforced_by_us(folder, tmp_path, **settings):
    (tmp_path / "odd.py").write_text(inspect.getsource(odd))
    return trained_by_us(
        folder, PROMPTS, tmp_path, objective="grpo", prompts=UNITS, reward=(f"{tmp_path}/odd.py:odd",),
        completions_every=0, keep_zero_spread=True, **GENERATED, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["dapo", "grpo", "dr_grpo"])
def test_grpo(folder, tmp_path, name):
    """TRL's trainer gets the completions that our engine samples; both judge them by the same function."""
    ours = reinforced_by_us(folder, tmp_path, loss=(name,))
    sampled = completions_by_prompt(ours[3])

    def rollout(given, trainer):
        taken = [sampled[prompt].pop() for prompt in given]
        return dict(zip(("prompt_ids", "completion_ids", "logprobs"), map(list, zip(*taken, strict=True)), strict=True))

    options = {"reward_funcs": odd, "rollout_func": rollout}
    settings = GENERATED_BY_TRL | {"beta": 0.0, "loss_type": name}
    theirs = trained_by_trl(folder, GRPOTrainer, GRPOConfig, PROMPTS, tmp_path, settings=settings, **options)
    assert not any(sampled.values()) and theirs[2]["reward_std"] > 0
    assert_same_step(ours, theirs, ["reward", "reward_std", "entropy", "completions/mean_length"], tmp_path)


def test_rloo_with_the_divergence_in_the_reward(folder, tmp_path):
    """The reference has other weights, which TRL's trainer would not give it."""
    ours = reinforced_by_us(folder, tmp_path, loss=("rloo",), beta=BETA, reference=f"model:{folder / 'reference'}")
    sampled = completions_by_prompt(ours[3])

    class Given(RLOOTrainer):
        def _generate_single_turn(self, prompt_ids, *_):
            reference = AutoModelForCausalLM.from_pretrained(folder / "reference", dtype=torch.float32)
            self.ref_model.load_state_dict(reference.state_dict())
            return [sampled[self.processing_class.decode(ids, skip_special_tokens=True)].pop()[1] for ids in prompt_ids]

    settings = GENERATED_BY_TRL | {"beta": BETA}
    theirs = trained_by_trl(folder, Given, RLOOConfig, PROMPTS, tmp_path, settings=settings, reward_funcs=odd)
    assert not any(sampled.values()) and abs(theirs[2]["kl"]) > 0.01
    assert_same_step(ours, theirs, ["reward", "kl", "entropy", "completions/mean_length"], tmp_path)
