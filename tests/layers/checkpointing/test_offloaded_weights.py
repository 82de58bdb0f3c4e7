"""Quantised weights in host memory. On a CPU the copies are those of a GPU, without streams."""

import pytest
import torch

import ligermodels
from ligermodels.adapters.quantising import quantise
from ligermodels.layers.checkpointing.offloaded_weights import OffloadedWeights
from tests.cases import CASES
from tests.conftest import DEVICE

LAYERS = 4
IDS = torch.randint(3, 99, (3, 2, 8), generator=torch.Generator().manual_seed(0)).to(DEVICE)
SIZES = {
    "num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "shared_expert_intermediate_size": 64,
}  # fmt: skip


def new_model(scheme="nf4", offloads=True, name="llama"):
    raw = CASES[name] | SIZES
    model = ligermodels.create(raw, device="meta")
    quantise(model, scheme)
    ligermodels.add_lora(model, rank=2, targets=("all-linear", "experts") if "moe" in name else "all-linear")
    if offloads:
        model.offload_weights(DEVICE)
    model.to_empty(device=DEVICE).checkpoint_activations()
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if not name.endswith("_bytes"):
            p.data.copy_(torch.randn(p.shape, generator=generator) / 8)
    for module in model.modules():
        for weight in getattr(module, "quantised_weights", dict)().values():
            weight.data.copy_(weight.quantize(torch.randn(weight.shape, generator=generator) / 8))
    return model


def results(model, all_forward_first=False):
    """Of passes with gradients and without, in turn, and of generation."""
    losses = (model(ids, ids).loss for ids in IDS)
    found = []
    for loss in reversed(list(losses)) if all_forward_first else losses:
        loss.backward()
        with torch.no_grad():
            found.append(model(IDS[0]).logits)
    found.append(model.generate(IDS[0], max_new_tokens=3))
    return [*found, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize(("scheme", "name"), [("nf4", "llama"), ("fp8", "qwen2_moe")])
@pytest.mark.parametrize("all_forward_first", [False, True])
def test_gradients_logits_and_tokens_have_the_same_bits(name, scheme, all_forward_first):
    expected, found = (results(new_model(scheme, offloads, name), all_forward_first) for offloads in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and expected[-1].any()


def test_weights_come_from_the_host_one_block_ahead_each_once_a_pass(monkeypatch):
    copied, fetch = [], OffloadedWeights.fetch

    def watched(self, index):
        if index not in self.held:
            copied.append(index)
        fetch(self, index)

    monkeypatch.setattr(OffloadedWeights, "fetch", watched)
    model = new_model()
    assert {p.device.type for name, p in model.named_parameters() if name.endswith("_bytes")} == {"cpu"}
    weights, _ = model.blocks[0].offloaded_weights
    loss = model(IDS[0], IDS[0]).loss
    assert copied == [0, 1, 2, 3] and sorted(weights.held) == [2, 3]
    loss.backward()
    assert copied[4:] == [1, 0] and sorted(weights.held) == [0, 1]
    model(IDS[0], IDS[0]).loss.backward()
    assert copied[6:] == [2, 3, 1, 0]
    for memory in weights.on_host:
        memory.zero_()
    assert not torch.equal(model(IDS[0], IDS[0]).loss, loss)


def test_weights_are_read_from_the_buffer_only_while_it_has_them():
    model = new_model()
    model(IDS[0], IDS[0])
    weights = [block.mlp.down_proj.base_layer.weight.data for block in model.blocks]
    buffers = model.blocks[0].offloaded_weights[0].buffers.untyped_storage().data_ptr()
    assert [data.untyped_storage().data_ptr() == buffers for data in weights] == [False, False, True, True]
