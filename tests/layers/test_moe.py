"""The mixture of experts against the reference implementation."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig, Qwen2MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

import ligermodels
from ligermodels.configs.base import Config
from ligermodels.distributed import World
from ligermodels.layers.moe import MoE, load_balancing_loss
from ligermodels.layers.norm import PreNorm, RMSNorm
from ligermodels.training import TrainConfig
from ligermodels.training.checkpoints import Progress
from ligermodels.training.data.rows.packing import Segment
from ligermodels.training.data.rows.run_rows import collate
from ligermodels.training.objectives import RunSetup
from ligermodels.training.objectives.sft import SFT
from tests.cases import CASES, LLAMA
from tests.conftest import DEVICE
from tests.reference_model import labels_of, tokens
from tests.suites import slow

HIDDEN, INNER, SHARED, NUM_EXPERTS, PER_TOKEN = 48, 20, 28, 6, 2


def build(normalize, shared):
    config = Config.from_dict(LLAMA)
    sizes = {"intermediate_size": INNER, "num_experts": NUM_EXPERTS, "experts_per_token": PER_TOKEN}
    moe = MoE(config, **sizes, normalize=normalize, shared_intermediate_size=SHARED if shared else None)
    return randomize(moe), randomize(RMSNorm(HIDDEN, 1e-6))


def randomize(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return module.to(DEVICE)


def gradients(outputs, leaves):
    """Gradients for a fixed random upstream gradient of each output."""
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(y.shape, generator=generator).to(DEVICE) for y in outputs]
    return torch.autograd.grad(outputs, leaves, upstream)


def mixtral(moe):
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=NUM_EXPERTS, num_experts_per_tok=PER_TOKEN
    )
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config).to(DEVICE)
    block.load_state_dict(moe.state_dict())
    return block


def qwen2_moe(moe):
    config = Qwen2MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        shared_expert_intermediate_size=SHARED,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        norm_topk_prob=moe.normalize,
    )
    config._experts_implementation = "eager"
    block = Qwen2MoeSparseMoeBlock(config).to(DEVICE)
    state = moe.state_dict()
    gate, up = state.pop("shared_expert.gate_up_proj.weight").chunk(2)
    block.load_state_dict(state | {"shared_expert.gate_proj.weight": gate, "shared_expert.up_proj.weight": up})
    return block


@pytest.mark.parametrize("path", ["reference", "kernels"])
@pytest.mark.parametrize(
    ("block", "normalize", "shared"), [(mixtral, True, False), (qwen2_moe, False, True), (qwen2_moe, True, True)]
)
def test_output_and_gradients_equal_those_of_the_reference_implementation(block, normalize, shared, path, request):
    if path == "kernels":
        request.getfixturevalue("kernels")
    moe, norm = build(normalize, shared)
    theirs = block(moe)
    x, residual = (torch.randn(2, 5, HIDDEN, device=DEVICE, requires_grad=True) for _ in range(2))
    out, stream, router_logits = moe(PreNorm(norm), x, residual)
    expected = theirs(norm(x + residual))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stream, x + residual)
    torch.testing.assert_close(router_logits, moe.gate(norm(x + residual)).flatten(0, 1))
    names = ["gate.weight", "experts.gate_up_proj", "experts.down_proj"]
    ours, reference = ([dict(m.named_parameters())[name] for name in names] for m in (moe, theirs))
    got, wanted = gradients([out], [x, residual, *ours]), gradients([expected], [x, residual, *reference])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("kernels")
def test_activation_checkpointing_gives_bit_identical_gradients():
    moe, norm = build(normalize=True, shared=True)
    x, residual = (torch.randn(1, 5, HIDDEN, device=DEVICE, requires_grad=True) for _ in range(2))
    leaves = [x, residual, *norm.parameters(), *moe.parameters()]
    plain = gradients(moe(PreNorm(norm), x, residual), leaves)
    recomputed = gradients(checkpoint(moe, PreNorm(norm), x, residual, use_reentrant=False), leaves)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@slow
@pytest.mark.usefixtures("kernels")
def test_the_layer_compiles_to_one_graph_with_equal_gradients():
    moe, norm = build(normalize=True, shared=True)
    x = torch.randn(1, 5, HIDDEN, device=DEVICE, requires_grad=True)
    leaves = [x, *norm.parameters(), *moe.parameters()]

    def step(x):
        out, residual, router_logits = moe(PreNorm(norm), x, None)
        return out + residual, load_balancing_loss((router_logits,), PER_TOKEN)

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for a, b in zip(gradients(step(x), leaves), gradients(compiled(x), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_load_balancing_loss_equals_that_of_the_reference_implementation():
    router_logits = tuple(3 * torch.randn(11, NUM_EXPERTS, requires_grad=True) for _ in range(3))
    expected = load_balancing_loss_func(router_logits, NUM_EXPERTS, PER_TOKEN)
    loss = load_balancing_loss(router_logits, PER_TOKEN)
    torch.testing.assert_close(loss, expected)
    got, wanted = (torch.autograd.grad(value, router_logits) for value in (loss, expected))
    torch.testing.assert_close(got, wanted)


def test_the_load_balancing_loss_counts_tokens_and_no_padding():
    """As the reference implementation, whose attention mask says what is padding."""
    router_logits = tuple(torch.randn(2 * 7, NUM_EXPERTS, requires_grad=True) for _ in range(2))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3]).bool()
    expected = load_balancing_loss_func(router_logits, NUM_EXPERTS, PER_TOKEN, mask)
    loss = load_balancing_loss(router_logits, PER_TOKEN, mask=mask.flatten())
    torch.testing.assert_close(loss, expected)
    got, wanted = (torch.autograd.grad(value, router_logits) for value in (loss, expected))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("packing", [False, True])
def test_rows_of_a_run_are_balanced_without_their_padding(packing):
    config = CASES["mixtral-aux-loss"]
    model = ligermodels.create(config, device=DEVICE)
    row = tokens(config, batch=1).to(DEVICE)
    size = row.shape[1] - 5
    store = SimpleNamespace(tokens=row[0].cpu().numpy(), supervised=None, images=None)
    batch = collate([[Segment(store, 0, size)]], row.shape[1], packing, World(torch.device("cpu"))).to(DEVICE)
    alone = model(row[:, :size], row[:, :size]).aux_loss
    torch.testing.assert_close(model(**batch.arguments()).aux_loss, alone, rtol=1e-5, atol=0)
    assert abs(model(row).aux_loss - alone) > 1e-4


def test_the_load_balancing_loss_of_evenly_used_experts_is_k():
    even = 20 * torch.eye(NUM_EXPERTS) + 20 * torch.eye(NUM_EXPERTS).roll(1, 1)
    loss = load_balancing_loss((even.bfloat16(),), PER_TOKEN)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.tensor(2.0))


def test_the_load_balancing_loss_does_not_depend_on_the_number_of_micro_batches():
    """Two equal rows, in one batch or as two micro-batches.

    If each micro-batch counted the load-balancing loss in full, the second loss would be larger.
    """
    config = CASES["mixtral-aux-loss"]
    model = ligermodels.create(config, device=DEVICE)
    row = tokens(config, batch=1).to(DEVICE)
    labels = labels_of(row)
    supervised = 2 * (labels[:, 1:] != -100).sum()
    together = model(row.repeat(2, 1), labels.repeat(2, 1)).loss
    apart = 2 * model(row, labels, num_items_in_batch=supervised).loss
    torch.testing.assert_close(apart, together, rtol=1e-6, atol=0)
    without = ligermodels.create(config | {"output_router_logits": False}, device=DEVICE)
    assert together > 1.01 * without(row.repeat(2, 1), labels.repeat(2, 1)).loss


@pytest.mark.parametrize("packing", [False, True])
def test_micro_batches_share_the_balance_loss_by_the_tokens_that_routers_see(packing):
    """Rows of three lengths with one supervised token or more: a step's share of a row is that of its tokens."""
    config = CASES["mixtral-aux-loss"]
    model, coefficient = ligermodels.create(config, device=DEVICE), config["router_aux_loss_coef"]
    ids, world = tokens(config, batch=1)[0].numpy(), World(torch.device("cpu"))
    sizes, rows = (9, 5, 12), []
    for number, size in enumerate(sizes):
        supervised = np.arange(len(ids)) >= (size - 1 if number else 1)
        rows.append([Segment(SimpleNamespace(tokens=ids, supervised=supervised, images=None), 0, size)])
    batches = [collate([row], 12, packing, world).to(torch.device(DEVICE)) for row in rows]
    objective = SFT(TrainConfig(model="mixtral"), world)
    objective.config, objective.run = SimpleNamespace(units=3, sequence_length=12), RunSetup(Path())
    objective.data = SimpleNamespace(training=SimpleNamespace(micro_batches=lambda *_: batches))
    work = objective.work(model, Progress())
    assert work.counts.tolist() == [8 + 1 + 1, sum(sizes)]
    loss = sum(objective.loss(model, batch, work).loss for batch in work.batches)
    found = [model(**batch.arguments(), num_items_in_batch=10) for batch in batches]
    alone = [model(**batch.arguments(), num_items_in_batch=10, balance_share=0).loss for batch in batches]
    shared = sum(size / sum(sizes) * out.aux_loss for size, out in zip(sizes, found, strict=True))
    torch.testing.assert_close(loss, sum(alone) + coefficient * shared, rtol=1e-6, atol=0)
    assert abs(loss - sum(out.loss for out in found)) > 1e-5  # that of supervised tokens


