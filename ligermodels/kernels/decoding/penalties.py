"""Penalties on tokens that a text already has: repetition (Hugging Face's), presence and frequency (vLLM's, OpenAI's).

in the prompt or generated:  l = l / repetition if l > 0, else l * repetition generated n > 0 times:       l = l -
(frequency * n + presence) One table [B, V] int32 records what the formulas need: 2 n, plus 1 for tokens of the prompt.
4 B V bytes; a row is reset by `start_penalty_row`, and each generated token adds 2 to one number. logits [B, V] any
float dtype -> fp32. Repetition 1, presence 0 and frequency 0 change nothing. Reads logits and table once and writes
once: bound by memory bandwidth. Sources: Keskar et al. 2019, https://arxiv.org/abs/1909.05858, for repetition; OpenAI's
API reference for the others.
"""

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import (
    INT32,
    check_floats,
    check_one_of,
    check_shape,
    register_op,
    runs_kernels,
    shape_of,
)
from ligermodels.kernels.launch import as_rows_with_stride, cdiv, kernel
from ligermodels.kernels.pdl import pdl_constants, wait_for_previous_kernel

TILE, WARPS = 2048, 4
GENERATED_ONCE = 2  # in the table


def penalize_reference(
    logits: Tensor, table: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Arguments and result as in `penalize`."""
    logits, generated = logits.float(), table // GENERATED_ONCE
    repetition, presence, frequency = (x[:, None] for x in (repetition, presence, frequency))
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(table > 0, repeated, logits)
    return torch.where(generated > 0, logits - (frequency * generated + presence), logits)


@kernel()
def _penalize_kernel(
    logits_ptr, table_ptr, repetition_ptr, presence_ptr, frequency_ptr, out_ptr, row_stride, columns,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program penalizes TILE logits of a row."""
    wait_for_previous_kernel(PDL)
    tiles = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    inside = column < columns
    logits = tl.load(logits_ptr + row * row_stride + column, inside).to(tl.float32)
    recorded = tl.load(table_ptr + row * columns + column, inside)
    generated = recorded >> 1
    repetition = tl.load(repetition_ptr + row)
    penalty = tl.load(frequency_ptr + row) * generated.to(tl.float32) + tl.load(presence_ptr + row)
    repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    logits = tl.where(recorded > 0, repeated, logits)
    tl.store(out_ptr + row * columns + column, tl.where(generated > 0, logits - penalty, logits), inside)


def _launch(logits: Tensor, table: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    out = _fake(logits, table, repetition, presence, frequency)
    rows, columns = logits.shape
    if rows:
        logits, row_stride = as_rows_with_stride(logits, columns)
        launch = _penalize_kernel.bind(TILE=TILE, num_warps=WARPS, **pdl_constants(logits.device))
        launch(
            rows * cdiv(columns, TILE), logits, table.contiguous(), repetition.contiguous(), presence.contiguous(),
            frequency.contiguous(), out, row_stride, columns,
        )  # fmt: skip
    return out


def _fake(logits, table, repetition, presence, frequency):
    return logits.new_empty(*logits.shape, dtype=torch.float32)


penalize_op = register_op(
    "penalize(Tensor logits, Tensor table, Tensor repetition, Tensor presence, Tensor frequency) -> Tensor",
    _launch,
    _fake,
)


def penalize(logits: Tensor, table: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """The logits of each row with its penalties, [B, V] fp32. Differentiates nothing; does not wait for the device.

    logits [B, V] any float dtype; table [B, V] int32, of `start_penalty_row` and `count_tokens`; repetition, presence,
    frequency [B] fp32, 1, 0 and 0 for none. Raises ValueError where shapes or dtypes disagree.
    """
    shape = shape_of("penalize", "logits", logits, "B, V")
    check_shape("penalize", "table", table, *shape)
    of_rows = {"repetition": repetition, "presence": presence, "frequency": frequency}
    for name, x in of_rows.items():
        check_shape("penalize", name, x, shape[0])
    check_floats("penalize", logits=logits, **of_rows)
    check_one_of("penalize", INT32, table=table)
    function = penalize_op if runs_kernels(logits) else penalize_reference
    return function(logits.detach(), table, repetition, presence, frequency)


def start_penalty_row(table: Tensor, row: int, prompt: Tensor) -> None:
    """Records in a row of the table that its text is a new one with this prompt, token ids [T] int64."""
    table[row].zero_().index_fill_(0, prompt, 1)


def count_tokens(table: Tensor, tokens: Tensor, running: Tensor) -> None:
    """Records one generated token in each row. tokens [B] int64; running [B] bool: the rows that are to record it."""
    table.scatter_add_(1, tokens[:, None], GENERATED_ONCE * running[:, None].to(table.dtype))
