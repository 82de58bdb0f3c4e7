"""Policy losses beside TRL's own code, their gradients, and what must not change them."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from ligermodels import losses
from ligermodels.errors import InputError

LENGTHS = [5, 1, 7, 3]
TOKENS = sum(LENGTHS)
CU_SEQLENS = torch.tensor([0, 5, 6, 13, 16], dtype=torch.int32)
ADVANTAGES = torch.tensor([1.3, -0.4, -1.1, 0.6], dtype=torch.float64)
LIMIT = 9  # greatest length of a completion
UNITS = {
    **dict.fromkeys(["grpo", "sapo", "luspo", "gmpo", "rloo"], len(LENGTHS)),
    **dict.fromkeys(["dapo", "bnpo", "cispo", "vespo"], TOKENS),
    "dr_grpo": len(LENGTHS) * LIMIT,
}
CLIPPED = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]


def vectors(spread=0.4):
    """ℓ, ℓ_old, ℓ_ref, ℓ_sampler and entropies: float64 [N], far enough apart that clips act."""
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(TOKENS, generator=generator, dtype=torch.float64) * 3 - 0.1
    noise = torch.randn(3, TOKENS, generator=generator, dtype=torch.float64) * spread
    entropy = torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    return (old + noise[0]).requires_grad_(), old, old + noise[1], old + noise[2] / 2, entropy


def padded(values, padding=0.0):
    return torch.nn.utils.rnn.pad_sequence(list(values.split(LENGTHS)), batch_first=True, padding_value=padding)


def trl_loss(loss_type, logprobs, old, *, entropy=None, sampling=None, weights=None, ref=None, **changes):
    """TRL's loss of a step of one micro-batch, by its own method."""
    module = pytest.importorskip("trl.trainer.grpo_trainer")
    trainer = module.GRPOTrainer
    if loss_type == "gmpo":
        trainer = pytest.importorskip("trl.experimental.gmpo.gmpo_trainer").GMPOTrainer
    mask = padded(torch.ones(TOKENS, dtype=torch.long))
    entropy = torch.ones(TOKENS) if entropy is None else entropy
    settings = {
        "delta": None,
        "use_bias_correction_kl": True,
        "steps_per_generation": 1,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "entropy_coef": 0.0,
        **changes,
    }
    accelerator = SimpleNamespace(
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, **options: x,
        num_processes=1,
        sync_gradients=True,
    )
    stub = SimpleNamespace(
        **settings,
        loss_type=loss_type,
        args=SimpleNamespace(**settings),
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=True,
        use_adaptive_entropy=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=LIMIT,
        _entropy_bonus_enabled=settings["entropy_coef"] != 0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *args, **options: (padded(logprobs), padded(entropy), None),
        get_off_policy_mask=trainer.get_off_policy_mask,
        get_gamma_weights=trainer.get_gamma_weights,
    )
    stub.get_high_entropy_mask = lambda *args: trainer.get_high_entropy_mask(stub, *args)
    inputs = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": ADVANTAGES,
        "num_items_in_batch": mask.sum(),
    }
    for name, value in {"old": old, "ref": ref, "sampling": sampling}.items():
        if value is not None:
            inputs[f"{name}_per_token_logps"] = padded(value)
    if weights is not None:
        inputs["importance_sampling_ratio"] = padded(weights, 1.0) if len(weights) == TOKENS else weights[:, None]
    loss = trainer._compute_loss(stub, None, inputs)
    return loss, {name: values[0] for name, values in stub._metrics["train"].items()}


def gradient(loss, logprobs):
    return torch.autograd.grad(loss, logprobs, retain_graph=True)[0]


def check(loss, expected, logprobs):
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient(loss, logprobs), gradient(expected, logprobs), rtol=1e-9, atol=1e-12)


def mean_loss(name, *args, **options):
    return getattr(losses, name)(*args, **options) / UNITS[name]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", [*CLIPPED, "cispo", "sapo"])
def test_a_loss_with_kl_equals_trl(name, level):
    logprobs, old, ref, *_ = vectors()
    bounds = {} if name in ("cispo", "sapo") else {"epsilon": 0.15, "epsilon_high": 0.3, "delta": 1.4}
    bounds = {"epsilon_high": 1.4} if name == "cispo" else bounds
    changes = {"epsilon_low" if key == "epsilon" else key: value for key, value in bounds.items()}
    for correction in (True, False):
        kl = {"importance_sampling_level": level, "use_bias_correction_kl": correction}
        penalty = 0.3 * losses.kl_penalty(logprobs, ref, old, CU_SEQLENS, **kl)
        options = {"importance_sampling_level": level, "token_penalty": penalty, **bounds}
        loss = mean_loss(name, logprobs, old, ADVANTAGES, CU_SEQLENS, **options)
        check(loss, trl_loss(name, logprobs, old, ref=ref, beta=0.3, **kl, **changes)[0], logprobs)


