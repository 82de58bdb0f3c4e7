import pytest
import torch

from ligermodels.kernels.optim import adamw8bit
from ligermodels.kernels.optim.adamw8bit import adamw8bit_, adamw8bit_reference, encode_reference, map_and_thresholds
from tests.conftest import DEVICE
from tests.kernels.error_budget import APPROXIMATE, DTYPES, FACTOR, relative_error

HYPERPARAMETERS = 1e-2, 0.9, 0.999, 1e-8, 0.1  # lr, beta1, beta2, eps, weight_decay
pytestmark = [
    pytest.mark.usefixtures("kernels", "poisoned"),
    # NumPy warns about what the interpreter computes from infinite gradients, of which nothing is stored.
    pytest.mark.filterwarnings("ignore:(invalid value encountered|All-NaN slice):RuntimeWarning"),
]


def scalar(value):
    return torch.tensor(float(value), device=DEVICE)


def draw(shape, block, dtype=torch.float32):
    """param, grad, codes and scales as they are in the middle of a run, with blocks whose gradient is zero."""
    param, grad, m = (torch.randn(shape, device=DEVICE) for _ in range(3))
    v = torch.randn(shape, device=DEVICE).square()
    for x in (grad, m, v):
        x.view(-1, block)[1] = 0.0
    states = []
    for x, signed in ((m, True), (v, False)):
        codes, scale = encode_reference(x.view(-1, block), signed)
        states += [codes.view(shape), scale]
    return [param.to(dtype), grad.to(dtype), *states]


def updated(tensors, *arguments):
    """`adamw8bit_` on copies, returning the updated tensors as the reference does."""
    param, grad, *states = (x.clone() for x in tensors)
    adamw8bit_(param, grad, *states, *arguments)
    assert torch.equal(grad, tensors[1])
    return param, *states


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, block", [((3, 256), 256), ((11, 384), 128), ((5, 3, 64), 64), ((141, 512), 256)])
def test_the_update_is_within_the_error_budget(shape, block, dtype):
    tensors, arguments = draw(shape, block, dtype), (*HYPERPARAMETERS, scalar(3), scalar(2.5))
    exact = adamw8bit_reference(*(x.double() for x in tensors[:2]), *tensors[2:], *arguments)
    plain = adamw8bit_reference(*tensors, *arguments)
    got = updated(tensors, *arguments)
    factor = FACTOR * (APPROXIMATE if DEVICE == "cuda" and dtype == torch.float32 else 1.0)
    for i in (0, 2, 4):  # the parameter and the scales
        allowed = max(factor * relative_error(plain[i], exact[i]), torch.finfo(got[i].dtype).eps / 2)
        assert relative_error(got[i], exact[i]) <= allowed
    # A moment at a threshold may get the neighbouring code, which is as near.
    for ours, theirs in ((1, 1), (3, 3)):
        distance = (got[ours].int() - plain[theirs].int()).abs()
        assert distance.max() <= 1 and distance.float().mean() < 1e-3


def encoded(x, signed):
    """The kernel's codes of x [blocks, 255] and a 1, which makes the scale of each block 1; and what it encoded.

    Without averages the moments are the gradient and its square.
    """
    x = torch.nn.functional.pad(x, (1, 0), value=1.0)
    grad = (x if signed else x.sqrt()).float()
    states = [torch.zeros(x.shape, dtype=torch.uint8, device=DEVICE), torch.zeros(len(x), device=DEVICE)]
    tensors = [torch.zeros_like(grad), grad, *states, *states]
    _, m, _, v, _ = updated(tensors, 0.0, 0.0, 0.0, 1e-8, 0.0, scalar(1))
    return (m, grad) if signed else (v, grad.square())


