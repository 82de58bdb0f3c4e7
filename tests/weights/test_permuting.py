"""Tensors that the Hub stores with their elements in another order: queries and gates by head, transposed experts."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import Shard

from ligermodels.weights.exporting import export_weights
from ligermodels.weights.loading import load_weights
from ligermodels.weights.mapping import Concat, Permute, Rename, plan_pieces
from ligermodels.weights.module import HubModule
from ligermodels.weights.stored import runs_of_range
from ligermodels.weights.writing import write_json
from tests.weights.test_loading import as_shard
from tests.weights.tiny import RAW, TinyConfig, randomized

HEADS, DIM, KEYS, HIDDEN, EXPERTS, INNER = 3, 4, 5, 7, 2, 6


class Permuted(HubModule):
    hub_class = "PermutedForCausalLM"

    def __init__(self):
        super().__init__(TinyConfig())
        self.qk = nn.Linear(HIDDEN, 2 * HEADS * DIM + KEYS)
        self.gate_up = nn.Parameter(torch.zeros(EXPERTS, 2 * INNER, HIDDEN))

    def weight_rules(self):
        packed = Concat("qk", ("q", "k"), (2 * HEADS * DIM, KEYS))
        stacked = Rename("experts.w1", "gate_up")
        return (
            Permute(packed, "q", ((HEADS, 2, DIM),), (1, 0, 2)),
            Permute(stacked, "experts.w1", ((EXPERTS,), (HIDDEN,), (INNER, 2)), (0, 3, 2, 1)),
        )


def hub_state(model):
    """The checkpoint, element by element, without the rules under test."""
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    stored = {}
    for kind in ("weight", "bias"):
        packed = state[f"qk.{kind}"]
        rows = [
            packed[part * HEADS * DIM + head * DIM + column]
            for head in range(HEADS)
            for part in range(2)
            for column in range(DIM)
        ]
        stored |= {f"q.{kind}": torch.stack(rows), f"k.{kind}": packed[2 * HEADS * DIM :].clone()}
    gate, up = state["gate_up"][:, :INNER], state["gate_up"][:, INNER:]
    columns = [x[:, i] for i in range(INNER) for x in (gate, up)]  # g0 u0 g1 u1 …
    return stored | {"experts.w1": torch.stack(columns, -1)}


@pytest.fixture
def source():
    return randomized(Permuted())


@pytest.fixture
def folder(source, tmp_path):
    (tmp_path / "in").mkdir()
    save_file(hub_state(source), tmp_path / "in" / "model.safetensors")
    write_json(tmp_path / "in" / "config.json", RAW)
    return tmp_path / "in"


def parameters_equal(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_permuted_tensors_are_loaded_and_written_back(folder, source, tmp_path):
    model = Permuted()
    load_weights(model, folder)
    assert parameters_equal(model, source)
    export_weights(model, tmp_path / "out", source=folder)
    written, stored = (load_file(path / "model.safetensors") for path in (tmp_path / "out", folder))
    assert written.keys() == stored.keys() and all(torch.equal(written[name], stored[name]) for name in stored)


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_each_rank_reads_its_rows_of_permuted_tensors(folder, source, rank_of, ranks, read_lengths):
    parts = {name: [] for name, _ in source.named_parameters()}
    for rank in range(ranks):
        model, mesh = Permuted(), rank_of(rank, (ranks,))
        model.gate_up = as_shard(model.gate_up, mesh, [Shard(1)])
        for name in ("weight", "bias"):
            setattr(model.qk, name, as_shard(getattr(model.qk, name), mesh, [Shard(0)]))
        read_lengths.clear()
        load_weights(model, folder)
        assert sum(read_lengths) == sum(4 * parameter.to_local().numel() for parameter in model.parameters())
        for name, parameter in model.named_parameters():
            parts[name].append(parameter.to_local().detach())
    for name, parameter in source.named_parameters():
        assert torch.equal(torch.cat(parts[name], 1 if name == "gate_up" else 0), parameter), name


def test_a_state_dict_with_the_hubs_names_is_permuted(source):
    model = Permuted()
    model.load_state_dict(hub_state(source))
    assert parameters_equal(model, source)


def test_a_view_of_another_size_is_refused():
    rule = Permute(Rename("q", "w"), "q", ((3, 2),), (1, 0))
    with pytest.raises(ValueError, match=r"q: its rule splits it into \(3, 2, 4\), but its box has the shape \(5, 4\)"):
        plan_pieces({"w": (5, 4)}, (rule,))


def test_runs_cover_every_range_in_order():
    sizes = (3, 2, 4)
    numbers = torch.arange(24).view(sizes)
    for start in range(24):
        for stop in range(start + 1, 25):
            runs = runs_of_range(start, stop, sizes)
            covered = [n for run in runs for n in numbers[run.sides].flatten().tolist()]
            assert covered == list(range(start, stop)) == [n for run in runs for n in range(run.start, run.stop)]
            assert len(runs) <= 2 * len(sizes) - 1
