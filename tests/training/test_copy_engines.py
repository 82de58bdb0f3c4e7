"""The buffers of copies, and the sum of what was copied. Whole steps by copies are in test_parallel.py."""

import pytest
import torch

from ligermodels.training import copy_engines
from ligermodels.training.copy_engines import Buffers, CopyEngineReduceScatter

CPU = torch.device("cpu")


@pytest.fixture
def plain_memory(monkeypatch):
    monkeypatch.setattr(
        copy_engines, "readable_by_all", lambda group, device, size: torch.zeros(size, dtype=torch.uint8)
    )


def test_buffers_are_used_in_turn(plain_memory):
    buffers = Buffers(None, CPU, 20, 3)
    taken = [buffers.next((5,), torch.float32).data_ptr() for _ in range(6)]
    assert taken[:3] == taken[3:] and len(set(taken)) == 3


def test_gradients_are_copied_in_their_dtype_and_summed_in_fp32(plain_memory, monkeypatch):
    reduce = CopyEngineReduceScatter(Buffers(None, CPU, 12, 1), Buffers(None, CPU, 12, 1))
    given = reduce.allocate((6,), dtype=torch.bfloat16, device=CPU)
    output = reduce.allocate((2,), dtype=torch.bfloat16, device=CPU)
    assert (given.dtype, output.dtype) == (torch.bfloat16, torch.float32)
    received = torch.tensor([256.0, 1.0, 1.0, 2.0, 1.0, 3.0], dtype=torch.bfloat16)  # bf16 would sum the first to 256
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda out, x, group: out.copy_(received))
    group = type("Group", (), {"size": lambda self: 3})()
    reduce(output, given, group, op=None)
    assert output.tolist() == [258.0, 6.0]


def test_a_cpu_has_none():
    assert not copy_engines.are_there(2, CPU)
