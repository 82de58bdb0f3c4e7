"""Training: TrainConfig holds a run's settings, train makes the run, plan says beforehand what it will do and need."""

from ligermodels.training.config import TrainConfig
from ligermodels.training.loop import TrainResult, train
from ligermodels.training.runs.preparing import plan

__all__ = ["TrainConfig", "TrainResult", "plan", "train"]
