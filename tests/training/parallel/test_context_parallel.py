"""Ranks that share rows of tokens train as one process does."""

import pytest
import torch

import ligermodels
from ligermodels import distributed
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.generation.image_features import ImageFeatures
from ligermodels.layers import context_parallel
from ligermodels.layers.context_parallel import ContextGroup, copies_of_heads, heads_of_rank
from ligermodels.memory.blocks import saved_by_block, saved_by_exchanges
from ligermodels.memory.model import training_memory
from ligermodels.training import TrainConfig
from ligermodels.training.parallel.context_parallel import refuse_unfit_model
from ligermodels.training.parallel.fsdp import make_mesh
from ligermodels.training.preparing import prepare
from tests.conftest import DEVICE
from tests.layers.saved_bytes import saved_by
from tests.training.launching import losses
from tests.training.parallel.test_fsdp import (
    DELTA_EXPERTS,
    LATENTS,
    MAMBA_EXPERTS,
    SELECTIVE,
    SHARED_KEYS,
    SHORT_CONV,
    assert_same_run,
    config,
    forked,
)
from tests.training.parallel.worker import train

CPU = torch.device("cpu")
OFFSETS = [0, 3, 50, 64]  # of a micro-batch of 4 rows of 16 tokens; the long document is on every rank
PACKED = {"offsets": OFFSETS, "steps": 2}
BOUND = 1e-3  # of differences of weights, a twentieth of their change in two steps of Adam
WINDOW = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
GEMMA2 = {"sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}
SINKS = {"sliding_window": 6, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
LONG_ROPE = {
    "original_max_position_embeddings": 32, "partial_rotary_factor": 1.0, "pad_token_id": 0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]},
}  # fmt: skip
BALANCED = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
STATES = {"offsets": [0, 3, 31, 48, 64]}  # one document begins a token before a rank's part, one with a rank's part
DELTA_RULE = STATES | {"model": DELTA_EXPERTS}
MAMBA2 = STATES | {"model": MAMBA_EXPERTS}
SHORT = STATES | {"model": SHORT_CONV}
RUNS = {  # name: (settings of both runs, further settings of the run on two ranks)
    "llama": ({"model": config("llama", False)}, {}),
    "a window, tied, checkpointed": ({"model": config("qwen2", True) | WINDOW}, {"checkpointed_blocks": 1}),
    "softcap": ({"model": config("gemma2", True) | GEMMA2}, {}),
    "sinks": ({"model": config("gpt_oss", False) | SINKS}, {}),
    "one key-value head": ({"model": config("llama", False) | {"num_key_value_heads": 1}}, {}),
    "unequal head sizes": ({"model": config("deepseek_v3", False) | LATENTS}, {"checkpointed_blocks": 1}),
    "frequencies by the length of the row": ({"model": config("phi3", False) | LONG_ROPE}, {}),
    "keys that other layers read": ({"model": config("gemma4_text", True) | SHARED_KEYS}, {"checkpointed_blocks": 3}),
    "balanced experts": ({"model": config("mixtral", False) | BALANCED}, {}),
    "compiled, selective checkpointing": ({"model": config("llama", False)}, SELECTIVE | {"compiled": True}),
    "LoRA": ({"model": config("llama", False), "lora": "float32"}, {}),
    "gated delta rule": (DELTA_RULE, {"checkpointed_blocks": 2}),
    "Mamba-2": (MAMBA2, {}),
    "short convolutions, compiled": (SHORT, SELECTIVE | {"compiled": True}),
}  # fmt: skip


def test_two_ranks_that_share_rows_train_like_one_process(launcher, tmp_path, on_cpu):
    shared = [PACKED | common | only | {"context": 2} for common, only in RUNS.values()]
    for (name, (common, _)), got in zip(RUNS.items(), forked(launcher, 2, tmp_path, shared), strict=True):
        alone = train(**PACKED | common)
        assert_same_run(got, alone, name, BOUND)


def test_four_ranks_train_like_one_process(launcher, tmp_path, on_cpu):
    """Two and two share rows, with replicas of the model; then all four, also where they have copies of heads."""
    model = {"model": config("llama", False)}
    heads = {"model": config("gpt_oss", False) | SINKS | {"num_attention_heads": 6}}
    runs = [PACKED | each for each in (model, heads, DELTA_RULE, MAMBA2, SHORT)]
    settings = [model | PACKED | {"context": 2, "dp_replicate": 2}, *(each | {"context": 4} for each in runs)]
    two, *four = forked(launcher, 4, tmp_path, settings)
    assert_same_run(two, train(**model, **PACKED, accumulate=2), "two", BOUND)
    for got, each in zip(four, runs, strict=True):
        assert_same_run(got, train(**each), each["model"]["model_type"], BOUND)


def test_random_rows_are_shared_as_those_of_documents_are(launcher):
    run = ["--model", "llama", "--data", "random", "--steps", "3", "--sequence-length", "64", "--batch-size", "4"]
    launcher.succeed(*run, "--output", "random-alone")
    launcher.succeed(*run, "--context-parallel", "2", "--output", "random-shared", ranks=2)
    alone, shared = (launcher.folder / name for name in ("random-alone", "random-shared"))
    assert len(losses(alone)) == 3
    torch.testing.assert_close(losses(shared), losses(alone), rtol=2e-6, atol=0)


