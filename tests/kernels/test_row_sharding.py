"""Norms and gated activations of DTensors on two gloo ranks, beside plain tensors: results, gradients, placements."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from ligermodels import nn, ops
from ligermodels.kernels import launch
from tests.conftest import DEVICE

B, T, N = 2, 2, 6
BATCH, LENGTH, COLUMNS = range(3)  # the dimension that is sharded
PATHS = "kernels", "reference"
MAX_ERROR = 1e-5  # sums of 48 fp32 terms in another order
OPS_OF_ROWS = {  # function, and its arguments: x [B, T, N] or w [N]
    "rms_norm": (ops.rms_norm, "xw"),
    "rms_norm without weight": (ops.rms_norm, "x"),
    "add_rms_norm": (lambda *inputs: ops.add_rms_norm(*inputs)[0], "xxw"),
    "the sum of add_rms_norm": (lambda *inputs: ops.add_rms_norm(*inputs)[1], "xxw"),
    "layer_norm": (ops.layer_norm, "xww"),
    "packed gate and up": (ops.swiglu, "x"),
    "gate and up": (ops.swiglu, "xx"),
}
pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="the ranks are forked, which CUDA does not survive"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def largest_errors(pairs):
    return [(ours.full_tensor() - expected).abs().max().item() for ours, expected in pairs if expected is not None]


def compare(mesh, function, kinds, dim):
    """Placements of the output and of the gradient of x, and the largest errors, for x sharded along dim.

    With frozen weights, with frozen x, and with both trained: DTensor must not take one for the other.
    """
    torch.manual_seed(0)
    shapes = {"x": (B, T, N), "w": (N,)}
    plain = [torch.randn(shapes[kind]).requires_grad_() for kind in kinds]
    errors = []
    for trained in ("x", "w", "xw") if "w" in kinds else ("x",):
        inputs, leaves = [], []
        for x, kind in zip(plain, kinds, strict=True):
            placement = Shard(dim) if kind == "x" else Replicate()
            inputs.append(x.detach().requires_grad_(kind in trained))
            leaves.append(distribute_tensor(x.detach(), mesh, [placement]).requires_grad_(kind in trained))
        expected, y = function(*inputs), function(*leaves)
        if not expected.requires_grad:  # the sum does not depend on the weight
            continue
        upstream = torch.randn_like(expected)
        sides = ((y, leaves, distribute_tensor(upstream, mesh, [Replicate()])), (expected, inputs, upstream))
        found, gradients = (
            torch.autograd.grad(output, [x for x in given if x.requires_grad], dy, allow_unused=True)
            for output, given, dy in sides
        )
        errors += largest_errors([(y, expected), *zip(found, gradients, strict=True)])
    return {"output": str(y.placements), "dx": str(found[0].placements), "errors": errors}


def run_module(mesh):
    """A norm whose parameters SequenceParallel makes DTensors, and whose input is sharded along the length."""
    torch.manual_seed(0)
    norm, x = nn.RMSNorm(N), torch.randn(B, T, N)
    expected = norm(x)
    (gradient,) = torch.autograd.grad(expected.sin().sum(), norm.weight)
    parallelize_module(norm, mesh, SequenceParallel())
    y = norm(distribute_tensor(x, mesh, [Shard(LENGTH)]))
    y.sin().sum().backward()
    return {
        "output": str(y.placements),
        "weight": str(norm.weight.placements),
        "errors": largest_errors([(y, expected.detach()), (norm.weight.grad, gradient)]),
    }


def error_of_a_plain_weight(mesh):
    try:
        ops.rms_norm(distribute_tensor(torch.ones(B, T, N), mesh, [Shard(BATCH)]), torch.ones(N))
    except RuntimeError as error:
        return str(error)


def run_rank(rank, folder):
    """Writes {path: {what: results}} to FOLDER/RANK.json."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    results = {}
    for path in PATHS:
        launch.interpreting = path == "kernels"
        results[path] = {
            f"{name}, {dim}": compare(mesh, *OPS_OF_ROWS[name], dim)
            for name in OPS_OF_ROWS
            for dim in (BATCH, LENGTH, COLUMNS)
        }
        results[path] |= {"module": run_module(mesh), "plain weight": error_of_a_plain_weight(mesh)}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each rank has written. The processes are forked, because importing torch again takes longer."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.start_processes(run_rank, (folder,), nprocs=2, start_method="fork")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def placed(dim):
    return f"(Shard(dim={dim}),)"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", OPS_OF_ROWS)
def test_a_sharded_batch_or_length_stays_sharded(results, name, path):
    for dim in (BATCH, LENGTH):
        for result in results:
            found = result[path][f"{name}, {dim}"]
            assert found["output"] == placed(dim)
            if name != "the sum of add_rms_norm":  # passes the upstream gradient on, wherever that is
                assert found["dx"] == placed(dim)
            assert max(found["errors"]) < MAX_ERROR


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", OPS_OF_ROWS)
def test_rows_that_are_split_between_ranks_give_the_same_results(results, name, path):
    for result in results:
        assert max(result[path][f"{name}, {COLUMNS}"]["errors"]) < MAX_ERROR


def test_only_separate_gate_and_up_stay_sharded_along_the_columns(results):
    kept = {name for name in OPS_OF_ROWS if results[0]["kernels"][f"{name}, {COLUMNS}"]["output"] == placed(COLUMNS)}
    assert kept == {"gate and up"}


@pytest.mark.parametrize("path", PATHS)
def test_a_norm_under_sequence_parallelism(results, path):
    for result in results:
        found = result[path]["module"]
        assert (found["output"], found["weight"]) == (placed(LENGTH), "(Replicate(),)")
        assert max(found["errors"]) < MAX_ERROR


@pytest.mark.parametrize("path", PATHS)
def test_a_plain_weight_beside_a_dtensor_is_refused(results, path):
    for result in results:
        assert "got mixed torch.Tensor and DTensor" in result[path]["plain weight"]
