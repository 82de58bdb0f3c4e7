"""Our losses are TRL's, by its own code; docs/losses.md lists where its results differ from the formulas.

TRL's loss methods run on a stub of a trainer whose model returns given log-probabilities.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from ligermodels.losses import cpo, dpo, kto, orpo, pair_sums, reward, segment_means, segment_sums, simpo
from ligermodels.losses.preference import LOSS_TYPES, READ_A_DIFFERENCE
from tests.losses.sequences import as_rows, sequences

trl = pytest.importorskip("trl", minversion="1.16.0")
CPOTrainer = pytest.importorskip("trl.experimental.cpo").CPOTrainer
ORPOTrainer = pytest.importorskip("trl.experimental.orpo").ORPOTrainer

BETA, SMOOTHING = 0.7, 0.1
TOLERANCE = {"rtol": 2e-6, "atol": 1e-6}


def stub(**options):
    """A trainer in one process, as far as TRL's losses read it."""
    accelerator = SimpleNamespace(device="cpu", gather=lambda value: value, gather_for_metrics=lambda value: value)
    model = SimpleNamespace(training=False)
    metrics = {"eval": defaultdict(list), "train": defaultdict(list)}
    common = {"aux_loss_enabled": False, "_total_train_tokens": 0, "_tp_size": 1, "_metrics": metrics}
    return SimpleNamespace(
        accelerator=accelerator, model=model, beta=BETA, label_smoothing=SMOOTHING, **common, **options
    )


def completions(data, order):
    """Inputs of TRL's trainers: one prompt token, then the completion; and its log-probabilities as rows."""
    rows = as_rows(data.logprobs, data.cu_seqlens, order)
    mask = torch.arange(rows.shape[1]) < data.cu_seqlens.diff()[order][:, None]
    mask = torch.nn.functional.pad(mask.long(), (1, 0))
    return rows, {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}


def model_of(rows, log_sum_squares):
    zeros = torch.zeros_like(rows)
    outputs = SimpleNamespace(
        log_probs=rows, log_sum_sq_probs=log_sum_squares, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )
    return lambda **_: outputs


def trl_dpo(data, log_sum_squares, names, weights, **options):
    pairs = (len(data.cu_seqlens) - 1) // 2
    order = [*range(0, 2 * pairs, 2), *range(1, 2 * pairs, 2)]  # all chosen, then all rejected
    rows, inputs = completions(data, order)
    reference = pair_sums(data.reference, data.cu_seqlens, options.get("ld_alpha")).float()[order]
    inputs |= {"ref_chosen_logps": reference[:pairs], "ref_rejected_logps": reference[pairs:]}
    settings = {"f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "ld_alpha": None} | options
    trainer = stub(loss_types=names, loss_weights=weights, precompute_ref_logps=True, use_weighting=False)
    trainer.__dict__.update(settings, args=SimpleNamespace(discopop_tau=0.05))
    squares = as_rows(log_sum_squares, data.cu_seqlens, order)
    loss = trl.DPOTrainer._compute_loss(trainer, model_of(rows, squares), inputs, False)
    return loss, {name: values[0] for name, values in trainer._metrics["eval"].items()}


def ours(data, names, weights, **options):
    reference = pair_sums(data.reference, data.cu_seqlens, options.get("ld_alpha"))
    result = dpo(data.logprobs, data.cu_seqlens, reference, loss_type=names, loss_weights=weights, beta=BETA, **options)
    return result.loss / result.pairs + result.nll / result.tokens, result


def assert_equal(data, left, right):
    torch.testing.assert_close(left, right, check_dtype=False, **TOLERANCE)
    gradients = [torch.autograd.grad(loss, data.logprobs, retain_graph=True)[0] for loss in (left, right)]
    torch.testing.assert_close(*gradients, **TOLERANCE)


def smoothing(name):
    """TRL's sigmoid and sigmoid_norm ignore label_smoothing."""
    return {"label_smoothing": SMOOTHING} if name in {"exo_pair", "robust", "aot", "aot_unpaired"} else {}


CASES = [({}, name) for name in sorted(LOSS_TYPES)]
CASES += [
    ({"f_divergence_type": kind}, name) for kind in ("forward_kl", "js_divergence") for name in ("sigmoid", "ipo")
]
CASES += [({"f_divergence_type": "alpha_divergence"}, name) for name in sorted(READ_A_DIFFERENCE)]
CASES += [({"ld_alpha": 0.3}, name) for name in ("sigmoid", "ipo", "aot", "sft")]


@pytest.mark.parametrize(("options", "name"), CASES)
def test_dpo(options, name):
    data = sequences(dtype=torch.float32)
    theirs, metrics = trl_dpo(data, torch.zeros(29), [name], [1.0], **options)
    loss, result = ours(data, [name], [1.0], **options, **smoothing(name))
    assert_equal(data, loss, theirs)
    compared = [shown for shown in metrics if shown.startswith(("rewards/", "logps/"))]
    assert len(compared) == 6
    for shown in compared:
        assert result.metrics[shown].item() / 4 == pytest.approx(metrics[shown], rel=1e-5, abs=1e-6), shown


def test_dpo_of_several_losses_weighted_by_wpo():
    data, squares = sequences(dtype=torch.float32), -torch.rand(29)
    names, weights = ["sigmoid", "bco_pair"], [0.8, 0.2]
    theirs, _ = trl_dpo(data, squares, names, weights, use_weighting=True)
    assert_equal(data, ours(data, names, weights, log_sum_squares=squares)[0], theirs)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.3, 0.9)])
