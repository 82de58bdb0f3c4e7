"""The tests of post-training detect the usual mistakes: each listed break makes the named check fail.

The same checks pass for the unbroken code, where their own files run them.
"""

import pytest
import torch

from tests.losses import test_advantages, test_divergences, test_judged, test_policy, test_preference
from tests.losses import test_reference_free as reference_free
from tests.sabotage import Sabotage
from tests.training.data.preferences import test_layout
from tests.training.objectives.grpo.test_grpo_steps import check_old_log_probabilities, check_step, made  # noqa: F401
from tests.training.objectives.preference.test_references import check_reference_without_dropout, dropping  # noqa: F401

LOSSES = "ligermodels.losses"
LAY_OUT = "ligermodels.training.data.preferences.layout:lay_out"
CHECKS = {
    "sum over pairs": lambda: test_preference.test_the_sum_over_pairs_is_the_formula("sigmoid"),
    "mean over tokens": lambda: test_preference.test_the_sum_over_pairs_is_the_formula("ipo"),
    "simpo": lambda: reference_free.test_the_sums_are_the_formula("simpo"),
    "kto": test_judged.test_kto_is_its_formula,
    "advantages": test_advantages.test_advantages_are_deviations_from_the_mean_of_the_group,
    "policy": lambda: test_policy.test_a_loss_with_kl_equals_trl("grpo", "token"),
    "single update": test_policy.test_a_single_update_needs_no_old_log_probabilities,
    "penalty": test_policy.test_at_equal_log_probabilities_ratios_are_one_and_the_kl_gradient_is_that_of_the_divergence,
    "forward KL": lambda: test_divergences.test_values_and_gradients_are_those_of_the_formulas("forward_kl", 1.0),
    "temperature": lambda: test_divergences.test_values_and_gradients_are_those_of_the_formulas("forward_kl", 2.5),
    "rows": lambda: test_layout.test_the_rows_of_the_head_predict_the_completions(True),
}
BREAKS = {
    "swapped sides": Sabotage(f"{LOSSES}.preference:Pairs.x", "self.beta *", "-self.beta *", "sum over pairs"),
    "swapped sides without a reference": Sabotage(
        f"{LOSSES}.pairs:margins", "sides[:, 0] - sides[:, 1]", "sides[:, 1] - sides[:, 0]", "simpo"
    ),
    "sum for mean": Sabotage(
        f"{LOSSES}.preference:Pairs.mean_delta", "self.lengths.clamp(min=1)", "1", "mean over tokens"
    ),
    "std with n": Sabotage(f"{LOSSES}.advantages:_std", "keepdim=True) - 1", "keepdim=True)", "advantages"),
    "clip on the wrong sign": Sabotage(f"{LOSSES}.policy:_clipped", "torch.minimum", "torch.maximum", "policy"),
    "clip bounds exchanged": Sabotage(
        f"{LOSSES}.policy:_clipped", "1 - epsilon, high", "2 - high, 1 + epsilon", "policy"
    ),
    "old of this step": Sabotage(
        f"{LOSSES}.policy_weights:log_ratios", "logprobs - old_logprobs.detach()", "logprobs - logprobs.detach()",
        "policy",
    ),
    "old with a gradient": Sabotage(
        f"{LOSSES}.policy_weights:log_ratios", "logprobs - logprobs.detach()", "logprobs - logprobs", "single update"
    ),
    "KL penalty reversed": Sabotage(
        f"{LOSSES}.policy_weights:kl_penalty", "ref_logprobs.detach() - logprobs", "logprobs - ref_logprobs.detach()",
        "penalty",
    ),
    "KL reversed": Sabotage(f"{LOSSES}.divergences:divergence", '"forward_kl":\n        return _kl(log_q, log_p)',
        '"forward_kl":\n        return _kl(log_p, log_q)', "forward KL"),
    "missing temperature of the teacher": Sabotage(
        f"{LOSSES}.divergences:divergence", "_widen(teacher_logits).detach() / temperature",
        "_widen(teacher_logits).detach()", "temperature",
    ),
    "mask off by one": Sabotage(LAY_OUT, "rows.append(places - 1)", "rows.append(places)", "rows"),
    "prompt supervised": Sabotage(
        LAY_OUT, "places = places if document.supervised is None",
        "places = np.append(places[0] - 1, places) if document.supervised is None", "rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_detected(name, monkeypatch):
    BREAKS[name].apply(monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[BREAKS[name].case]()


GRPO = "ligermodels.training.objectives.grpo.grpo:GRPO"
STEPS = {"step": check_step, "old log-probabilities": check_old_log_probabilities}
BREAKS_OF_STEPS = {
    "missing temperature of the loss": Sabotage(
        f"{GRPO}.loss", '"temperature": self.temperature', '"temperature": 1.0', "step"
    ),
    "missing temperature before the update": Sabotage(
        f"{GRPO}.logprobs", "temperature=self.temperature", "temperature=1.0", "old log-probabilities"
    ),
    "old of the generation before": Sabotage(
        f"{GRPO}.with_scores", "old_logprobs=scores.logprobs if", "old_logprobs=self.stale if", "old log-probabilities"
    ),
    "old of every update": Sabotage(
        f"{GRPO}.work", "number = self",
        "self.rollouts = self.with_scores(self.rollouts, self.score(model, self.rollouts)); number = self",
        "old log-probabilities",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def step(made):  # noqa: F811
    """An objective behind a generation, and its model."""
    objective, model = made()
    return objective, model, objective.rollouts, {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", BREAKS_OF_STEPS)
def test_a_break_of_a_step_is_detected(name, step, monkeypatch):
    objective, model, objective.rollouts, weights = step
    model.load_state_dict(weights, strict=False)
    objective.stale = torch.full_like(objective.rollouts.old_logprobs, -6.0)
    BREAKS_OF_STEPS[name].apply(monkeypatch)
    with pytest.raises(AssertionError):
        STEPS[BREAKS_OF_STEPS[name].case](objective, model)


def test_a_reference_with_dropout_is_detected(dropping, monkeypatch):  # noqa: F811
    breaks = Sabotage(
        "ligermodels.training.objectives.preference.references:row_logprobs", "model.eval()", "pass", "reference"
    )
    breaks.apply(monkeypatch)
    with pytest.raises(AssertionError):
        check_reference_without_dropout(*dropping)
