"""Log-probabilities of labels by a model, and the loss and log-probabilities of supervised rows alone."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import ligermodels
from ligermodels import distributed, losses
from ligermodels.kernels.losses.linear_logprobs import EXTRAS
from ligermodels.layers.decoder import next_tokens
from ligermodels.training.data.rows.run_rows import supervised_rows
from ligermodels.training.parallel.fsdp import shard
from tests.cases import CASES
from tests.layers.test_forward import EXACT, build, gradients
from tests.reference_model import tokens

FAMILIES = ["llama", "gemma2-final-softcap", "granite-logits-scaling", "qwen3_moe"]
LENGTH = 200  # more than ROWS_MULTIPLE


def batch(name):
    """Two rows, of which a fifth is supervised, and the supervised rows as the collator hands them over."""
    ids = tokens(CASES[name], 2, LENGTH // 2)
    labels = torch.where(torch.rand(ids.shape) < 0.2, ids, -100)
    labels[:, 0] = -100
    return ids, labels, supervised_rows(labels, pinned=False)


def expected_logprobs(model, ids, labels, temperature):
    """[B, T], from all logits."""
    log_probs = (model(ids).logits / temperature).log_softmax(-1)
    targets = next_tokens(labels, None)
    return log_probs.gather(-1, targets.clamp_min(0)[..., None])[..., 0].where(targets != -100, 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities_are_those_of_the_logits_of_all_tokens_and_of_rows(name):
    model = build(name)
    ids, labels, rows = batch(name)
    expected = expected_logprobs(model, ids, labels, 0.7)
    out = model.logprobs(ids, labels, temperature=0.7, entropy=True, extras=EXTRAS)
    torch.testing.assert_close(out.logprobs, expected, **EXACT)
    picked = model.logprobs(ids, labels, temperature=0.7, entropy=True, extras=EXTRAS, rows=rows)
    assert picked.logprobs.shape == (128,) and (picked.logprobs != 0).sum() == (labels != -100).sum()
    for x, y in zip(picked, out, strict=True):
        torch.testing.assert_close(x, y.flatten()[rows], **EXACT)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(
        gradients(model, (expected * upstream).sum()),
        gradients(model, (picked.logprobs * upstream.flatten()[rows]).sum()),
        **EXACT,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_of_supervised_rows_is_that_of_all_tokens(name):
    model = build(name).train()
    ids, labels, rows = batch(name)
    for count in (None, 1000):
        whole = model(ids, labels, num_items_in_batch=count).loss
        picked = model(ids, labels, rows=rows, num_items_in_batch=count).loss
        torch.testing.assert_close(picked, whole, **EXACT)
        torch.testing.assert_close(gradients(model, picked), gradients(model, whole), **EXACT)


def test_padding_and_packed_documents_give_the_log_probabilities_of_each_document():
    model = build("llama")
    ids = tokens(CASES["llama"], 2, 10)
    alone = [model.logprobs(row[None], row[None]).logprobs[0] for row in (ids[0], ids[1, 4:])]
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    padded = model.logprobs(ids, ids, attention_mask=mask).logprobs
    packed = torch.cat([ids[0], ids[1, 4:]])[None]
    offsets = torch.tensor([0, 10, 16], dtype=torch.int32)
    together = model.logprobs(packed, packed, cu_seqlens=offsets).logprobs
    torch.testing.assert_close(padded[0], alone[0], **EXACT)
    torch.testing.assert_close(padded[1, 4:], alone[1], **EXACT)
    torch.testing.assert_close(together[0], torch.cat(alone), **EXACT)
    assert not padded[1, :4].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_step_of_dpo_has_a_loss_of_exactly_log_2(dtype):
    """The reference is the same model without gradients, in evaluation mode."""
    model = ligermodels.create("qwen2", size="tiny").to(dtype)
    ids = torch.randint(100, (4, 60))
    labels = torch.where(torch.arange(60) >= torch.tensor([20, 20, 50, 50])[:, None], ids, -100)
    rows = supervised_rows(labels, pinned=False)
    offsets = torch.tensor([0, 40, 80, 90, 100], dtype=torch.int32)
    with torch.no_grad():
        reference = losses.pair_sums(model.eval().logprobs(ids, labels, rows=rows).logprobs, offsets)
    policy = model.train().logprobs(ids, labels, rows=rows).logprobs
    result = losses.dpo(policy, offsets, reference, beta=0.1)
    assert (result.loss / result.pairs).item() == torch.tensor(math.log(2)).item()


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield distributed.start()
    distributed.stop()


@pytest.mark.parametrize("with_rows", [False, True])
@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
def test_a_head_sharded_by_fsdp_gives_the_same_bits(with_rows, world):
    """fp32 weights computed in bf16, as in a run of one process."""
    model = ligermodels.create("llama", size="tiny", seed=0)
    whole = copy.deepcopy(model).bfloat16()
    ids, labels, rows = batch("llama")
    shard(model, world, torch.bfloat16)
    assert isinstance(model.lm_head, FSDPModule)
    inputs = {"rows": rows if with_rows else None, "entropy": True, "extras": ("greedy",)}
    out, expected = (each.logprobs(ids, labels, **inputs) for each in (model, whole))
    assert all(a is b or torch.equal(a, b) for a, b in zip(out, expected, strict=True))
    for result in (out, expected):
        (result.logprobs.sum() - result.entropy.sum()).backward()
    assert torch.equal(model.lm_head.weight.grad.full_tensor(), whole.lm_head.weight.grad.float())


@pytest.mark.parametrize("kind", ["hooked", "replaced"])
def test_a_head_with_hooks_or_another_head_is_called_for_its_logits(kind):
    model = build("gemma2-final-softcap")
    ids, labels, rows = batch("gemma2-final-softcap")
    expected = model.logprobs(ids, labels, temperature=0.7, rows=rows, low_memory=True)
    calls = []
    if kind == "hooked":
        model.lm_head.register_forward_hook(lambda *args: calls.append(args))
    else:
        weight, model.lm_head = model.lm_head.weight, nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)
        model.lm_head.weight = weight
        model.lm_head.register_forward_hook(lambda *args: calls.append(args))
    out = model.logprobs(ids, labels, temperature=0.7, rows=rows, low_memory=True)
    torch.testing.assert_close(out.logprobs, expected.logprobs, **EXACT)
    options = {"row_loss": lambda logprobs, _, rows: logprobs[rows].square().sum(), "borders": [0, 30, 128]}
    loss = model(ids, labels, rows=rows, logprobs=options | {"temperature": 0.7}).loss
    torch.testing.assert_close(loss, expected.logprobs.square().sum(), **EXACT)
    assert len(calls) == 2


def test_neither_loss_nor_logits_are_computed_beside_log_probabilities():
    model = build("llama").eval()
    ids, labels, rows = batch("llama")
    out = model(ids, labels, rows=rows, logprobs={})
    assert out.loss is None and out.logits is None and out["logprobs"].logprobs.shape == rows.shape
    assert model(ids, labels, logprobs={}, skip_logits=False).logits is not None


def test_arguments_that_contradict_each_other_raise():
    model = build("llama")
    ids, labels, rows = batch("llama")
    with pytest.raises(ValueError, match="forward: rows, logprobs and divergence need labels"):
        model(ids, rows=rows)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="are places in the batch as it is given, but its padding"):
        model(ids, labels, rows=rows, attention_mask=mask)