def test_four_micro_batches_of_equal_rows_have_the_gradients_of_one_batch():
    config = CASES["mixtral-aux-loss"]
    model = ligermodels.create(config, device=DEVICE)
    row = tokens(config, batch=1).to(DEVICE)
    items, length = 4 * (row.shape[1] - 1), torch.tensor([row.shape[1] - 2], device=DEVICE)
    rows, lengths = row.repeat(4, 1), length.repeat(4)
    together = model(rows, rows, num_items_in_batch=items, row_lengths=lengths, balance_share=1).loss
    apart = sum(
        model(row, row, num_items_in_batch=items, row_lengths=length, balance_share=0.25).loss for _ in range(4)
    )
    leaves = list(model.parameters())
    whole, summed = (torch.autograd.grad(loss, leaves) for loss in (together, apart))
    for one, four in zip(whole, summed, strict=True):
        torch.testing.assert_close(four, one, rtol=1e-4, atol=1e-6)


def test_the_correction_bias_of_a_new_model_is_zero_whatever_its_memory_held():
    model = ligermodels.create(CASES["glm4_moe"], device="meta").to_empty(device=DEVICE)
    buffers = model.stored_buffers()
    for buffer in buffers.values():
        buffer.fill_(torch.nan)
    model.initialize(0)
    assert len(buffers) == 2 and not any(buffer.any() for buffer in model.stored_buffers().values())
