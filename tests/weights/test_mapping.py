from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ligermodels.weights.mapping import Concat, Piece, Rename, Stack, packed_gate_up, packed_projections, plan_pieces
from tests.weights.tiny import Tiny, hub_state

QKV = Concat("layers.{}.qkv", ("layers.{}.q", "layers.{}.k", "layers.{}.v"), (4, 2, 2))
EXPERTS = Stack("layers.{}.experts.gate_up", ("layers.{}.moe.{}.gate.w", "layers.{}.moe.{}.up.w"))


def test_a_packed_parameter_is_split_into_boxes_that_tile_it():
    assert plan_pieces({"layers.12.qkv.weight": (8, 3)}, (QKV,)) == [
        Piece("layers.12.q.weight", "layers.12.qkv.weight", (slice(0, 4), slice(0, 3)), (4, 3)),
        Piece("layers.12.k.weight", "layers.12.qkv.weight", (slice(4, 6), slice(0, 3)), (2, 3)),
        Piece("layers.12.v.weight", "layers.12.qkv.weight", (slice(6, 8), slice(0, 3)), (2, 3)),
    ]


def test_one_rule_applies_to_weight_and_bias():
    assert [p.tensor for p in plan_pieces({"layers.0.qkv.bias": (8,)}, (QKV,))] == [f"layers.0.{x}.bias" for x in "qkv"]


def test_a_parameter_that_no_rule_matches_keeps_its_name():
    names = ["layers.0.qkv_norm.weight", "layers.x.qkv.weight", "my.layers.0.qkv.weight", "norm"]
    for piece in plan_pieces(dict.fromkeys(names, (8, 3)), (QKV,)):
        assert piece == Piece(piece.parameter, piece.parameter, (slice(0, 8), slice(0, 3)), (8, 3))


def test_a_rename_applies_to_a_whole_subtree():
    (piece,) = plan_pieces({"model.text.layers.3.norm.weight": (5,)}, (Rename("language_model.model", "model.text"),))
    assert piece.tensor == "language_model.model.layers.3.norm.weight"
    assert piece.parameter == "model.text.layers.3.norm.weight"


def test_a_rename_applies_to_the_pieces_of_its_inner_rules():
    rules = (Rename("text.model", "model", (Concat("model.{}.qkv", ("model.{}.q", "model.{}.k"), (4, 2)),)),)
    assert plan_pieces({"model.7.qkv.weight": (6, 3), "model.norm": (3,), "head": (2,)}, rules) == [
        Piece("text.model.7.q.weight", "model.7.qkv.weight", (slice(0, 4), slice(0, 3)), (4, 3)),
        Piece("text.model.7.k.weight", "model.7.qkv.weight", (slice(4, 6), slice(0, 3)), (2, 3)),
        Piece("text.model.norm", "model.norm", (slice(0, 3),), (3,)),
        Piece("head", "head", (slice(0, 2),), (2,)),
    ]


def test_an_inner_rule_that_leaves_the_renamed_module_is_refused():
    with pytest.raises(ValueError, match=r"other\.w is not below model, the name that its rule renames to text"):
        plan_pieces({"model.w": (1,)}, (Rename("text", "model", (Rename("other", "model"),)),))


def test_a_stacked_parameter_is_split_by_expert_and_then_into_equal_parts():
    name = "layers.12.experts.gate_up"
    assert plan_pieces({name: (2, 6, 5)}, (EXPERTS,)) == [
        Piece("layers.12.moe.0.gate.w", name, (slice(0, 1), slice(0, 3), slice(0, 5)), (3, 5)),
        Piece("layers.12.moe.0.up.w", name, (slice(0, 1), slice(3, 6), slice(0, 5)), (3, 5)),
        Piece("layers.12.moe.1.gate.w", name, (slice(1, 2), slice(0, 3), slice(0, 5)), (3, 5)),
        Piece("layers.12.moe.1.up.w", name, (slice(1, 2), slice(3, 6), slice(0, 5)), (3, 5)),
    ]


