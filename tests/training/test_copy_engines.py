"""Gathering and reducing by copies, on ranks that are imitated one after the other: memory that all can read, without
the barriers."""

from types import SimpleNamespace

import pytest
import torch

from ligermodels.training import copy_engines
from ligermodels.training.copy_engines import GATHERING, Buffers, CopyEngineAllGather, CopyEngineReduceScatter

N = 5  # elements of a part
CPU = torch.device("cpu")


class Handle:
    """What a rank sees of one piece of memory of all ranks."""

    def __init__(self, memories):
        self.memories, self.barriers = memories, 0

    def barrier(self):
        self.barriers += 1

    def get_buffer(self, rank, shape, dtype, offset):
        return self.memories[rank].view(dtype)[offset : offset + shape[0]].view(shape)


@pytest.fixture(params=[2, 3, 8])
def buffers(request):
    """Those of each rank."""
    memory = [[torch.zeros(request.param * N * 4, dtype=torch.uint8) for _ in range(3)] for _ in range(request.param)]
    ranks = []
    for mine in memory:
        of_rank = object.__new__(Buffers)
        of_rank.memory, of_rank.turn = mine, 0
        of_rank.handles = [Handle([other[turn] for other in memory]) for turn in range(3)]
        ranks.append(of_rank)
    return ranks


def group_of(rank, size):
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def test_every_rank_gathers_the_parts_of_all(buffers):
    size = len(buffers)
    parts = torch.randn(size, N)
    gathers = [CopyEngineAllGather(of_rank) for of_rank in buffers]
    outputs = [gather.allocate((size * N,), dtype=torch.float32, device=CPU) for gather in gathers]
    inputs = [output.chunk(size)[rank].copy_(parts[rank]) for rank, output in enumerate(outputs)]
    for rank, gather in enumerate(gathers):
        gather(outputs[rank], inputs[rank], group_of(rank, size))
        assert [handle.barriers for handle in gather.buffers.handles] == [0, 1, 0]
        torch.testing.assert_close(outputs[rank], parts.flatten(), rtol=0, atol=0)


def test_every_rank_reduces_its_part_in_the_order_of_ranks(buffers):
    size = len(buffers)
    whole = torch.randn(size, size, N)  # of each rank, the part of each rank
    reduces = [CopyEngineReduceScatter(of_rank) for of_rank in buffers]
    inputs = [reduce.allocate((size * N,), dtype=torch.float32, device=CPU) for reduce in reduces]
    outputs = [reduce.allocate((N,), dtype=torch.float32, device=CPU) for reduce in reduces]
    for rank, x in enumerate(inputs):
        x.copy_(whole[rank].flatten())
    for rank, reduce in enumerate(reduces):
        reduce(outputs[rank], inputs[rank], group_of(rank, size), op=None)
        expected = whole[0, rank].clone()
        for other in whole[1:]:
            expected += other[rank]
        torch.testing.assert_close(outputs[rank], expected, rtol=0, atol=0)


def test_buffers_are_used_in_turn(buffers):
    taken = [buffers[0].next((N,), torch.float32).data_ptr() for _ in range(2 * GATHERING)]
    assert taken[:GATHERING] == taken[GATHERING:] and len(set(taken)) == GATHERING


def test_a_cpu_has_none():
    assert not copy_engines.are_there(2, CPU)