@pytest.mark.parametrize("signed", [True, False])
def test_every_number_gets_the_nearest_code(signed):
    """At each threshold, beside it, at each code's value, and over all decades. No square has the code of 0."""
    values, thresholds = (x[int(not signed)].double() for x in map_and_thresholds(torch.device(DEVICE)))
    edges, spread = thresholds[1:], torch.logspace(-9, 0, 2000, dtype=torch.float64, device=DEVICE)
    x = torch.cat((edges, edges * (1 - 1e-6), edges * (1 + 1e-6), values, spread, -spread, torch.zeros_like(edges)))
    x = x[: len(x) // 255 * 255].view(-1, 255).clamp(-1 if signed else 0, 1)
    codes, exact = encoded(x, signed)
    # At a threshold both codes are as near.
    assert (codes.int() - encode_reference(exact, signed)[0].int()).count_nonzero() <= len(edges)
    first = int(not signed)
    assert codes.unique().tolist() == list(range(first, 256))
    distance = (exact.double()[..., None] - values[first:]).abs()
    chosen = distance.gather(-1, codes.long()[..., None] - first)[..., 0]
    assert (chosen <= distance.amin(-1) + 1e-6 * exact.abs()).all()


@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize("signed", [True, False])
def test_a_number_beside_a_threshold_gets_the_nearer_code(signed, side):
    """A few units in the last place of fp32 beside it, for every two neighbouring codes."""
    values = map_and_thresholds(torch.device(DEVICE))[0][int(not signed)].double()
    between = (values[1:] + values[:-1]) / 2
    codes, _ = encoded((between + side * 1e-6 * between.abs())[None], signed)
    expected = (torch.arange(255, device=DEVICE) + (side > 0)).clamp_min(int(not signed))
    assert torch.equal(codes[0, 1:].long(), expected)


def test_a_gradient_that_vanishes_leaves_no_step_of_many_learning_rates():
    """One that is 3,000 times smaller than its block's largest, and then 0: v would be rounded to 0, and m not."""
    lr = HYPERPARAMETERS[0]
    param, grad = torch.zeros(1, 256, device=DEVICE), torch.full((1, 256), 3e-6, device=DEVICE)
    grad[0, 0] = 1e-2
    states = [torch.zeros(1, 256, dtype=torch.uint8, device=DEVICE), torch.zeros(1, device=DEVICE)] * 2
    for step in range(1, 5):
        before = param
        param, *states = updated([param, grad, *states], *HYPERPARAMETERS[:4], 0.0, scalar(step))
        assert (param - before).abs().max() < 2 * lr
        grad = grad * torch.eye(256, device=DEVICE)[:1]  # but the first


@pytest.mark.parametrize("scale", [None, scalar(3)])
def test_nothing_is_written_if_found_inf_is_one(scale):
    tensors = draw((9, 256), 256)
    tensors[1][0] = float("inf")
    results = updated(tensors, *HYPERPARAMETERS, scalar(5), scale, scalar(1))
    assert all(torch.equal(got, old) for got, old in zip(results, (tensors[0], *tensors[2:]), strict=True))


def test_a_found_inf_of_zero_changes_nothing():
    tensors = draw((9, 256), 256)
    flagged = updated(tensors, *HYPERPARAMETERS, scalar(5), None, scalar(0))
    assert all(map(torch.equal, flagged, updated(tensors, *HYPERPARAMETERS, scalar(5))))


def test_tensors_that_are_not_contiguous_and_blocks_of_other_sizes_take_the_reference(monkeypatch):
    def fail(*_):
        raise AssertionError("the kernel ran")

    monkeypatch.setattr(adamw8bit, "adamw8bit_update_", fail)
    for shape, block in (((6, 96), 32), ((4, 256), 256)):
        tensors = draw(shape, block)
        expected = adamw8bit_reference(*tensors, *HYPERPARAMETERS, scalar(3))
        if block == 256:
            tensors[1] = torch.stack((tensors[1], tensors[1]), -1)[..., 0]
        adamw8bit_(*tensors, *HYPERPARAMETERS, scalar(3))
        assert all(map(torch.equal, (tensors[0], *tensors[2:]), expected))


def test_shapes_that_differ_or_do_not_make_blocks_raise():
    tensors = draw((4, 256), 256)
    with pytest.raises(ValueError, match=r"adamw8bit_: grad has shape .*; needed \[1024\]"):
        adamw8bit_(tensors[0].flatten(), *tensors[1:], *HYPERPARAMETERS, scalar(1))
    three = torch.zeros(3, device=DEVICE)
    with pytest.raises(ValueError, match="exp_avg_scale has 3 elements, which do not divide the 1024"):
        adamw8bit_(*tensors[:3], three, tensors[4], three, *HYPERPARAMETERS, scalar(1))


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_device():
    tensors, arguments = draw((64, 256), 256, torch.bfloat16), (*HYPERPARAMETERS, scalar(1), scalar(2), scalar(0))
    adamw8bit_(*tensors, *arguments)  # compiles the kernel
    torch.cuda.set_sync_debug_mode("error")
    try:
        adamw8bit_(*tensors, *arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
