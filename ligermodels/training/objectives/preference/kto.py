"""KTO and APO-zero of single answers that were judged good or bad. The formulas are in `ligermodels.losses`."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ligermodels import distributed, losses
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.layers.decoder import CausalLM
from ligermodels.memory.blocks import HeadOp
from ligermodels.training.data.preferences import PreferenceBatch, Step
from ligermodels.training.objectives.objective import Share, Work
from ligermodels.training.objectives.preference.groups import (
    balance_share,
    given,
    logit_sums,
    mean_logits,
    one_of,
    token_sums,
)
from ligermodels.training.objectives.preference.references import ReferenceObjective, default_reference, row_logprobs
from ligermodels.training.settings.config import TrainConfig

KTO_LOSSES = ("kto", "apo_zero_unpaired")
BALANCED = 1.0, 4 / 3  # of the weights of good over bad examples: KTO's paper, eq. 8
NO_EXAMPLE = torch.zeros(1), torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1), torch.tensor([True]), 0.0


class KTO(ReferenceObjective):
    """Kahneman-Tversky optimisation. `counts` of a step: examples, z.

    z, the estimate of the divergence from the reference, is of the whole step: two passes without a gradient over its
    prompts with other examples' completions. With the loss apo_zero_unpaired it is 0.
    """

    kind = "judged"
    learning_rate = 5e-6
    min_steps_per_epoch = 80  # examples teach less than pairs: with 40 the margin is a third as large

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.name = "kto" if config.loss is None else " ".join(config.loss)
        if self.name not in KTO_LOSSES:
            raise InputError(f"--loss {self.name}: of --objective kto must be one of {', '.join(KTO_LOSSES)}")
        super().__init__(config, world)
        if self.spec.kind == "precomputed" and self.name == "kto":
            raise InputError(
                "--reference precomputed: KTO compares prompts with other examples' completions, which differ in every "
                "step; take --reference model, or --loss apo_zero_unpaired"
            )
        self.options = given(
            beta=config.beta, desirable_weight=config.desirable_weight, undesirable_weight=config.undesirable_weight
        )
        losses.kto(*NO_EXAMPLE, **self.options)

    @property
    def passes_beside(self) -> float:
        return super().passes_beside + (2 if self.name == "kto" else 0)  # z takes two

    @property
    def head_op(self) -> HeadOp:
        longest = self.data.training.groups.longest_group
        return HeadOp("linear_logprobs_loss", longest) if self.world.context == 1 else super().head_op

    def default_reference(self) -> str:
        found = default_reference(self.config)
        return "model" if found == "precomputed" and self.name == "kto" else found

    def advice(self) -> list[str]:
        good, bad = self.data.training.labels
        if not good or not bad:
            return [f"all examples are {'good' if good else 'bad'}: KTO learns from both kinds"]
        desirable, undesirable = (self.options.get(f"{kind}_weight", 1.0) for kind in ("desirable", "undesirable"))
        ratio = good * desirable / max(bad * undesirable, 1e-9)
        if BALANCED[0] <= ratio <= BALANCED[1]:
            return []
        flag, value = "--undesirable-weight", undesirable * ratio / BALANCED[1]
        if ratio < BALANCED[0]:
            flag, value = "--desirable-weight", desirable * BALANCED[0] / max(ratio, 1e-9)
        weighed = f"{good:,} good and {bad:,} bad examples weigh {ratio:.2f} to 1"
        enough = math.ceil(100 * value) / 100
        return [f"{weighed}; the paper takes 1 to 1.33: {flag} {enough:.2f}"]

    def count(self, batch: PreferenceBatch) -> Tensor:
        return (batch.completions.diff() > 0).sum()[None]

    def assemble(self, model: CausalLM, step: Step, mismatched: Callable[[], Step]) -> Work:
        work = super().assemble(model, step, mismatched)
        z = self.z(model, mismatched()) if self.name == "kto" else work.counts.new_zeros(())
        return work._replace(counts=torch.cat([work.counts, z.to(work.counts.dtype)[None]]))

    @torch.no_grad()
    def z(self, model: CausalLM, step: Step) -> Tensor:
        """The estimate of the divergence over all ranks, a scalar."""
        sums = []
        for batch in step.batches:
            batch = batch.to(self.world.device)
            reference = self.reference.sums(model, batch, None)
            logprobs = row_logprobs(model, batch, context=self.run.context)
            sums.append(torch.stack(losses.kto_kl_sum(logprobs, batch.completions, reference)))
        return losses.kto_z(*distributed.total(torch.stack(sums).sum(0)).unbind())

    def loss(self, model: CausalLM, batch: PreferenceBatch, work: Work) -> Share:
        reference = self.reference.sums(model, batch, None)  # before the policy's pass: it may exchange weights
        row_loss = partial(self.loss_of_rows, batch, reference, work.counts)
        loss, found, balance = self.policy(model, batch, row_loss=row_loss, borders=batch.borders(1))
        assert loss is not None and batch.desirable is not None
        z = work.counts[1]
        result = losses.kto(found.logprobs, batch.completions, reference, batch.desirable, z, **self.options)
        sums = {"examples": result.examples, "kl": z * result.examples, **result.metrics, **token_sums(found)}
        sums |= logit_sums(found, batch.completions, batch.desirable)
        return one_of(self.world.context, Share(loss + balance_share(balance, batch, work), sums))

    def loss_of_rows(
        self, batch: PreferenceBatch, reference: Tensor, counts: Tensor, logprobs: Tensor, _: Any, rows: slice
    ) -> Tensor:
        """The share of the examples that have `rows` in the loss of the step."""
        examples, z = counts.unbind()
        inside, offsets = batch.completions_in(rows, 1)
        assert batch.desirable is not None  # of judged completions
        desirable = batch.desirable[inside]
        result = losses.kto(logprobs, offsets, reference[inside], desirable, z, **self.options)
        return result.loss / examples + 0.0 * logprobs.sum()

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float], step: int) -> dict[str, float]:
        found = {"kl": sums["kl"] / max(1.0, sums["examples"]), **mean_logits(sums)}
        for name in ("entropy", "mean_token_accuracy"):
            found[name] = sums[name] / max(1.0, sums["supervised"])
        for side in ("chosen", "rejected"):
            count = found[f"count/{side}"] = sums[f"count/{side}"]
            found |= {f"{name}/{side}": sums[f"{name}/{side}"] / count for name in ("rewards", "logps") if count}
        if {"rewards/chosen", "rewards/rejected"} <= found.keys():
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found