@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_kto(kind, weights):
    data = sequences(dtype=torch.float32)
    order = list(range(8))
    rows, inputs = completions(data, order)
    desirable = torch.tensor([True, False, True, True, False, False, True, False])
    reference = segment_sums(data.reference, data.cu_seqlens)
    inputs |= {"label": desirable, "ref_logps": reference.float(), "ref_KL_logps": torch.zeros(8)}
    trainer = stub(loss_type=kind, calculate_KL=kind == "kto", precompute_ref_logps=True)
    trainer.__dict__.update(desirable_weight=weights[0], undesirable_weight=weights[1])
    trainer._compute_kl_logps = lambda *_: torch.full((8,), 0.2)
    theirs = trl.KTOTrainer._compute_loss(trainer, model_of(rows, torch.zeros_like(rows)), inputs, False)
    options = {"beta": BETA, "desirable_weight": weights[0], "undesirable_weight": weights[1]}
    z = 0.2 if kind == "kto" else 0.0
    result = kto(data.logprobs, data.cu_seqlens, reference, desirable, z, **options)
    assert_equal(data, result.loss / result.examples, theirs)
    shown = {name: values[0] for name, values in trainer._metrics["eval"].items()}
    for name in ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"):
        count = result.metrics[f"count/{name.split('/')[1]}"]
        assert (result.metrics[name] / count).item() == pytest.approx(shown[name], rel=1e-5), name


def test_orpo():
    data = sequences(dtype=torch.float32)
    means = segment_means(data.logprobs, data.cu_seqlens).float()
    ratios, *rewards, _, log_odds = ORPOTrainer.odds_ratio_loss(stub(), means[::2], means[1::2])
    result = orpo(data.logprobs, data.cu_seqlens, beta=BETA)
    assert_equal(data, result.loss, -ratios.sum())
    assert result.metrics["log_odds_chosen"].item() == pytest.approx(4 * log_odds.item(), rel=1e-5)
    assert result.metrics["rewards/chosen"].item() == pytest.approx(rewards[0].sum().item(), rel=1e-5)


def test_trl_has_no_value_where_ours_is_finite():
    """What docs/losses.md says of TRL: discopop and forward KL of a log-ratio of −200, two sure answers in ORPO."""
    data = sequences([1, 1], torch.float32)._replace(logprobs=torch.tensor([-200.0, 0, 0, 0, 0], requires_grad=True))
    for options, name in [({}, "discopop"), ({"f_divergence_type": "forward_kl"}, "sigmoid")]:
        assert not trl_dpo(data, torch.zeros(5), [name], [1.0], **options)[0].isfinite()
        assert ours(data, [name], [1.0], **options)[0].isfinite()
    assert ORPOTrainer.odds_ratio_loss(stub(), torch.zeros(1), torch.zeros(1))[0].isnan().all()
    assert orpo(torch.zeros(2), torch.tensor([0, 1, 2])).loss.isfinite()


@pytest.mark.parametrize(
    ("kind", "mine"),
    [
        ("sigmoid", lambda *data: cpo(*data, beta=BETA, label_smoothing=SMOOTHING)),
        ("hinge", lambda *data: cpo(*data, beta=BETA, loss_type="hinge")),
        ("ipo", lambda *data: cpo(*data, beta=BETA, loss_type="ipo")),
        ("simpo", lambda *data: simpo(*data, beta=BETA, gamma=0.5, label_smoothing=SMOOTHING)),
        ("alphapo", lambda *data: simpo(*data, beta=BETA, gamma=0.5, alpha=0.25, label_smoothing=SMOOTHING)),
    ],
)
def test_cpo_and_simpo(kind, mine):
    data = sequences(dtype=torch.float32)
    read = (segment_sums if kind in {"sigmoid", "hinge"} else segment_means)(data.logprobs, data.cu_seqlens).float()
    trainer = stub(loss_type="simpo" if kind == "alphapo" else kind, simpo_gamma=0.5)
    trainer.alpha = 0.25 if kind == "alphapo" else 0.0
    losses, chosen, _ = CPOTrainer.cpo_loss(trainer, read[::2], read[1::2])
    result = mine(data.logprobs, data.cu_seqlens)
    assert_equal(data, result.loss, losses.sum())
    assert result.metrics["rewards/chosen"].item() == pytest.approx(chosen.sum().item(), rel=1e-5)


@pytest.mark.parametrize("coefficient", [None, 0.01])
def test_reward(coefficient):
    rewards = torch.randn(8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    trainer = stub(args=SimpleNamespace(center_rewards_coefficient=coefficient))
    outputs = SimpleNamespace(logits=torch.cat([rewards[::2], rewards[1::2]])[:, None])
    margin = torch.tensor([0.1, 0.5, 0.0, 1.0])
    inputs = {"attention_mask": torch.ones(8, 2), "margin": margin}
    theirs = trl.RewardTrainer.compute_loss(trainer, lambda **_: outputs, inputs)
    result = reward(rewards, margin=margin, center_rewards_coefficient=coefficient)
    torch.testing.assert_close(result.loss / result.pairs, theirs, **TOLERANCE)
    shown = trainer._metrics["eval"]
    assert result.metrics["margin"].item() / 4 == pytest.approx(shown["margin"][0], rel=1e-5)
    assert result.metrics["mean_reward"].item() / 4 == pytest.approx(shown["mean_reward"][0], rel=1e-5)
    assert result.metrics["min_reward"].item() == pytest.approx(shown["min_reward"][0])
