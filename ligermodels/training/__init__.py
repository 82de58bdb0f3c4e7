"""Training: TrainConfig holds a run's settings, train makes the run, plan says beforehand what it will do and need."""

from ligermodels.training.config import TrainConfig
from ligermodels.training.loop import TrainResult, plan, train

__all__ = ["TrainConfig", "TrainResult", "plan", "train"]
