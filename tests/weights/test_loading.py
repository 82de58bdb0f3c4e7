import re

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ligermodels.weights.files import SINGLE_FILE, CheckpointError
from ligermodels.weights.loading import load_weights
from tests.weights.tiny import HIDDEN, Tiny, TinyConfig, hub_state, randomized


def tied():
    return Tiny(TinyConfig(tie_word_embeddings=True))


def equal(model, other) -> bool:
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    return all(n == m and torch.equal(p, q) and p.dtype == q.dtype for (n, p), (m, q) in pairs)


def zeroed(model):
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.fixture
def source():
    return randomized(Tiny())


def error_message(model, folder) -> str:
    """The message of the CheckpointError, after checking that nothing was copied."""
    zeroed(model)
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, folder)
    assert all(not p.any() for p in model.parameters())
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_every_parameter_is_filled_from_the_hub_names(folder, source):
    save_file(hub_state(source), folder / SINGLE_FILE)
    model = zeroed(Tiny())
    load_weights(model, folder)
    assert equal(model, source)


def other_state(model):
    """The model's checkpoint in its other layout: packed, below `model.language_model`."""
    return {
        re.sub("^model", "model.language_model", name): parameter.detach().clone()
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("stored_twice", [False, True])
@pytest.mark.parametrize("make", [Tiny, tied])
def test_another_layout_fills_the_same_parameters(folder, make, stored_twice):
    source, model = randomized(make()), zeroed(make())
    state = other_state(source)
    if stored_twice:
        state["lm_head.weight"] = source.lm_head.weight.detach().clone()
    save_file(state, folder / SINGLE_FILE)
    load_weights(model, folder)
    assert equal(model, source)


def test_another_layout_is_checked_as_strictly(folder, source):
    state = other_state(source) | {"score.weight": torch.zeros(1)}
    state["model.language_model.norm.weight"] = torch.zeros(HIDDEN + 1)
    save_file(state, folder / SINGLE_FILE)
    message = error_message(Tiny(), folder)
    assert "missing" not in message and "1 unexpected: score.weight" in message
    assert "1 of the wrong shape: model.language_model.norm.weight is [7] instead of [6]" in message


def test_if_no_layout_is_complete_the_error_refers_to_that_with_most_of_the_tensors(folder, source):
    state = other_state(source)
    del state["model.language_model.norm.weight"]
    save_file(state, folder / SINGLE_FILE)
    message = error_message(Tiny(), folder)
    remedy = "; download it again, or correct its config.json"
    assert message.endswith(f": 1 missing: model.language_model.norm.weight{remedy}")


def test_if_no_layout_has_any_tensor_the_error_refers_to_the_hubs_own(folder, source):
    state = {f"other.{name}": tensor for name, tensor in hub_state(source).items()}
    save_file(state, folder / SINGLE_FILE)
    message = error_message(Tiny(), folder)
    assert f"{len(state)} missing: model.embed_tokens.weight" in message
    assert f"{len(state)} unexpected: other." in message


def test_parameters_keep_their_dtype(folder, source):
    save_file({name: x.bfloat16() for name, x in hub_state(source).items()}, folder / SINGLE_FILE)
    model = Tiny()
    load_weights(model, folder)
    assert equal(model, source.bfloat16().float())


def test_missing_unexpected_and_wrongly_shaped_tensors_are_listed_in_one_error(folder, source):
    state = hub_state(source)
    del state["model.layers.1.self_attn.k_proj.bias"], state["model.norm.weight"]
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(HIDDEN, 5)
    state["score.weight"] = torch.zeros(1)
    state["lm_head.weight"] = state["lm_head.weight"].to(torch.uint8)
    save_file(state, folder / SINGLE_FILE)
    message = error_message(Tiny(), folder)
    assert "2 missing: model.layers.1.self_attn.k_proj.bias, model.norm.weight" in message
    assert "1 unexpected: score.weight" in message
    assert "1 of the wrong shape: model.layers.0.mlp.up_proj.weight is [6, 5] instead of [5, 6]" in message
    assert "1 not floating point (quantized?): lm_head.weight is torch.uint8" in message


def test_long_lists_are_shortened(folder):
    save_file({"x": torch.zeros(1)}, folder / SINGLE_FILE)
    assert " and 35 more; 1 unexpected: x" in error_message(Tiny(), folder)


def test_stale_rotary_buffers_are_ignored(folder, source):
    stale = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "rotary_emb.inv_freq": torch.zeros(4)}
    save_file(hub_state(source) | stale, folder / SINGLE_FILE)
    model = Tiny()
    load_weights(model, folder)
    assert equal(model, source)


