"""Layers with states: packed documents are separate, caches give the numbers of whole rows, and initial values."""

import pytest
import torch

import ligermodels
from ligermodels.generation import engine as engine_module
from ligermodels.generation.engine import Engine
from ligermodels.generation.kv_cache import KVCache
from ligermodels.integrations.transformers import GenerationCache
from ligermodels.layers.gated_delta import GatedDeltaNet
from ligermodels.layers.mamba2 import Mamba2
from ligermodels.layers.moe import MoE
from tests.cases import CASES
from tests.conftest import DEVICE
from tests.reference_model import tokens

NAMES = ["qwen3_5_text", "qwen3_next", "lfm2-conv-bias", "granitemoehybrid-time-step-limit"]
LENGTHS = (1, 2, 3, 5, 64, 65)  # shorter than the convolution, at the border of a chunk and beyond it
EXACT = {"rtol": 1e-9, "atol": 1e-11}

pytestmark = pytest.mark.filterwarnings("ignore:the text is longer than")


def build(name, **changes):
    """A model in fp64 whose states matter: weights are five times as large."""
    model = ligermodels.create(CASES[name] | changes, device="cpu").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return model


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_documents_have_the_logits_and_gradients_of_separate_ones(name, checkpointing):
    model = build(name)
    if checkpointing:
        model.checkpoint_activations()
    row, total = tokens(CASES[name], 1, sum(LENGTHS)), sum(length - 1 for length in LENGTHS)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = model(row, row, cu_seqlens=cu_seqlens, num_items_in_batch=total, skip_logits=False)
    apart = [model(x, x, num_items_in_batch=total, skip_logits=False) for x in row.split(LENGTHS, 1) if x.shape[1] > 1]
    torch.testing.assert_close(packed.loss, sum(each.loss for each in apart), **EXACT)
    torch.testing.assert_close(packed.logits[:, 1:], torch.cat([each.logits for each in apart], 1), **EXACT)
    expected = gradients(model, sum(each.loss for each in apart))
    for ours, theirs in zip(gradients(model, packed.loss), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_changing_a_document_does_not_move_another_by_a_bit(name):
    model, row = build(name), tokens(CASES[name], 1, 20)
    embeddings = model.get_input_embeddings()(row).detach().requires_grad_()
    cu_seqlens = torch.tensor([0, 9, 20], dtype=torch.int32)
    before = model(inputs_embeds=embeddings, cu_seqlens=cu_seqlens).logits
    (gradient,) = torch.autograd.grad(before[:, 9:].sum(), embeddings)
    assert not gradient[:, :9].any() and gradient[:, 9:].any()
    row[0, 4] = (row[0, 4] + 1) % 99
    after = model(row, cu_seqlens=cu_seqlens).logits
    assert not torch.equal(before[:, 4:9], after[:, 4:9])
    if any(isinstance(module, MoE) for module in model.modules()):
        # Another token for an expert is another size of its matrix products.
        torch.testing.assert_close(after[:, 9:], before[:, 9:], **EXACT)
    else:
        assert torch.equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_in_pieces_gives_the_logits_of_whole_rows(name):
    """Pieces shorter than the convolution, longer than a chunk, and single tokens; then rows in another order."""
    model, row = build(name), tokens(CASES[name], 2, 85)
    cache, start, found = KVCache(model.kept_by_layers(), 2, 85, row.device), 0, []
    with torch.no_grad():
        for length in (1, 2, 1, 70, 1, 1):
            found.append(model(row[:, start : start + length], cache=cache).logits)
            start += length
        torch.testing.assert_close(torch.cat(found, 1), model(row[:, :start]).logits, **EXACT)
        cache.select_rows(torch.tensor([1, 1, 0]))
        order = row[[1, 1, 0]]
        for place in range(start, start + 3):
            step = model(order[:, place : place + 1], cache=cache).logits
            torch.testing.assert_close(step, model(order[:, : place + 1]).logits[:, -1:], **EXACT)


def test_a_cache_with_states_cannot_be_cropped():
    model, cache = build("qwen3_5_text"), GenerationCache(8)
    with torch.no_grad():
        model(tokens(CASES["qwen3_5_text"], 1, 4), cache=cache.extend(model, 1, 4))
    with pytest.raises(ValueError, match="cannot go back to an earlier token"):
        cache.crop(-1)


@pytest.mark.parametrize("name", NAMES)
def test_samples_of_a_request_have_states_of_their_own(name, monkeypatch):
    """Three samples of each of two prompts, which come in pieces, in an engine of four rows."""
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 7)
    model = build(name)
    engine = Engine(model, max_tokens=512, max_rows=4)
    for length in (18, 3):
        engine.submit(
            tokens(CASES[name], 1, length)[0].tolist(), max_new_tokens=9, n=3, temperature=2.0, seed=1, stop_tokens=()
        )
    samples = list(engine)
    assert len({tuple(sample.ids) for sample in samples}) == 6
    for sample in samples:
        whole = torch.tensor([[*sample.prompt, *sample.ids]])
        with torch.no_grad():
            logits = model(whole[:, :-1]).logits[0, len(sample.prompt) - 1 :] / 2.0
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected.float(), rtol=1e-5, atol=1e-6)


def test_documents_that_share_a_prefix_are_refused():
    model, shared = build("qwen3_5_text"), object()
    assert not model.shares_keys and ligermodels.create(CASES["llama"], device="meta").shares_keys
    row = tokens(CASES["qwen3_5_text"], 1, 6)
    with pytest.raises(ValueError, match="layers with states cannot share the keys of prefixes"):
        model(row, cu_seqlens=torch.tensor([0, 6]).int(), position_ids=torch.arange(6)[None], shared_keys=shared)


def test_initial_values_are_those_of_the_reference():
    model = ligermodels.create(CASES["qwen3_5_text"] | {"linear_num_value_heads": 512}, device=DEVICE)
    [layer, *_] = (module for module in model.modules() if isinstance(module, GatedDeltaNet))
    decay = layer.A_log.exp()
    assert 0.01 <= decay.min() < 0.2 and 15.8 < decay.max() <= 16 and abs(decay.mean() - 8) < 0.6
    assert (layer.dt_bias == 1).all() and (layer.norm.weight == 1).all()
    assert not model.model.norm.weight.any()
    assert abs(layer.conv1d.weight.std() - 0.02) < 2e-3


def test_initial_values_of_mamba2_are_those_of_the_reference():
    model = ligermodels.create(CASES["granitemoehybrid-groups"], device=DEVICE)
    [layer, *_] = (module for module in model.modules() if isinstance(module, Mamba2))
    torch.testing.assert_close(layer.A_log.cpu(), torch.arange(1.0, 7.0).log())
    assert (layer.dt_bias == 1).all() and (layer.D == 1).all() and (layer.norm.weight == 1).all()
    assert not layer.conv1d.bias.any() and abs(layer.conv1d.weight.std() - 0.02) < 4e-3
