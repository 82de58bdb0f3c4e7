from ligermodels import losses as losses
from ligermodels import nn as nn
from ligermodels import ops as ops
from ligermodels import training as training
from ligermodels.adapters.lora_targets import add_lora as add_lora
from ligermodels.errors import CheckpointError as CheckpointError
from ligermodels.errors import ConfigError as ConfigError
from ligermodels.errors import HubError as HubError
from ligermodels.errors import InputError as InputError
from ligermodels.generation import Engine as Engine
from ligermodels.generation import GeneratedSample as GeneratedSample
from ligermodels.generation import generate as generate
from ligermodels.generation import stream as stream
from ligermodels.hub import create as create
from ligermodels.hub import export as export
from ligermodels.hub import export_adapter as export_adapter
from ligermodels.hub import export_gguf as export_gguf
from ligermodels.hub import list_architectures as list_architectures
from ligermodels.hub import load as load
from ligermodels.hub import load_adapter as load_adapter
from ligermodels.hub import load_processor as load_processor
from ligermodels.hub import load_tokenizer as load_tokenizer

__version__: str
