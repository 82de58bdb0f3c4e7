"""The optimizers of a run, the step that clips or is refused, and the learning rate of each step."""

from ligermodels.training.optimizers.building import OPTIMIZERS, build_optimizer, clipped_step, set_learning_rate

__all__ = ["OPTIMIZERS", "build_optimizer", "clipped_step", "set_learning_rate"]
