"""Checkpoints of a training run: saved in the background, restored for a bit-exact resume."""

from ligermodels.training.checkpoints.saving import Checkpoints, Progress

__all__ = ["Checkpoints", "Progress"]
