"""Reward models: the Bradley-Terry loss of pairs, over the score of each side's last token."""

from collections.abc import Mapping
from typing import cast

from torch import Tensor

from ligermodels import losses
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.reward_model import RewardModel
from ligermodels.training.data.preferences import PreferenceBatch
from ligermodels.training.objectives.objective import Share, Work
from ligermodels.training.objectives.preference.groups import GroupObjective

MEANS = ("accuracy", "margin", "mean_reward")


class Reward(GroupObjective):
    """The loss is the sum over the pairs of a step / their number; see `losses.reward`. Metrics have TRL's names."""

    kind = "pairs"
    learning_rate = 1e-5

    def count(self, batch: PreferenceBatch) -> Tensor:
        return batch.last_tokens.new_full((1,), len(batch.last_tokens) // 2)

    def loss(self, model: CausalLM, batch: PreferenceBatch, work: Work) -> Share:
        scores = rewards_of(cast(RewardModel, model), batch)
        found = losses.reward(scores, margin=batch.margins, center_rewards_coefficient=self.config.center_rewards)
        sums = {"pairs": found.pairs} | {name: found.metrics[name] for name in MEANS}
        maxima = {"max_reward": found.metrics["max_reward"], "min_reward": -found.metrics["min_reward"]}
        return Share(found.loss / work.counts[0], sums, maxima)

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float], step: int) -> dict[str, float]:
        means = {name: sums[name] / max(1.0, sums["pairs"]) for name in MEANS}
        return means | {"min_reward": -maxima["min_reward"], "max_reward": maxima["max_reward"]}


def rewards_of(model: RewardModel, batch: PreferenceBatch) -> Tensor:
    """Computes the score of each completion, fp32 [S], at the token that `RewardModel.forward` reads by itself.

    That is not the last one where the model's padding is the end token.
    """
    inputs = {name: value for name, value in batch.model_inputs.items() if name not in ("labels", "rows")}
    places, padding = batch.last_tokens, model.config.pad_token_id
    if padding is not None:
        places = places - (batch.input_ids[0, places] == padding).long()
    return model(**inputs, rows=places).logits[:, 0]
