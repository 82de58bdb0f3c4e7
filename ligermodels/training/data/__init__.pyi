from ligermodels.training.data.opening import Data as Data
from ligermodels.training.data.opening import open_data as open_data
from ligermodels.training.data.opening import refuse_short_epoch as refuse_short_epoch
from ligermodels.training.data.rows.run_rows import Batch as Batch
from ligermodels.training.data.rows.run_rows import DataError as DataError
from ligermodels.training.data.rows.run_rows import TrainingRows as TrainingRows
from ligermodels.training.data.rows.run_rows import ValidationRows as ValidationRows
from ligermodels.training.data.rows.run_rows import count_supervised as count_supervised
