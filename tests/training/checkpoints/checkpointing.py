"""A small model with its optimizer and training steps, for the tests of checkpoints."""

from types import SimpleNamespace

import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ligermodels.layers.mlp import GatedMLP
from ligermodels.training.checkpoints import Checkpoints, Progress
from ligermodels.training.optimizers import build_optimizer, set_learning_rate
from ligermodels.weights.sharding import full_tensor

VOCABULARY, WIDTH = 37, 16  # an odd number of rows: two ranks cannot split it evenly


class Block(nn.Module):
    """A GatedMLP with dropout and a residual connection."""

    def __init__(self, width):
        super().__init__()
        self.mlp = GatedMLP(SimpleNamespace(hidden_size=width, intermediate_size=2 * width, activation="silu"))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(self.mlp(None, x, None)[0])


class Net(nn.Module):
    """An embedding tied to the head, two blocks, a scale, and a parameter without a gradient.

    trained: only the parameters with this string in their names are trained.
    """

    def __init__(self, width=WIDTH, trained=""):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.empty(1))  # one element: the second rank has no part of it
        self.unused = nn.Parameter(torch.empty(3))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(trained in name)

    def forward(self, ids):
        x = self.embed(ids[None])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x * self.scale)[0], ids)

    @torch.no_grad()
    def initialize(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.copy_(parameter.shape[-1] ** -0.5 * torch.randn(parameter.shape, generator=generator))


def new_optimizer(model, name="adamw", state_dtype=None, param_rounding="exact"):
    optimizer = build_optimizer(model, name, state_dtype=state_dtype, param_rounding=param_rounding)
    set_learning_rate(optimizer, 1e-3)
    return optimizer


def new_run(optimizer="adamw", dtype=torch.float32, state_dtype=None, seed=1, param_rounding="exact", **options):
    model = Net(**options)
    model.initialize(seed)
    torch.manual_seed(seed)
    model.to(dtype)
    return model, new_optimizer(model, optimizer, state_dtype, param_rounding)


def new_sharded_run(mesh, optimizer="adamw", seed=1, dtype=torch.float32, **options):
    """Parameters in `dtype`, computation in bf16; each rank has its own random numbers."""
    model = Net(**options)
    model.initialize(seed)
    model.to(dtype)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=unit is not model)
    torch.manual_seed(seed + 100 * distributed.get_rank())
    return model, new_optimizer(model, optimizer)


def train(model, optimizer, steps):
    """steps: step numbers. The data depend on the step number; dropout uses the global generator."""
    for step in steps:
        ids = torch.randint(VOCABULARY, (5,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()


def state_of(model, optimizer):
    """Returns the whole state of a run, unsharded."""
    state = {name: full_tensor(parameter).clone() for name, parameter in model.named_parameters()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer.create_states()  # also for the parameter without a gradient
    for parameter, values in optimizer.state.items():
        state |= {f"{names[parameter]}.{key}": whole(value).clone() for key, value in values.items()}
    return state | {"random": torch.get_rng_state()}


def whole(x):
    """gloo and NCCL gather no int16."""
    return full_tensor(x.int()).short() if x.dtype == torch.int16 else full_tensor(x)


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


def save(folder, model, optimizer, step, settings=None, keep=2):
    with Checkpoints(folder, keep, settings or {}) as checkpoints:
        checkpoints.save(model, optimizer, Progress(step=step, rows=10 * step, tokens=7 * step, seconds=0.5))


def restore(folder, model, optimizer, say=None):
    with Checkpoints(folder, 2, {}) as checkpoints:
        return checkpoints.restore(model, optimizer, say or fail_on)


def fail_on(line):
    raise AssertionError(line)


def flip(file, place):
    """Flips one bit of the byte at `place`."""
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    file.write_bytes(data)
