"""DPO, ORPO, CPO, SimPO and reward models: losses of pairs, over the pairs of a step; `ligermodels.losses` has the
formulas."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ligermodels import losses
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.kernels.losses.linear_logprobs import LogProbs
from ligermodels.layers.context_parallel import ContextGroup
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.reward_model import RewardModel
from ligermodels.losses.preference import SORTED
from ligermodels.losses.segments import segment_sums
from ligermodels.memory.blocks import HeadOp
from ligermodels.training.data.preferences import PreferenceBatch
from ligermodels.training.data.preferences.steps import Groups
from ligermodels.training.objectives.objective import Share, Work
from ligermodels.training.objectives.preference.groups import (
    GroupObjective,
    PolicyOutput,
    balance_share,
    given,
    logit_sums,
    mean_logits,
    one_of,
    token_sums,
)
from ligermodels.training.objectives.preference.references import ReferenceObjective
from ligermodels.training.settings.config import RunConfig, TrainConfig

NO_PAIR = torch.zeros(2), torch.tensor([0, 1, 2], dtype=torch.int32)  # log-probabilities and offsets, to try a loss on
FIRST_STEPS = range(2, 7)  # steps with sides that differ by more than content; at step 1 a reference equals the policy
FALL = 10.0  # nats that the chosen side's log-probability has fallen by, where it is worth a word
REWARD_MEANS = ("accuracy", "margin", "mean_reward")


class PairObjective(GroupObjective):
    """A loss of pairs. `counts` of a step: pairs, tokens of the chosen sides."""

    kind = "pairs"

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        self.watch = PairWatch()
        self.options = self.read_options()
        self.try_options()

    @abstractmethod
    def read_options(self) -> dict[str, Any]:
        """The keyword arguments of the loss. It has defaults for those that are not given."""

    def try_options(self) -> None:
        """Raises InputError where the loss refuses its options."""
        self.pair_loss(*NO_PAIR, **self.options)

    pair_loss: Callable[..., losses.PairLoss]

    def count(self, batch: PreferenceBatch) -> Tensor:
        lengths = batch.completions.diff().view(-1, 2)
        return torch.stack([(lengths.amin(1) > 0).sum(), lengths[:, 0].sum()])

    @property
    def reads_pairs_alone(self) -> bool:
        """Whether the loss of a pair reads its own log-probabilities alone, so that the head can form its gradients."""
        return True

    @property
    def head_op(self) -> HeadOp:
        if self.world.context > 1 or not self.reads_pairs_alone:  # a pair may be on several ranks
            return super().head_op
        return HeadOp("linear_logprobs_loss", self.data.training.groups.longest_group)

    def loss(self, model: CausalLM, batch: PreferenceBatch, work: Work) -> Share:
        reference = self.reference_sums(model, batch)  # before the policy's pass: it may exchange weights
        loss: dict[str, Any] = {}
        if self.reads_pairs_alone:
            loss = {"row_loss": partial(self.loss_of_rows, batch, reference, work.counts), "borders": batch.borders(2)}
        in_chunks, found, balance = self.policy(model, batch, **loss)
        result = self.pair_loss(found.logprobs, batch.completions, **reference, **self.options_with(found))
        of_pairs = per_unit(result, work.counts, found.logprobs) if in_chunks is None else in_chunks
        sums = {"pairs": result.pairs, "tokens": result.tokens, **result.metrics, **token_sums(found)}
        chosen = torch.arange(len(batch.completions) - 1, device=batch.completions.device) % 2 == 0
        sums |= logit_sums(found, batch.completions, chosen)
        assert found.greedy is not None  # `policy` asked for it
        sums["mean_token_accuracy"] = segment_sums(found.greedy.float(), batch.completions)[chosen].sum()
        return one_of(self.world.context, Share(of_pairs + balance_share(balance, batch, work), sums))

    def loss_of_rows(
        self, batch: PreferenceBatch, reference: Mapping[str, Tensor], counts: Tensor, logprobs: Tensor, _: Any,
        rows: slice,
    ) -> Tensor:  # fmt: skip
        """The share of the pairs that have `rows` in the loss of the step."""
        inside, offsets = batch.completions_in(rows, 2)
        of_pairs = {name: values[inside] for name, values in reference.items()}
        return per_unit(self.pair_loss(logprobs, offsets, **of_pairs, **self.options), counts, logprobs)

    def reference_sums(self, model: CausalLM, batch: PreferenceBatch) -> dict[str, Tensor]:
        """What the loss reads of a reference; empty where it has none."""
        return {}

    def options_with(self, found: LogProbs) -> dict[str, Any]:
        """The keyword arguments of the loss for a row."""
        return self.options

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float], step: int) -> dict[str, float]:
        over = {"nll_loss": "tokens", "entropy": "supervised", "mean_token_accuracy": "tokens"}
        counts = {name: max(1.0, sums[name]) for name in ("pairs", "tokens", "supervised")}
        own = {name: value for name, value in sums.items() if name not in counts and not name.startswith("logit")}
        return {name: value / counts[over.get(name, "pairs")] for name, value in own.items()} | mean_logits(sums)

    def warnings(self, values: Mapping[str, float], step: int) -> list[str]:
        return self.watch.warnings(values, step)


class DPO(ReferenceObjective, PairObjective):
    """Direct preference optimisation and its relatives: losses of the log-ratios with a reference."""

    learning_rate = 5e-6
    pair_loss = staticmethod(losses.dpo)

    @property
    def ld_alpha(self) -> float | None:
        return self.config.ld_alpha

    def read_options(self) -> dict[str, Any]:
        config = self.config
        names, weights = parse_losses(config.loss or ("sigmoid",))
        divergence, alpha = parse_f_divergence(config.f_divergence)
        return {"loss_type": names, "loss_weights": weights} | given(
            beta=config.beta, label_smoothing=config.label_smoothing, f_divergence_type=divergence,
            f_alpha_divergence_coef=alpha, discopop_tau=config.discopop_tau, ld_alpha=config.ld_alpha,
        )  # fmt: skip

    def try_options(self) -> None:
        trust = {"log_sum_squares": torch.zeros(2)} if self.config.wpo else {}
        if self.config.discopop_tau is not None and "discopop" not in self.options["loss_type"]:
            raise InputError("--discopop-tau goes with --loss discopop, which is missing")
        self.pair_loss(*NO_PAIR, torch.zeros(2), **{**self.options, **trust})
        if self.sorts and self.world.data_size > 1:
            raise InputError(
                f"--loss {self.sorts}: sorts the pairs of a step, which must be on one rank, but there are "
                f"{self.world.data_size}: start one process"
            )

    @property
    def sorts(self) -> str | None:
        """The name of a loss that sorts the pairs of a step; None without one."""
        return min(SORTED & set(self.options["loss_type"]), default=None)

    def complete(self, config: RunConfig) -> None:
        super().complete(config)
        if self.sorts:
            self.refuse_several_rows()

    def refuse_several_rows(self) -> None:
        """Raises InputError where a step of the run, or of its validation, is more than one row."""
        length, units, steps = self.config.sequence_length, self.config.units, self.config.steps
        training, held_out = self.data.training, self.data.validation.groups
        taken = [training.numbers(step * units, units) for step in range(steps)]
        validated = [range(first, min(first + units, len(held_out))) for first in range(0, len(held_out), units)]
        most = max(most_tokens(training.groups, taken), most_tokens(held_out, validated))
        if units > 1 and most > length:
            raise InputError(
                f"--loss {self.sorts}: sorts the pairs of a step, which must be in one row, but a step has up to "
                f"{most:,} tokens: give --sequence-length {most} instead of {length}, or lower --pairs {units}"
            )

    @property
    def reads_pairs_alone(self) -> bool:
        return not self.sorts and not self.config.wpo

    def policy(self, model: CausalLM, batch: PreferenceBatch, extras: Sequence[str] = (), **loss: Any) -> PolicyOutput:
        return super().policy(model, batch, [*extras, *(["log_sum_squares"] if self.config.wpo else [])], **loss)

    def reference_sums(self, model: CausalLM, batch: PreferenceBatch) -> dict[str, Tensor]:
        return {"ref_sums": self.reference.sums(model, batch, self.ld_alpha)}

    def options_with(self, found: LogProbs) -> dict[str, Any]:
        return self.options | {"log_sum_squares": found.log_sum_squares}


class ORPO(PairObjective):
    """Odds-ratio preference optimisation: the likelihood of the chosen side, and its odds against the rejected one."""

    learning_rate = 1e-5
    pair_loss = staticmethod(losses.orpo)

    def read_options(self) -> dict[str, Any]:
        return given(beta=self.config.beta)


class CPO(PairObjective):
    """Contrastive preference optimisation: DPO with a uniform reference, and the likelihood of the chosen side."""

    learning_rate = 1e-5
    pair_loss = staticmethod(losses.cpo)

    def read_options(self) -> dict[str, Any]:
        config = self.config
        names, weights = parse_losses(config.loss or ("sigmoid",))
        if len(names) > 1 or weights != [1.0]:
            raise InputError(f"--loss {' '.join(config.loss or ())}: --objective cpo has one loss without a weight")
        return {"loss_type": names[0]} | given(
            beta=config.beta, label_smoothing=config.label_smoothing, nll_weight=config.nll_weight
        )


class SimPO(PairObjective):
    """Simple preference optimisation: mean log-probabilities and a margin, without a reference."""

    learning_rate = 5e-6
    pair_loss = staticmethod(losses.simpo)

    def read_options(self) -> dict[str, Any]:
        config = self.config
        return given(
            beta=config.beta, gamma=config.gamma, alpha=config.alpha, label_smoothing=config.label_smoothing,
            nll_weight=config.nll_weight,
        )  # fmt: skip


def per_unit(result: losses.PairLoss, counts: Tensor, logprobs: Tensor) -> Tensor:
    """The loss of pairs divided by the counts of the step. It has a graph even where there is no pair."""
    pairs, chosen = counts.unbind()
    return result.loss / pairs + result.nll / chosen + 0.0 * logprobs.sum()


def most_tokens(groups: Groups, steps: Iterable[Sequence[int]]) -> int:
    """The most tokens that the groups of one step have in a row. steps has the numbers of their groups."""
    tokens = groups.laid_out[0]
    return max(int(tokens[step].sum()) for step in steps)


def parse_losses(words: Sequence[str]) -> tuple[list[str], list[float]]:
    """Reads names and weights from `NAME` and `NAME=WEIGHT`; a weight is 1 where there is none. Raises InputError."""
    names, weights = [], []
    for word in words:
        name, equals, weight = word.partition("=")
        if name in names:
            raise InputError(f"--loss {' '.join(words)}: names {name} twice; leave one out")
        names.append(name)
        weights.append(number_in(f"--loss {word}", weight, f"a weight, as {name}=0.2") if equals else 1.0)
    return names, weights


def parse_f_divergence(text: str | None) -> tuple[str | None, float | None]:
    """Reads (name, alpha) from `NAME` or `alpha_divergence:ALPHA`. Raises InputError."""
    name, colon, alpha = (text or "").partition(":")
    if colon and name != "alpha_divergence":
        raise InputError(f"--f-divergence {text}: only alpha_divergence has a number")
    return name or None, number_in(f"--f-divergence {text}", alpha, "a number, as :0.5") if colon else None


def number_in(flag: str, text: str, rule: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{flag}: must have {rule}")
    return number


class PairWatch:
    """Looks at the metrics of each step for labels that leak and sides that both fall, and says each thing once."""

    def __init__(self) -> None:
        self.first: Mapping[str, float] | None = None
        self.sure = 0  # of the first steps, with every pair on the right side
        self.said: set[str] = set()
        self.pending: list[str] = []

    def warnings(self, values: Mapping[str, float], step: int) -> list[str]:
        """What there is to say after a step of the run, from 1, with these metrics, under TRL's names."""
        self.first = self.first or values
        self.sure += step in FIRST_STEPS and values["rewards/accuracies"] == 1.0
        if self.sure == len(FIRST_STEPS):
            self.say(
                "leak",
                f"accuracy 1.0 in each of the steps {FIRST_STEPS[0]} to {FIRST_STEPS[-1]}: does the data tell the "
                "sides apart by their length or their end?",
            )
        chosen, rejected = (self.first[f"logps/{side}"] - values[f"logps/{side}"] for side in ("chosen", "rejected"))
        if chosen > FALL and chosen > rejected:
            self.say(
                "fall",
                f"the chosen answers have lost {chosen:.0f} nats, more than the rejected: raise --beta, or add a "
                "likelihood of the chosen (--loss sigmoid sft=0.2, --nll-weight)",
            )
        lines, self.pending = self.pending, []
        return lines

    def say(self, name: str, line: str) -> None:
        if name not in self.said:
            self.said.add(name)
            self.pending.append(line)


