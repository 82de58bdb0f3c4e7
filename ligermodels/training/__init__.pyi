from ligermodels.training.loop import TrainResult as TrainResult
from ligermodels.training.loop import train as train
from ligermodels.training.preparing import plan as plan
from ligermodels.training.settings.config import TrainConfig as TrainConfig
