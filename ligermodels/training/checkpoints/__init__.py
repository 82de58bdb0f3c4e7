"""A run's state, saved while it trains and restored to the bit."""

from ligermodels.training.checkpoints.saving import Checkpoints, Progress

__all__ = ["Checkpoints", "Progress"]
