"""Optimizers, gradient clipping, the step that is skipped on non-finite gradients, and learning rate schedules."""

from ligermodels.training.optimizers.building import (
    OPTIMIZERS,
    OptimizerInBackward,
    build_optimizer,
    clip_and_step,
    set_learning_rate,
)

__all__ = ["OPTIMIZERS", "OptimizerInBackward", "build_optimizer", "clip_and_step", "set_learning_rate"]