@pytest.mark.parametrize("stored_twice", [False, True])
def test_a_tied_model_stays_tied_whether_its_head_is_stored_or_not(folder, stored_twice):
    source, model = randomized(tied()), tied()
    state = hub_state(source)
    assert "lm_head.weight" not in state
    if stored_twice:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, folder / SINGLE_FILE)
    load_weights(model, folder)
    assert equal(model, source)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    "change", [lambda x: x + 1, lambda x: x.double(), lambda x: x[1:], lambda x: x.reshape(HIDDEN, -1)]
)
def test_a_tied_model_whose_stored_head_differs_is_refused(folder, change):
    state = hub_state(randomized(tied()))
    state["lm_head.weight"] = change(state["model.embed_tokens.weight"]).clone().contiguous()
    save_file(state, folder / SINGLE_FILE)
    message = error_message(tied(), folder)
    assert "lm_head.weight differs from model.embed_tokens.weight" in message
    assert "tie_word_embeddings to false" in message


def test_an_untied_model_without_a_stored_head_is_refused(folder):
    save_file(hub_state(tied()), folder / SINGLE_FILE)
    assert "1 missing: lm_head.weight" in error_message(Tiny(), folder)


def test_a_model_that_lost_its_tie_is_refused(folder):
    model = tied()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        load_weights(model, folder)


def test_meta_parameters_are_refused(folder):
    with torch.device("meta"), pytest.raises(ValueError, match=r"meta device: model\.embed_tokens\.weight.*to_empty"):
        load_weights(Tiny(), folder)


def as_shard(parameter, mesh, placements):
    shape, _ = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    stride = parameter.stride()
    local = torch.full(shape, float("nan"))
    return torch.nn.Parameter(
        DTensor.from_local(local, mesh, placements, run_check=False, shape=parameter.shape, stride=stride)
    )


def shard(model, mesh, placements):
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, as_shard(parameter, mesh, placements))
    return model


@pytest.mark.parametrize("ranks", [2, 3, 7, 16])
def test_each_rank_reads_exactly_its_own_rows(folder, source, rank_of, ranks, read_lengths):
    """Also with rows that do not divide evenly, packed boxes that span two shards, and ranks without rows."""
    save_file({name: x.bfloat16() for name, x in hub_state(source).items()}, folder / SINGLE_FILE)
    locals_by_name = {name: [] for name, _ in source.named_parameters()}
    for rank in range(ranks):
        model = shard(Tiny(), rank_of(rank, (ranks,)), [Shard(0)])
        read_lengths.clear()
        load_weights(model, folder)
        assert sum(read_lengths) == sum(2 * parameter.to_local().numel() for parameter in model.parameters())
        for name, parameter in model.named_parameters():
            locals_by_name[name].append(parameter.to_local().detach())
    for name, parameter in source.bfloat16().float().named_parameters():
        assert torch.equal(torch.cat(locals_by_name[name]), parameter), name


def test_a_replicated_parameter_sharded_by_columns_is_read_by_columns(folder, source, rank_of, read_lengths):
    save_file(hub_state(source), folder / SINGLE_FILE)
    weight = "model.layers.1.mlp.gate_up_proj.weight"
    expected = dict(source.named_parameters())[weight]
    for rank in range(4):
        mesh = rank_of(rank, (2, 2))
        model = Tiny()
        model.model.layers[1].mlp.gate_up_proj.weight = as_shard(expected, mesh, [Replicate(), Shard(1)])
        read_lengths.clear()
        load_weights(model, folder)
        others = sum(parameter.numel() for name, parameter in source.named_parameters() if name != weight)
        assert sum(read_lengths) == 4 * (others + expected.numel() // 2)
        half = slice(0, 3) if rank % 2 == 0 else slice(3, 6)
        assert torch.equal(dict(model.named_parameters())[weight].to_local(), expected[:, half])


def test_a_stacked_parameter_may_be_sharded_within_each_expert(folder, source, rank_of):
    save_file(hub_state(source), folder / SINGLE_FILE)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    expected = dict(source.named_parameters())[name]
    for rank in range(4):
        mesh = rank_of(rank, (2, 2))
        model = Tiny()
        model.model.layers[1].mlp.experts.gate_up_proj = as_shard(expected, mesh, [Shard(0), Shard(1)])
        load_weights(model, folder)
        experts = slice(0, 2) if rank < 2 else slice(2, 3)
        rows = slice(0, 4) if rank % 2 == 0 else slice(4, 8)
        assert torch.equal(dict(model.named_parameters())[name].to_local(), expected[experts, rows])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_by_the_name_of_their_tensor(folder, source, value):
    state = hub_state(source)
    state["model.layers.1.mlp.up_proj.weight"][3, 1] = value
    save_file(state, folder / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight has values that are not"):
        load_weights(Tiny(), folder)


def test_finite_values_are_loaded_where_their_sum_or_another_dtype_is_not_finite(folder, source):
    source.model.embed_tokens.weight.data[0] = 3e38
    save_file(hub_state(source), folder / SINGLE_FILE)
    model = zeroed(Tiny())
    load_weights(model, folder)
    assert equal(model, source)
    with pytest.raises(CheckpointError, match=r"tensor model\.embed_tokens\.weight has values .* finite in float16"):
        load_weights(Tiny().half(), folder)
