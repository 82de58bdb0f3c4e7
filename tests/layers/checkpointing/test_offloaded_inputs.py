"""Inputs of checkpointed blocks in host memory. On a CPU the copies are those of a GPU, without streams."""

import gc
import weakref

import pytest
import torch

import ligermodels
from ligermodels.layers.checkpointing.offloaded_inputs import OffloadedInputs, blocks_between
from tests.cases import CASES, LLAMA
from tests.conftest import DEVICE

LAYERS = 4
IDS = torch.randint(3, 99, (3, 2, 8), generator=torch.Generator().manual_seed(0))


def new_model(raw=LLAMA, every=None, kept_tensors=0):
    torch.manual_seed(0)
    model = ligermodels.create(raw | {"num_hidden_layers": LAYERS}, device=DEVICE)
    model.checkpoint_activations(LAYERS - 1, kept_tensors, 8)
    if every:
        model.offload_inputs(LAYERS - 1, every)
    return model


def gradients(model, batches=IDS, all_forward_first=False):
    losses = (model(ids.to(DEVICE), ids.to(DEVICE)).loss for ids in batches)
    for loss in reversed(list(losses)) if all_forward_first else losses:
        loss.backward()
    return [p.grad for p in model.parameters()]


def assert_all_equal(got, expected):
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_moe-aux-loss", "olmo2"])
@pytest.mark.parametrize("every", [1, 2])
def test_gradients_have_the_same_bits(name, every, kept_tensors=0):
    expected = gradients(new_model(CASES[name], None, kept_tensors))
    assert_all_equal(gradients(new_model(CASES[name], every, kept_tensors)), expected)


def test_gradients_have_the_same_bits_where_blocks_keep_results_or_several_passes_are_under_way():
    test_gradients_have_the_same_bits("llama", 1, kept_tensors=None)
    expected = gradients(new_model(), all_forward_first=True)
    assert_all_equal(gradients(new_model(every=1), all_forward_first=True), expected)


def test_inputs_are_on_the_host_arrive_one_block_ahead_and_their_memory_is_used_again(monkeypatch):
    packed, arrived, unpack = [], [], OffloadedInputs.unpack

    def watched(self, item):
        x = unpack(self, item)
        if isinstance(item, torch.Tensor):  # something else that checkpointing saves
            return x
        arrived.append([other.on_device is not None for other in packed])
        assert torch.equal(x.cpu(), item.values)
        return x

    monkeypatch.setattr(OffloadedInputs, "unpack", watched)
    pack = OffloadedInputs.pack
    monkeypatch.setattr(OffloadedInputs, "pack", lambda self, x: packed.append(pack(self, x)) or packed[-1])
    model = new_model(every=1)
    loss = model(IDS[0].to(DEVICE), IDS[0].to(DEVICE)).loss
    assert [item.on_device is not None for item in packed] == [False, False, True]  # the last one has just left
    assert all(item.values.device.type == "cpu" for item in packed)
    loss.backward()
    assert arrived == [[False, True, False], [True, False, False], [False, False, False]]
    memory = {item.values.data_ptr() for item in packed}
    packed.clear()
    gc.collect()
    model(IDS[1].to(DEVICE), IDS[1].to(DEVICE)).loss.backward()
    assert {item.values.data_ptr() for item in packed} == memory and len(memory) == LAYERS - 1
    packed.clear()
    gc.collect()
    longer = torch.cat([IDS[0], IDS[1]], 1).to(DEVICE)
    model(longer, longer).loss.backward()
    packed.clear()
    gc.collect()
    free = model.model.layers[0].offloaded_inputs.free
    assert sorted(map(len, free)) == [longer.numel() * model.config.hidden_size * 4] * (LAYERS - 1)


def test_the_graph_keeps_no_input(monkeypatch):
    inputs, around = [], OffloadedInputs.around_checkpoint
    watched = lambda self, x: inputs.append(weakref.ref(x)) or around(self, x)  # noqa: E731
    monkeypatch.setattr(OffloadedInputs, "around_checkpoint", watched)
    model = new_model(every=1)
    loss = model(IDS[0].to(DEVICE), IDS[0].to(DEVICE)).loss
    assert loss.requires_grad and [x() for x in inputs] == [None] * (LAYERS - 1)


def test_every_kth_input_is_offloaded_where_the_host_has_no_room_for_all():
    budgets = (100, 99, 50, 49, 40, 39, 30, 29, 20, 19, 10, 9)
    assert [blocks_between([10] * 10, budget) for budget in budgets] == [1, 2, 2, 3, 3, 4, 4, 5, 5, 10, 10, 0]


def test_blocks_without_checkpointing_keep_no_input_on_the_host():
    model = new_model(every=1)
    assert [block.offloaded_inputs is not None for block in model.blocks] == [True, True, True, False]
    model.model.layers[0].keep_activations()
    assert model.model.layers[0].offloaded_inputs is None