class Reward(GroupObjective):
    """The loss is the sum over the pairs of a step / their number; see `losses.reward`. Metrics have TRL's names."""

    kind = "pairs"
    learning_rate = 1e-5

    def count(self, batch: PreferenceBatch) -> Tensor:
        return batch.last_tokens.new_full((1,), len(batch.last_tokens) // 2)

    def loss(self, model: CausalLM, batch: PreferenceBatch, work: Work) -> Share:
        scores = rewards_of(cast(RewardModel, model), batch, self.run.context)
        found = losses.reward(scores, margin=batch.margins, center_rewards_coefficient=self.config.center_rewards)
        sums = {"pairs": found.pairs} | {name: found.metrics[name] for name in REWARD_MEANS}
        maxima = {"max_reward": found.metrics["max_reward"], "min_reward": -found.metrics["min_reward"]}
        return one_of(self.world.context, Share(found.loss / work.counts[0], sums, maxima))

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float], step: int) -> dict[str, float]:
        means = {name: sums[name] / max(1.0, sums["pairs"]) for name in REWARD_MEANS}
        return means | {"min_reward": -maxima["min_reward"], "max_reward": maxima["max_reward"]}


def rewards_of(model: RewardModel, batch: PreferenceBatch, context: ContextGroup | None = None) -> Tensor:
    """Computes the score of each completion, fp32 [S], at the token that `RewardModel.forward` reads by itself.

    context: the ranks that share the row, if any. That is not the last one where the model's padding is the end token.
    """
    inputs = {name: value for name, value in batch.model_inputs.items() if name not in ("labels", "rows")}
    places, padding = batch.last_tokens, model.config.pad_token_id
    if padding is not None:
        places = places - (batch.input_ids[0, places] == padding).long()
    return model(**inputs, rows=places, context=context).logits[:, 0]
