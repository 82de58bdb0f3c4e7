"""Objectives: what a run minimises, from its data to its metrics. `--objective` names one.

The loop (training/loop.py) knows an objective only by the interface of `Objective` (objective.py), in this order:

    objective = make_objective(config, world)
    objective.open(…)              its data door: records, refused or tokenised and packed; `objective.data`
    objective.choices(…)           settings that it chooses: units a step, learning rate, warmup
    objective.complete(config)     takes the settings with all choices made
    objective.bytes_beside(…)      the memory of a reference or a teacher
    objective.phases(…)            the peak of each phase: precomputing, sampling, training
    objective.prepare(model, run)  references, from the weights the run begins with; before a checkpoint is restored
    every step:
      objective.work(…)            this rank's micro-batches, the counts that the loss is divided by; sampling, rewards
      objective.loss(…)            of one micro-batch: its share of the step's loss, and sums for metrics
      objective.metrics(…)         on the host, from the sums over all micro-batches and ranks
      objective.finish_step(…)     after the update, such as a moving average of the weights
    objective.validate(…)          on held-out data
    objective.tensors, state, restore      what a checkpoint holds of it, so that a resume is bit-exact

A loss is a sum over units (tokens, pairs, examples, completions) divided by their number in the step, over all ranks
and micro-batches: how a step is divided changes nothing but rounding. `loss` returns shares that are already divided.

A flag that belongs to some objectives names them where it is declared (`setting(…, objectives=…)` in config.py), and is
refused under the others.
"""

from ligermodels.distributed import World
from ligermodels.training.objectives.distillation.distill import Distill, OnPolicyDistill, TopKDistill
from ligermodels.training.objectives.grpo.grpo import GRPO
from ligermodels.training.objectives.objective import Objective, RunSetup, Share, StepTotals, Work
from ligermodels.training.objectives.preference.kto import KTO
from ligermodels.training.objectives.preference.pairs import CPO, DPO, ORPO, Reward, SimPO
from ligermodels.training.objectives.sft import SFT
from ligermodels.training.settings.config import TrainConfig

__all__ = ["OBJECTIVES", "Objective", "RunSetup", "Share", "StepTotals", "Work", "make_objective"]

OBJECTIVES: dict[str, type[Objective]] = {
    "sft": SFT, "distill": Distill, "dpo": DPO, "orpo": ORPO, "cpo": CPO, "simpo": SimPO, "reward": Reward,
    "grpo": GRPO, "kto": KTO,
}  # fmt: skip


def make_objective(config: TrainConfig, world: World) -> Objective:
    """The objective that `config.objective` names. Raises InputError for options that it cannot have."""
    if config.objective == "distill" and config.teacher == "top-k":
        return TopKDistill(config, world)
    if config.objective == "distill" and config.on_policy:
        return OnPolicyDistill(config, world)
    return OBJECTIVES[config.objective](config, world)
