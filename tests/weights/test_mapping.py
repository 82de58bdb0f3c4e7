import pytest
import torch

from ligermodels.weights.mapping import Concat, Piece, Rename, plan
from tests.weights.tiny import Tiny, hub_state

QKV = Concat("layers.{}.qkv", ("layers.{}.q", "layers.{}.k", "layers.{}.v"), (4, 2, 2))


def test_a_packed_parameter_is_split_into_boxes_that_tile_it():
    assert plan({"layers.12.qkv.weight": (8, 3)}, (QKV,)) == [
        Piece("layers.12.q.weight", "layers.12.qkv.weight", (slice(0, 4), slice(0, 3)), (4, 3)),
        Piece("layers.12.k.weight", "layers.12.qkv.weight", (slice(4, 6), slice(0, 3)), (2, 3)),
        Piece("layers.12.v.weight", "layers.12.qkv.weight", (slice(6, 8), slice(0, 3)), (2, 3)),
    ]


def test_one_rule_serves_weight_and_bias():
    assert [p.tensor for p in plan({"layers.0.qkv.bias": (8,)}, (QKV,))] == [f"layers.0.{x}.bias" for x in "qkv"]


def test_a_tensor_that_no_rule_names_keeps_its_name():
    names = ["layers.0.qkv_norm.weight", "layers.x.qkv.weight", "my.layers.0.qkv.weight", "norm"]
    for piece in plan(dict.fromkeys(names, (8, 3)), (QKV,)):
        assert piece == Piece(piece.parameter, piece.parameter, (slice(0, 8), slice(0, 3)), (8, 3))


def test_a_rename_carries_a_whole_subtree():
    (piece,) = plan({"model.text.layers.3.norm.weight": (5,)}, (Rename("language_model.model", "model.text"),))
    assert piece.tensor == "language_model.model.layers.3.norm.weight"
    assert piece.parameter == "model.text.layers.3.norm.weight"


def test_the_first_rule_that_matches_decides():
    rules = (Rename("a.one", "b.one"), Rename("a.other", "b"))
    assert [p.tensor for p in plan({"b.one.w": (1,), "b.two.w": (1,)}, rules)] == ["a.one.w", "a.other.two.w"]


def test_sizes_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match=r"layers\.0\.qkv\.weight has 9 rows.*\(4, 2, 2\)"):
        plan({"layers.0.qkv.weight": (9, 3)}, (QKV,))


def test_two_parameters_for_one_tensor_are_refused():
    with pytest.raises(ValueError, match=r"both a\.w and b\.w map to the checkpoint's a\.w"):
        plan({"a.w": (1,), "b.w": (1,)}, (Rename("a", "b"),))


def test_the_plan_of_a_model_is_the_hand_written_checkpoint():
    model = Tiny()
    parameters = dict(model.named_parameters())
    pieces = plan({name: p.shape for name, p in parameters.items()}, model.weight_rules())
    expected = hub_state(model)
    assert {piece.tensor for piece in pieces} == set(expected)
    for piece in pieces:
        assert torch.equal(parameters[piece.parameter][piece.index].reshape(piece.shape), expected[piece.tensor])
