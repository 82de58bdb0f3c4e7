import torch
from transformers import RepetitionPenaltyLogitsProcessor

from ligermodels.kernels.decoding.sample_filters import count_tokens, penalize, penalize_reference, start_penalty_row
from tests.conftest import DEVICE


def numbers(*values):
    return [torch.tensor(x, device=DEVICE) for x in values]


def table_of(prompts, generated, vocabulary):
    """The table after the rows have started and generated; -1 stands for a row that has ended."""
    table = torch.full((len(prompts), vocabulary), 77, dtype=torch.int32, device=DEVICE)
    for row, prompt in enumerate(prompts):
        start_penalty_row(table, row, torch.tensor(prompt, device=DEVICE))
    for tokens in generated:
        drawn = torch.tensor(tokens, device=DEVICE)
        count_tokens(table, drawn.clamp(min=0), drawn >= 0)
    return table


def test_the_table_has_prompt_tokens_and_counts_of_generated_tokens():
    table = table_of([[1, 1, 3], [0]], [[3, 2], [3, 2], [0, -1]], 5)
    assert table.tolist() == [[2, 1, 0, 5, 0], [1, 0, 4, 0, 0]]


def test_penalties_follow_their_formulas(kernels):
    """Token 0 is generated twice, 1 in the prompt, 2 both (generated once), 3 neither; then with negative logits."""
    table = table_of([[1, 2, 5, 6]], [[0], [0], [2], [4], [4], [6]], 8)
    logits = torch.tensor([[2.0, 2, 2, 2, -2, -2, -2, -2]], device=DEVICE)
    expected = [1 - 2 * 0.25 - 0.5, 1, 1 - 0.25 - 0.5, 2, -4 - 2 * 0.25 - 0.5, -4, -4 - 0.25 - 0.5, -2]
    for function in (penalize, penalize_reference):
        assert function(logits, table, *numbers([2.0], [0.5], [0.25])).tolist() == [expected]


def test_repetition_penalty_equals_that_of_transformers(kernels):
    logits = torch.randn(3, 2500, device=DEVICE)
    prompts, generated = torch.randint(2500, (3, 40)), torch.randint(2500, (12, 3))
    table = table_of(prompts.tolist(), generated.tolist(), 2500)
    seen = torch.cat([prompts, generated.T], 1).to(DEVICE)
    expected = torch.cat(
        [RepetitionPenaltyLogitsProcessor(p)(seen[i : i + 1], logits[i : i + 1]) for i, p in enumerate((1.3, 0.8, 1.0))]
    )
    settings = numbers([1.3, 0.8, 1.0], [0.0] * 3, [0.0] * 3)
    # On a GPU, PyTorch multiplies by the reciprocal of a number instead of dividing.
    rounding = 0.0 if DEVICE == "cpu" else 2 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(penalize(logits, table, *settings), expected, rtol=rounding, atol=0)


def test_kernel_equals_reference_and_neutral_penalties_change_nothing(kernels, poisoned):
    logits = torch.randn(2, 4099, device=DEVICE).half()
    table = torch.randint(6, (2, 4099), dtype=torch.int32, device=DEVICE)
    settings = numbers([1.0, 1.7], [0.0, -1.5], [0.0, 0.3])
    penalized = penalize(logits, table, *settings)
    assert torch.equal(penalized[0], logits[0].float())
    torch.testing.assert_close(penalized, penalize_reference(logits, table, *settings))
