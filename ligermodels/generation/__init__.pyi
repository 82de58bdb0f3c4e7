from ligermodels.generation.decoding import generate as generate
from ligermodels.generation.decoding import stream as stream
from ligermodels.generation.engine import Engine as Engine
from ligermodels.generation.requests import GeneratedSample as GeneratedSample
from ligermodels.generation.sampling import Sampling as Sampling