def test_heads_are_copied_so_that_ranks_have_equally_many():
    heads = 1, 2, 4, 6, 8, 14
    assert [copies_of_heads(each, 4) for each in heads] == [4, 2, 1, 2, 1, 2]
    assert [heads_of_rank(each, 4) for each in heads] == [1, 1, 1, 3, 2, 7]


def test_a_rank_needs_memory_for_its_part_of_the_tokens():
    """Beside it keeps attention's output twice, of its tokens and of its heads, and copies of a key-value head."""
    raw = config("llama", False) | {"num_key_value_heads": 1}
    model = ligermodels.create(raw, device="meta")
    alone, shared = (training_memory(model, 1, 64 * ranks, torch.float32, context=ranks) for ranks in (1, 4))
    output, copies = 32, 3 * 2 * 8  # elements
    assert shared.activations - alone.activations == 2 * 64 * (output + copies) * 4
    checkpointed = [
        training_memory(model, 1, 64 * ranks, torch.float32, context=ranks, checkpointed_blocks=2).activations
        for ranks in (1, 4)
    ]
    assert checkpointed[0] == checkpointed[1]


def test_the_parts_of_a_row_have_the_features_of_its_images():
    features = ImageFeatures(torch.randn(4, 2), torch.tensor([1, 3, 4, 6]), (torch.randn(4, 2),))
    row = torch.randn(1, 8, 2)
    parts = [(features.part(first, 4), row[:, first : first + 4]) for first in (0, 4)]
    assert torch.equal(torch.cat([part.insert(x) for part, x in parts], 1), features.insert(row))
    assert torch.equal(torch.cat([part.add(0, x) for part, x in parts], 1), features.add(0, row))


SAVING = {  # name: (config, the type of its layers)
    "copies of query heads": (config("llama", False) | {"num_attention_heads": 6, "head_dim": 8}, None),
    "gated delta rule": (DELTA_EXPERTS, "linear_attention"),
    "Mamba-2": (MAMBA_EXPERTS, "mamba"),
    "short convolutions": (SHORT_CONV, "conv"),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", SAVING)
def test_a_rank_saves_what_its_plan_counts(name, monkeypatch):
    raw, kind = SAVING[name]
    monkeypatch.setattr(context_parallel, "all_to_all", lambda x, *_: x.clone())  # the same shape and bytes
    monkeypatch.setattr(ContextGroup, "__init__", lambda context: None)
    context = ContextGroup()
    context.group, context.rank, context.size = None, 1, 4
    ids, models = torch.randint(3, 97, (1, 32 * context.size), device=DEVICE), []
    for layers in (2, 1):
        types = {} if kind is None else {"layer_types": [kind] * layers}
        models.append(ligermodels.create(raw | {"num_hidden_layers": layers} | types, device=DEVICE).train())
    two, one = (saved_by(model, ids, context=context, num_items_in_batch=1) for model in models)
    counted = saved_by_block(models[0].blocks[0], 4) + saved_by_exchanges(models[0].blocks[0], 4, context.size, 1)
    assert (two - one) / 32 == pytest.approx(counted, rel=0.02)


REFUSED = {
    "images": ({"model_type": "mllama"}, 2, "rows whose images are read by cross-attention cannot be divided"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_rows_ranks_cannot_share_are_refused(name):
    raw, ranks, complaint = REFUSED[name]
    model = ligermodels.create(raw["model_type"], size="tiny", device="meta")
    refuse_unfit_model(model, 1)
    with pytest.raises(InputError, match=f"^--context-parallel {ranks}: .*{complaint}"):
        refuse_unfit_model(model, ranks)


def test_settings_that_cannot_be_are_refused_in_one_line():
    settings = {"model": "llama", "data": ("random",), "sequence_length": 63, "context_parallel": 2}
    alone = "--context-parallel 2 does not divide the number of ranks, 1: lower it, or start a multiple of 2 ranks"
    with pytest.raises(InputError, match=f"^{alone}"):
        prepare(TrainConfig(**settings), World(CPU))
    with pytest.raises(InputError, match=r"does not divide --sequence-length 63: give 64$"):
        prepare(TrainConfig(**settings), World(CPU, 0, 2))
    with pytest.raises(
        InputError, match=r"^--sequence-length 4: --context-parallel 2 needs rows of at least 6 tokens$"
    ):
        prepare(TrainConfig(**settings | {"sequence_length": 4}), World(CPU, 0, 2))
    with pytest.raises(InputError, match=r"leave out --packing off$"):
        prepare(TrainConfig(**settings, packing=False), World(CPU, 0, 2))
    with pytest.raises(InputError, match="--context-parallel has no effect under --objective distill"):
        prepare(TrainConfig(**settings, objective="distill"), World(CPU, 0, 2))


def test_forward_refuses_rows_that_ranks_cannot_share(on_cpu):
    world = distributed.World(CPU)
    make_mesh(world, 1)
    model = ligermodels.create(config("llama", False))
    context = ContextGroup(torch.distributed.group.WORLD)
    ids = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="needs the input_ids of one row"):
        model(ids, ids, context=context)
    context.size = 3
    with pytest.raises(ValueError, match="3 ranks cannot share a row of 4 tokens equally"):
        model(ids[:1], ids[:1], context=context)
    context.size = 2
    with pytest.raises(ValueError, match="context goes with packed input_ids, without attention_mask"):
        model(ids[:1], ids[:1], context=context, attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="a convolution reads 2 earlier tokens, but each rank has 1 of a row"):
        ligermodels.create(SHORT_CONV)(ids[:1, :2], ids[:1, :2], context=context)
