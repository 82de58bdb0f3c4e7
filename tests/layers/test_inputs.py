"""A batch travels through a model as one record."""

import ast
import inspect
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch

import ligermodels.layers
from ligermodels.layers.decoder import Decoder
from ligermodels.layers.inputs import Inputs
from ligermodels.layers.row_layout import AlignedRows, PackedRows

IDS = torch.tensor([[5, 6, 7], [8, 9, 0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
PUBLIC = {"forward"}  # what a model is called with has a name for each option


def functions(path):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


def test_a_decoder_takes_the_batch_as_one_argument():
    assert len(inspect.signature(Decoder.forward).parameters) <= 4  # with self


def test_no_function_of_the_layers_takes_more_than_twelve_arguments():
    long = {
        function.name
        for path in Path(ligermodels.layers.__file__).parent.glob("*.py")
        for function in functions(path)
        if len(function.args.args) + len(function.args.kwonlyargs) > 13  # with self
    }
    assert long <= PUBLIC


def test_a_batch_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Inputs(input_ids=IDS).input_ids = None  # type: ignore[misc]


def test_a_padded_batch_becomes_packed_documents_without_a_mask():
    inputs = Inputs(input_ids=IDS, attention_mask=MASK)
    layout = inputs.layout()
    assert isinstance(layout, PackedRows)
    packed = inputs.rearranged(layout)
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert (packed.attention_mask, packed.max_seqlen, packed.cu_seqlens.tolist()) == (None, 3, [0, 3, 5])
    assert packed.positions().tolist() == [[0, 1, 2, 0, 1]]


def test_padding_moves_to_the_end_of_a_row_with_a_cache():
    class Cache:
        def next_positions(self, count):
            return torch.arange(4, 4 + count)[None]

    inputs = Inputs(input_ids=IDS.flip(1), attention_mask=MASK.flip(1), cache=Cache())
    layout = inputs.layout()
    assert isinstance(layout, AlignedRows)
    aligned = inputs.rearranged(layout)
    assert aligned.input_ids.tolist() == [[7, 6, 5], [9, 8, 0]]
    assert aligned.padding.tolist() == [0, 1]
    assert aligned.positions().tolist() == [[4, 5, 6]]


@pytest.mark.parametrize("embeddings", [None, torch.zeros(2, 3, 4)], ids=["neither", "both"])
def test_tokens_are_ids_or_embeddings(embeddings):
    inputs = Inputs(input_ids=None if embeddings is None else IDS, inputs_embeds=embeddings)
    with pytest.raises(ValueError, match="pass either input_ids or inputs_embeds"):
        inputs.layout()


def test_given_positions_are_kept():
    inputs = replace(Inputs(input_ids=IDS), position_ids=torch.tensor([[3, 4, 5]]))
    assert inputs.positions().tolist() == [[3, 4, 5]]
