"""Compiled blocks give equal results, and document lengths do not cause unbounded recompilation."""

from operator import itemgetter

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import ligermodels
from ligermodels.errors import InputError
from ligermodels.training.parallel.compilation import compile_blocks
from tests.layers.adapters import adapt
from tests.training.parallel.test_fsdp import DELTA_EXPERTS, KEYS_READ_LATER, MAMBA_EXPERTS, SHORT_CONV, config
from tests.training.parallel.worker import compiling_by

CPU = torch.device("cpu")
DOCUMENTS = [[5], [7, 9], [2, 9, 20], [1, 2, 3, 4]]  # positions where a row of 32 tokens is split into documents


def test_a_compiled_block_recomputes_no_product_that_it_keeps_and_gives_equal_gradients():
    torch._dynamo.reset()
    plain, compiled = (ligermodels.create(config("llama", tied=False), dtype=torch.float64) for _ in range(2))
    compiled.load_state_dict(plain.state_dict())
    compiled.checkpoint_activations(kept_tensors=None)
    with compiling_by("aot_eager"):
        compile_blocks(compiled, CPU)
    ids = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))
    flops = []
    for model in (plain, compiled):
        loss = model(ids, ids).loss
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        counts = counter.get_flop_counts()["Global"]
        flops.append(counts[torch.ops.aten.mm])
    for got, expected in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-12, atol=1e-14)
    gate_up = sum(2 * ids.numel() * block.mlp.gate_up_proj.weight.numel() for block in plain.blocks)
    assert flops[1] - flops[0] == gate_up


def test_document_lengths_do_not_recompile_blocks_and_results_are_equal():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    raw = config("llama", tied=False) | {"num_hidden_layers": 3}
    plain, compiled = (adapt(ligermodels.create(raw)) for _ in range(2))
    for model in (plain, compiled):
        model.checkpoint_activations(1)
    compiled.load_state_dict(plain.state_dict())
    with compiling_by(counter):
        compile_blocks(compiled, CPU)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    graphs = []
    for cuts in DOCUMENTS:
        ids = torch.randint(97, (1, 32), generator=torch.Generator().manual_seed(cuts[0]))
        packed = {"cu_seqlens": torch.tensor([0, *cuts, 32], dtype=torch.int32), "max_seqlen": 32}
        losses = [model(ids, ids, **packed).loss for model in (plain, compiled)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
        sum(losses).backward()
        graphs.append(counter.frame_count)
    for got, expected in zip(compiled.parameters(), plain.parameters(), strict=True):
        if expected.requires_grad:
            torch.testing.assert_close(got.grad, expected.grad, rtol=1e-5, atol=1e-7)
    assert graphs == [2, 4, 4, 4]  # first block and later blocks; once for static, once for dynamic lengths


@pytest.mark.parametrize(
    ("raw", "kept_tensors"),
    [(SHORT_CONV, 0), (KEYS_READ_LATER, 0), (KEYS_READ_LATER, None)],
    ids=["convolutions", "keys that other layers read", "the same, with results kept"],
)
def test_compiled_blocks_with_convolutions_or_the_keys_of_others_give_equal_gradients(raw, kept_tensors):
    """Of packed documents, with the first blocks checkpointed."""
    torch._dynamo.reset()
    plain, compiled = (ligermodels.create(raw, dtype=torch.float64) for _ in range(2))
    compiled.load_state_dict(plain.state_dict())
    compiled.checkpoint_activations(raw["num_hidden_layers"] - 1, kept_tensors)
    with compiling_by("eager"):
        compile_blocks(compiled, CPU)
    ids = torch.randint(97, (1, 12), generator=torch.Generator().manual_seed(0))
    packed = {"cu_seqlens": torch.tensor([0, 5, 12], dtype=torch.int32), "max_seqlen": 7}
    for model in (plain, compiled):
        model(ids, ids, **packed).loss.backward()
    for got, expected in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("raw", [DELTA_EXPERTS, MAMBA_EXPERTS], ids=itemgetter("model_type"))
def test_layers_with_states_are_not_compiled_for_a_cpu(raw):
    with pytest.raises(InputError, match="--compile: this model has layers with states, which need a GPU"):
        compile_blocks(ligermodels.create(raw, device="meta"), CPU)
