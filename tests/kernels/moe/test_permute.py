import pytest
import torch

from ligermodels.kernels.moe.permute import SORT_TILE, permute, sort_by_expert, unpermute
from tests.conftest import DEVICE, TENS_OF_GIB

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw(tokens, num_experts, k):
    """Expert indices [tokens, k]; the last expert is never chosen."""
    return torch.randint(num_experts - 1, (tokens, k), device=DEVICE)


def test_sorting_is_stable_and_gives_the_end_of_every_expert():
    index = torch.tensor([[3, 1], [1, 0], [3, 1]], device=DEVICE)
    row, offsets = sort_by_expert(index, 5)
    assert row.tolist() == [[4, 1], [2, 0], [5, 3]]
    assert offsets.tolist() == [1, 4, 4, 6, 6] and offsets.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("tokens", "num_experts", "k"), [(0, 3, 2), (7, 130, 3), (SORT_TILE, 3, 1), (SORT_TILE, 3, 3)])
def test_sorting_agrees_with_torch_sort(tokens, num_experts, k, dtype):
    index = draw(tokens, num_experts, k).to(dtype)
    ranked, slot = index.flatten().sort(stable=True)
    row, offsets = sort_by_expert(index.t().contiguous().t(), num_experts)
    assert torch.equal(row, slot.argsort().view(tokens, k).int())
    assert torch.equal(offsets, torch.bincount(ranked, minlength=num_experts).cumsum(0).int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "hidden", "k"), [(0, 8, 2), (5, 7, 3), (4, 1030, 2)])
def test_permute_copies_and_unpermute_sums_rows(tokens, hidden, k, dtype):
    """The sum is taken in fp32 and rounded once."""
    row, _ = sort_by_expert(draw(tokens, 6, k), 6)
    x = torch.randn(hidden, tokens, device=DEVICE).to(dtype).t()
    rows = torch.randn(hidden, tokens * k, device=DEVICE).to(dtype).t()
    assert torch.equal(permute(x, row)[row.long()], x[:, None].expand(tokens, k, hidden))
    expected = sum(rows[row[:, j].long()].float() for j in range(k)).to(dtype)
    assert torch.equal(unpermute(rows, row), expected)


@TENS_OF_GIB
@pytest.mark.gpu
def test_permute_and_unpermute_beyond_two_to_the_31_elements():
    tokens, hidden = 2**17 + 9, 2**13
    row, _ = sort_by_expert(draw(tokens, 8, 2), 8)
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
    rows = permute(x, row)
    assert torch.equal(rows[row[-5:, 1].long()], x[-5:])
    assert torch.equal(unpermute(rows, row), 2 * x)