def test_a_single_update_needs_no_old_log_probabilities():
    logprobs, *_ = vectors()
    for name in (*CLIPPED, "cispo", "sapo", "vespo"):
        bounds = {"epsilon_high": 5.0} if name == "cispo" else {}
        level = {"importance_sampling_level": "sequence"} if name == "luspo" else {}
        loss = mean_loss(name, logprobs, None, ADVANTAGES, CU_SEQLENS)
        check(loss, trl_loss(name, logprobs, None, **bounds, **level)[0], logprobs)
        same = mean_loss(name, logprobs, logprobs.detach(), ADVANTAGES, CU_SEQLENS)
        assert torch.equal(gradient(loss, logprobs), gradient(same, logprobs))


@pytest.mark.parametrize("clip", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_samplers_correction_equals_trl(level, clip):
    logprobs, old, _, sampling, _ = vectors()
    sampling[2] = math.nan
    options = {"mode": f"{level}_{clip}", "clip_max": 1.2, "clip_min": 0.85}
    differences = padded((old - sampling).nan_to_num(nan=0.0))
    ratios = differences.exp() if level == "token" else differences.sum(1, keepdim=True).exp()
    inside = (ratios >= 0.85) & (ratios <= 1.2)
    assert inside.any() and not inside.all()
    ratios = ratios.clamp(0.85, 1.2) if clip == "truncate" else ratios * inside
    expected = torch.cat([row[:length] for row, length in zip(ratios.expand(4, 7), LENGTHS, strict=True)])
    weights = losses.sampler_weights(old, sampling, CU_SEQLENS, **options)
    torch.testing.assert_close(weights, expected.float())
    loss = mean_loss("dapo", logprobs, old, ADVANTAGES, CU_SEQLENS, token_weights=expected)
    trl_weights = expected if level == "token" else ratios[:, 0]
    check(loss, trl_loss("dapo", logprobs, old, weights=trl_weights)[0], logprobs)
    log_weights = losses.sampler_log_weights(old, sampling, CU_SEQLENS, **options)
    loss = mean_loss("vespo", logprobs, old, ADVANTAGES, CU_SEQLENS, sampler_log_weights=log_weights)
    check(loss, trl_loss("vespo", logprobs, old, weights=trl_weights)[0], logprobs)


@pytest.mark.parametrize("name", ["grpo", "dapo", "luspo"])
def test_masks_and_the_entropy_bonus_equal_trl(name):
    logprobs, old, ref, sampling, entropy = vectors()
    entropy.requires_grad_()
    mask = losses.top_entropy_mask(entropy, 0.55)
    off_policy = losses.off_policy_mask(logprobs, sampling, ADVANTAGES, CU_SEQLENS, 0.02)
    assert 0 < mask.sum() < TOKENS and off_policy.tolist() == [1] * 5 + [1] + [0] * 7 + [1] * 3
    options = {"token_weights": mask * off_policy, "importance_sampling_level": "token"}
    options["token_penalty"] = 0.1 * losses.kl_penalty(logprobs, ref, old, CU_SEQLENS)
    bonus = losses.entropy_sum(entropy, CU_SEQLENS, mask) / mask.sum()
    loss = mean_loss(name, logprobs, old, ADVANTAGES, CU_SEQLENS, **options) - 0.07 * bonus
    changes = {"top_entropy_quantile": 0.55, "off_policy_mask_threshold": 0.02, "entropy_coef": 0.07, "beta": 0.1}
    expected, _ = trl_loss(name, logprobs, old, ref=ref, sampling=sampling, entropy=entropy, **changes)
    torch.testing.assert_close(gradient(loss, entropy), gradient(expected, entropy))
    check(loss, expected, logprobs)


@pytest.mark.parametrize("quantile", [1.0, 0.5])
def test_gmpo_equals_trl(quantile):
    logprobs, old, ref, _, entropy = vectors()
    mask = losses.top_entropy_mask(entropy, quantile)
    penalty = 0.1 * losses.kl_penalty(logprobs, ref, old, CU_SEQLENS, use_bias_correction_kl=False)
    options = {"epsilon": 0.3, "epsilon_high": 0.4, "token_mask": mask if quantile < 1 else None}
    loss = mean_loss("gmpo", logprobs, old, ADVANTAGES, CU_SEQLENS, token_penalty=penalty, **options)
    changes = {"beta": 0.1, "epsilon_low": 0.3, "epsilon_high": 0.4, "top_entropy_quantile": quantile}
    check(loss, trl_loss("gmpo", logprobs, old, ref=ref, entropy=entropy, **changes)[0], logprobs)


def test_rloo_clips_the_ratio_of_the_whole_completion():
    logprobs, old, *_ = vectors()
    ratios = padded(logprobs - old).sum(1).exp()
    expected = -torch.minimum(ratios * ADVANTAGES, ratios.clamp(0.8, 1.3) * ADVANTAGES).mean()
    check(mean_loss("rloo", logprobs, old, ADVANTAGES, CU_SEQLENS, epsilon_high=0.3), expected, logprobs)
    sums = (padded(logprobs).sum(1) * -ADVANTAGES).mean()
    loss = mean_loss("rloo", logprobs, None, ADVANTAGES, CU_SEQLENS)
    torch.testing.assert_close(gradient(loss, logprobs), gradient(sums, logprobs))


def test_the_clipped_tokens_are_trls_clip_ratios():
    logprobs, old, *_ = vectors()
    low, high = losses.clipped_tokens(logprobs, old, ADVANTAGES, CU_SEQLENS, epsilon=0.15, epsilon_high=0.3)
    _, metrics = trl_loss("grpo", logprobs, old, epsilon_low=0.15, epsilon_high=0.3)
    ours = {
        "low_mean": low.sum() / TOKENS,
        "high_mean": high.sum() / TOKENS,
        "region_mean": (low + high).sum() / TOKENS,
        "low_min": losses.segment_means(low, CU_SEQLENS).min(),
        "high_max": losses.segment_means(high, CU_SEQLENS).max(),
    }
    assert metrics["clip_ratio/low_mean"] > 0 and metrics["clip_ratio/high_mean"] > 0
    assert {f"clip_ratio/{name}": value.item() for name, value in ours.items()} == pytest.approx(
        {name: value for name, value in metrics.items() if name.startswith("clip_ratio")}
    )


def test_at_equal_log_probabilities_ratios_are_one_and_the_kl_gradient_is_that_of_the_divergence():
    logprobs, _, ref, *_ = vectors()
    ones = losses.importance_ratios(logprobs, logprobs.detach(), CU_SEQLENS, "sequence")
    assert torch.equal(ones, torch.ones(TOKENS, dtype=torch.float64))
    kl = losses.kl_penalty(logprobs, ref, None, CU_SEQLENS)
    torch.testing.assert_close(gradient(kl.sum(), logprobs), (logprobs - ref).detach())
    k3 = losses.kl_penalty(logprobs, ref, None, CU_SEQLENS, use_bias_correction_kl=False)
    torch.testing.assert_close(gradient(k3.sum(), logprobs), 1 - (ref - logprobs.detach()).exp())


@pytest.mark.parametrize("name", UNITS)
def test_a_loss_adds_up_over_any_split_and_order_and_ignores_padding_and_empty_completions(name):
    logprobs, old, ref, *_ = vectors()
    logprobs, old, ref = (values.detach().float() for values in (logprobs, old, ref))
    loss_of = getattr(losses, name)

    def loss(order, padding=0):
        parts = [
            torch.cat([values.split(LENGTHS)[i] for i in order] + [-torch.ones(padding)])
            for values in (logprobs, old, ref)
        ]
        new = parts[0].requires_grad_()
        offsets = torch.tensor([0, *(LENGTHS[i] for i in order)]).cumsum(0).to(torch.int32)
        penalty = 0.2 * losses.kl_penalty(new, parts[2], parts[1], offsets)
        return loss_of(new, parts[1], ADVANTAGES[order].float(), offsets, token_penalty=penalty), new

    whole, new = loss([0, 1, 2, 3])
    assert whole.dtype == torch.float32 and whole.shape == ()
    torch.testing.assert_close(loss([2, 0, 3, 1])[0], whole)
    torch.testing.assert_close(loss([1, 3])[0] + loss([2, 0])[0], whole)
    with_padding, longer = loss([0, 1, 2, 3], padding=3)
    assert with_padding == whole
    expected = [*gradient(whole, new).tolist(), 0, 0, 0]
    assert gradient(with_padding, longer).tolist() == expected
    empty = torch.tensor([0, 5, 6, 6, 13, 16], dtype=torch.int32)
    advantages = torch.tensor([1.3, -0.4, 9.0, -1.1, 0.6])
    without_penalty = loss_of(logprobs, old, torch.cat([advantages[:2], advantages[3:]]), CU_SEQLENS)
    assert loss_of(logprobs, old, advantages, empty) == without_penalty


@pytest.mark.parametrize("name", UNITS)
def test_extreme_log_probabilities_leave_loss_and_gradient_finite(name):
    logprobs = torch.tensor([-1e4, -1e-9, -3.0, -1e4, 0.0, -2.0], requires_grad=True)
    old = torch.tensor([-1e-9, -1e4, -3.0, -5e3, -1e4, -2.0])
    advantages, offsets = torch.tensor([1.0, 0.0, -1.0]), torch.tensor([0, 2, 3, 6])
    penalty = losses.kl_penalty(logprobs, old, old, offsets)
    loss = getattr(losses, name)(logprobs, old, advantages, offsets, token_penalty=penalty)
    assert loss.isfinite() and gradient(loss, logprobs).isfinite().all()
    nothing = torch.zeros(0, requires_grad=True)
    loss = getattr(losses, name)(nothing, None, torch.zeros(0), torch.zeros(1, dtype=torch.int32))
    assert loss == 0 and gradient(loss, nothing).shape == (0,)


@pytest.mark.parametrize("name", ["grpo", "dapo", "sapo", "gmpo", "rloo"])
def test_gradients_agree_with_finite_differences(name):
    _, old, ref, *_ = vectors()
    logprobs = (old + 0.03 * torch.linspace(-1, 1, TOKENS, dtype=torch.float64)).requires_grad_()
    level = {} if name in ("gmpo", "rloo") else {"importance_sampling_level": "sequence"}

    def loss(values):
        penalty = 0.2 * losses.kl_penalty(values, ref, old, CU_SEQLENS, **level)
        return getattr(losses, name)(values, old, ADVANTAGES, CU_SEQLENS, token_penalty=penalty, **level)

    assert torch.autograd.gradcheck(loss, logprobs)


def test_a_token_that_the_sampler_calls_impossible_does_not_overflow():
    old, sampling = torch.tensor([-1.0, -2.0, -1e4]), torch.tensor([-math.inf, -2.0, -1.0])
    weights = losses.sampler_weights(old, sampling, torch.tensor([0, 1, 2, 3]), mode="token_truncate", clip_max=None)
    torch.testing.assert_close(weights, torch.tensor([20.0, 0.0, -20.0]).exp())
    assert losses.sampler_weights(old, sampling, torch.tensor([0, 2, 3])).tolist() == pytest.approx([0, 0, 0], abs=1e-8)


def test_the_entropy_coefficient_rises_where_the_entropy_is_low():
    assert losses.next_entropy_coef(0.1, 0.2) == pytest.approx(0.105)
    assert losses.next_entropy_coef(0.1, 0.3) == pytest.approx(0.095)
    assert losses.next_entropy_coef(0.001, 0.3) == 0
    assert losses.next_entropy_coef(0.999, 0.1) == 1


def test_arguments_that_cannot_be_meant_are_refused():
    logprobs, old, _, sampling, entropy = vectors()
    vector = (logprobs, old, ADVANTAGES, CU_SEQLENS)
    with pytest.raises(InputError, match=r'^importance_sampling_level is "tokens"; it must be token or sequence$'):
        losses.grpo(*vector, importance_sampling_level="tokens")
    with pytest.raises(InputError, match=r"^delta is 1.2; it must be above 1 \+ epsilon_high, 1.28"):
        losses.dapo(*vector, delta=1.2, epsilon_high=0.28)
    with pytest.raises(InputError, match=r"^epsilon_high is -0.1; it must be above 0$"):
        losses.gmpo(*vector, epsilon_high=-0.1)
    with pytest.raises(InputError, match=r"^sapo_temperature_neg is 0; it must be above 0$"):
        losses.sapo(*vector, sapo_temperature_neg=0)
    with pytest.raises(
        InputError, match=r"^advantages is float64 \[3\]; it must have one value for each of 4 sequences$"
    ):
        losses.vespo(logprobs, old, ADVANTAGES[:3], CU_SEQLENS)
    with pytest.raises(
        InputError, match=r'^mode is "mask"; it must be one of token_truncate, token_mask, sequence_truncate'
    ):
        losses.sampler_weights(old, sampling, CU_SEQLENS, mode="mask")
    with pytest.raises(InputError, match=r"^logprobs is float64 \[2, 8\]; it must be a vector"):
        losses.grpo(logprobs.view(2, 8), None, ADVANTAGES, CU_SEQLENS)
    with pytest.raises(InputError, match=r"^old_logprobs is "):
        losses.rloo(logprobs, old[:1], ADVANTAGES, CU_SEQLENS)
    with pytest.raises(InputError, match=r"^token_weights is "):
        losses.vespo(*vector, token_weights=ADVANTAGES)
    with pytest.raises(InputError, match=r"^token_penalty is "):
        losses.sapo(*vector, token_penalty=old[0])
    with pytest.raises(InputError, match=r"^ref_logprobs is "):
        losses.kl_penalty(logprobs, old[:1], old, CU_SEQLENS)
    with pytest.raises(InputError, match=r"^top_entropy_quantile is 20; it must be a share, from 0 to 1$"):
        losses.top_entropy_mask(entropy, 20)
