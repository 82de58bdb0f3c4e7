"""A small model, its optimizers and its steps, for the tests of checkpoints."""

import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ligermodels.training.checkpoints import Checkpoints, Progress
from ligermodels.training.optimizer import adamw, set_learning_rate
from ligermodels.training.training_state import parts
from ligermodels.weights.sharding import whole

VOCABULARY, WIDTH = 37, 16  # rows that two ranks do not share evenly


class Net(nn.Module):
    """An embedding tied to the head, two blocks with dropout, a scale, and a parameter that gets no gradient."""

    def __init__(self, width=WIDTH, trained=""):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Dropout(0.5), nn.Linear(3 * width, width))
            for _ in range(2)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.empty(1))  # of which a second rank has nothing
        self.unused = nn.Parameter(torch.empty(3))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(trained in name)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x * self.scale), ids)

    @torch.no_grad()
    def initialize(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


class Two:
    """An optimizer made of two."""

    def __init__(self, matrices, others):
        self.optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def our_adamw(model):
    optimizer = adamw(model, weight_decay=0.1)
    set_learning_rate(optimizer, 1e-2)
    return optimizer


def muon(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return Two([p for p in trained if p.ndim == 2], [p for p in trained if p.ndim != 2])


def adamw_8bit(model):
    from torchao.optim import AdamW8bit

    return AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=1e-4, block_size=64)


def new_run(make_optimizer=our_adamw, dtype=torch.float32, seed=1, **options):
    model = Net(**options)
    model.initialize(seed)
    torch.manual_seed(seed)
    model.to(dtype)
    return model, make_optimizer(model)


def new_sharded_run(mesh, make_optimizer=our_adamw, seed=1, **options):
    """Computed with in bf16, kept in fp32; each rank has its own random numbers."""
    model = Net(**options)
    model.initialize(seed)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=unit is not model)
    torch.manual_seed(seed + 100 * distributed.get_rank())
    return model, make_optimizer(model)


def train(model, optimizer, steps):
    """steps: their numbers. The data are the step's own, dropout draws from the generator."""
    for step in steps:
        ids = torch.randint(VOCABULARY, (5,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()


def state_of(model, optimizer):
    """All that a run consists of, whole."""
    state = {name: whole(parameter).clone() for name, parameter in model.named_parameters()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for part in parts(optimizer):
        for parameter, values in part.state.items():
            for key, value in values.items():
                state |= pieces(f"{names[parameter]}.{key}", value)
    return state | {"random": torch.get_rng_state()}


def pieces(name, value):
    """A tensor, whole; this rank's codes and scales of one that is made of them."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    if hasattr(local, "codes"):
        return {f"{name}.codes": local.codes.clone(), f"{name}.scale": local.scale.clone()}
    return {name: whole(value).clone()}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


def save(folder, model, optimizer, step, settings=None, keep=2):
    with Checkpoints(folder, keep, settings or {}) as checkpoints:
        checkpoints.save(model, optimizer, Progress(step=step, rows=10 * step, tokens=7 * step, seconds=0.5))


def restore(folder, model, optimizer, say=None):
    with Checkpoints(folder, 2, {}) as checkpoints:
        return checkpoints.restore(model, optimizer, say or refuse)


def refuse(line):
    raise AssertionError(line)
