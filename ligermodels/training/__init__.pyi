from ligermodels.training.config import TrainConfig as TrainConfig
from ligermodels.training.loop import TrainResult as TrainResult
from ligermodels.training.loop import train as train
from ligermodels.training.runs.preparing import plan as plan
