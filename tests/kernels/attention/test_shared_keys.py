import pytest
import torch

from ligermodels.kernels.attention.shared_keys import gather_keys, gather_keys_reference
from tests.conftest import DEVICE, TENS_OF_GIB
from tests.kernels.error_budget import DTYPES, check

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw_copies(counts):
    """offsets and places of tokens that have so many copies, at random places."""
    counts = torch.tensor(counts)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return offsets.int().to(DEVICE), torch.randperm(int(counts.sum())).int().to(DEVICE)


def test_each_copy_has_its_tokens_numbers_and_gradients_are_summed():
    offsets = torch.tensor([0, 3, 4, 6], dtype=torch.int32, device=DEVICE)
    places = torch.tensor([0, 2, 5, 1, 3, 4], dtype=torch.int32, device=DEVICE)
    x = torch.tensor([1.0, 2.0, 3.0], device=DEVICE).view(1, 3, 1, 1).requires_grad_()
    y = gather_keys(x, offsets, places)
    assert y.flatten().tolist() == [1, 2, 1, 3, 3, 1]
    [dx] = torch.autograd.grad(y, x, torch.tensor([1.0, 2, 4, 8, 16, 32], device=DEVICE).view_as(y))
    assert dx.flatten().tolist() == [1 + 4 + 32, 2, 8 + 16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("counts", "heads", "size"), [((9, 1, 3, 2), 3, 20), ((1, 5), 2, 600)])
def test_error_is_within_the_budget(counts, heads, size, dtype):
    """Of a view of a packed projection."""
    offsets, places = draw_copies(counts)
    packed = torch.randn(1, len(counts), (4 + 2 * heads) * size, dtype=torch.float64, device=DEVICE)

    def of_keys(function):
        return lambda packed: function(packed.unflatten(2, (-1, size))[:, :, 4 : 4 + heads], offsets, places)

    check(of_keys(gather_keys), of_keys(gather_keys_reference), [packed], dtype)


def test_shapes_that_do_not_fit_are_refused():
    x = torch.zeros(2, 3, 1, 4, device=DEVICE)
    offsets, places = draw_copies((1, 1, 1))
    with pytest.raises(ValueError, match="it must be one row of tokens"):
        gather_keys(x, offsets, places)
    with pytest.raises(ValueError, match=r"offsets has shape \[3\]; needed \[4\]"):
        gather_keys(x[:1], offsets[:-1], places)


@TENS_OF_GIB
@pytest.mark.gpu
def test_copies_beyond_two_to_the_31_elements():
    tokens, copies = 2**14, 9
    offsets, places = draw_copies([copies] * tokens)
    x = torch.randn(1, tokens, 128, 128, device=DEVICE, dtype=torch.bfloat16)
    y = gather_keys(x, offsets, places)
    assert torch.equal(y[0, places[-copies:].long()], x[0, -1:].expand(copies, 128, 128))