def test_experts_with_one_tensor_each_are_one_piece_each():
    down = Stack("layers.{}.experts.down", ("layers.{}.moe.{}.down.w",))
    assert plan_pieces({"layers.0.experts.down": (2, 6, 5)}, (down,)) == [
        Piece(
            f"layers.0.moe.{expert}.down.w",
            "layers.0.experts.down",
            (slice(expert, expert + 1), slice(0, 6), slice(0, 5)),
            (6, 5),
        )
        for expert in range(2)
    ]


def test_experts_that_do_not_split_equally_are_refused():
    with pytest.raises(ValueError, match=r"layers\.0\.experts\.gate_up has 7 rows per expert"):
        plan_pieces({"layers.0.experts.gate_up": (2, 7, 5)}, (EXPERTS,))


def test_packed_projections_and_a_shared_expert_of_another_width():
    config = SimpleNamespace(query_size=8, key_value_size=2, intermediate_size=5)
    rules = (*packed_projections(config), packed_gate_up("mlp.shared_expert"))
    layer = "model.layers.4."
    packed = {"self_attn.qkv_proj.bias": 12, "mlp.gate_up_proj.weight": 10, "mlp.shared_expert.gate_up_proj.weight": 6}
    assert {p.tensor: p.index[0] for p in plan_pieces({layer + name: (n,) for name, n in packed.items()}, rules)} == {
        layer + "self_attn.q_proj.bias": slice(0, 8),
        layer + "self_attn.k_proj.bias": slice(8, 10),
        layer + "self_attn.v_proj.bias": slice(10, 12),
        layer + "mlp.gate_proj.weight": slice(0, 5),
        layer + "mlp.up_proj.weight": slice(5, 10),
        layer + "mlp.shared_expert.gate_proj.weight": slice(0, 3),
        layer + "mlp.shared_expert.up_proj.weight": slice(3, 6),
    }


def test_the_first_matching_rule_is_applied():
    rules = (Rename("a.one", "b.one"), Rename("a.other", "b"))
    assert [p.tensor for p in plan_pieces({"b.one.w": (1,), "b.two.w": (1,)}, rules)] == ["a.one.w", "a.other.two.w"]


def test_sizes_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match=r"layers\.0\.qkv\.weight has 9 rows.*\(4, 2, 2\)"):
        plan_pieces({"layers.0.qkv.weight": (9, 3)}, (QKV,))


def test_two_parameters_for_one_tensor_are_refused():
    with pytest.raises(ValueError, match=r"both a\.w and b\.w map to the checkpoint's a\.w"):
        plan_pieces({"a.w": (1,), "b.w": (1,)}, (Rename("a", "b"),))


def test_the_pieces_of_a_model_equal_the_hand_written_checkpoint():
    model = Tiny()
    parameters = dict(model.named_parameters())
    pieces = plan_pieces({name: p.shape for name, p in parameters.items()}, model.weight_rules())
    expected = hub_state(model)
    assert {piece.tensor for piece in pieces} == set(expected)
    for piece in pieces:
        assert torch.equal(parameters[piece.parameter][piece.index].reshape(piece.shape), expected[piece.tensor])


def test_a_linear_with_lora_has_the_tensors_of_its_base():
    shapes = {"layers.0.qkv.base_layer.weight": (8, 3), "layers.0.qkv.base_layer.bias": (8,)}
    updates = {"layers.0.qkv.lora_A": (6, 3), "layers.0.qkv.lora_B": (8, 2)}
    plain = {name.replace(".base_layer", ""): shape for name, shape in shapes.items()}
    pieces, expected = plan_pieces(updates | shapes, (QKV,)), plan_pieces(plain, (QKV,))
    assert {piece.parameter for piece in pieces} == shapes.keys()
    assert [replace(piece, parameter=piece.parameter.replace(".base_layer", "")) for piece in pieces] == expected
