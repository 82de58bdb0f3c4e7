"""Prompts that are texts: what is generated is the text of what token ids give, up to a stop token."""

import pytest
import torch

import ligermodels
from ligermodels.errors import InputError
from ligermodels.generation.texts import RowText, model_stop_tokens
from ligermodels.tokenizer import Tokenizer
from tests.conftest import DEVICE
from tests.interop.folders import new_tokenizer, tiny_model
from tests.tokenizer.folders import write_folder

TEXTS = ["Once upon a time", "The fox é"]


@pytest.fixture(scope="module")
def model():
    """Random weights: most tokens are parts of words, and some are parts of a character."""
    return tiny_model("llama").to(DEVICE).eval()


def text_of(prompt, ids):
    """What the ids add to the text of the prompt."""
    return new_tokenizer().decode(prompt + ids)[len(new_tokenizer().decode(prompt)) :]


def sampled(model, prompts, **options):
    return ligermodels.generate(model, prompts, max_new_tokens=24, temperature=1.5, seed=3, **options)


def test_texts_give_the_texts_of_what_their_ids_give(model):
    tokenizer = new_tokenizer()
    prompts = tokenizer.encode_batch(TEXTS)
    ids = sampled(model, prompts, stop_tokens=())
    expected = [text_of(prompt, row) for prompt, row in zip(prompts, ids, strict=True)]
    assert sampled(model, TEXTS, tokenizer=tokenizer, stop_tokens=()) == expected
    assert all(len(text) > 24 for text in expected) and "\N{REPLACEMENT CHARACTER}" in "".join(expected)
    stops = [ids[0][5], ids[1][9]]
    cut = [
        text_of(prompt, row[: min(map(row.index, {*stops} & {*row}))]) for prompt, row in zip(prompts, ids, strict=True)
    ]
    assert sampled(model, TEXTS, tokenizer=tokenizer, stop_tokens=stops) == cut != expected
    assert ligermodels.generate(model, TEXTS, max_new_tokens=0, tokenizer=tokenizer) == ["", ""]


def test_an_incomplete_character_is_held_back_until_its_row_ends():
    tokenizer = new_tokenizer()
    first, second, third = tokenizer.encode("你", add_special_tokens=False)

    def pieces(*tokens):
        row = RowText(tokenizer, [0])
        return [row.step(token) for token in tokens] + [row.end()]

    assert pieces(first, second, third) == ["", "", "你", ""]
    assert pieces(first) == ["", "\N{REPLACEMENT CHARACTER}"]


def test_the_text_of_the_prompt_is_left_out_also_where_its_end_is_held_back(tmp_path):
    """Byte tokens are held back until their run ends, which is after the prompt."""
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "llama2"))
    prompt = tokenizer.encode("It is 你")
    assert tokenizer.tokenizer.id_to_token(prompt[-1]) == "<0xA0>"
    more = tokenizer.encode(" one", add_special_tokens=False)
    row = RowText(tokenizer, prompt)
    shown = "".join(map(row.step, more)) + row.end()
    assert shown == tokenizer.decode(prompt + more)[len(tokenizer.decode(prompt)) :] and "one" in shown


def test_a_stream_of_texts_has_a_piece_of_every_row_and_step(model):
    tokenizer = new_tokenizer()
    steps = list(ligermodels.stream(model, TEXTS, 24, tokenizer=tokenizer, temperature=1.5, seed=3))
    assert len(steps) == 24 and {len(pieces) for pieces in steps} == {2}
    assert ["".join(row) for row in zip(*steps, strict=True)] == sampled(model, TEXTS, tokenizer=tokenizer)


def test_the_end_of_text_token_of_the_tokenizer_ends_a_row_too(model):
    tokenizer, prompt = new_tokenizer(), [[0, 5, 6]]
    ids = sampled(model, prompt)[0]
    tokenizer.named["eos_token"], before = tokenizer.tokenizer.id_to_token(ids[4]), tokenizer.named["eos_token"]
    try:
        assert model_stop_tokens(model, tokenizer) - model_stop_tokens(model) == {ids[4]}
        assert sampled(model, prompt, tokenizer=tokenizer) == [ids[: ids.index(ids[4]) + 1]]  # ids give ids
    finally:
        tokenizer.named["eos_token"] = before


def test_texts_without_a_tokenizer_of_ours_are_refused(model):
    for prompts, options, message in (
        (["a"], {}, "tokenizer is missing; texts need that of ligermodels.load_tokenizer"),
        (["a"], {"tokenizer": object()}, "tokenizer is of type object; texts need"),
        ("a", {"tokenizer": new_tokenizer()}, "prompts is one text; pass a list of texts"),
        (["a", [5]], {"tokenizer": new_tokenizer()}, r"texts\[1\]: is list; must be a string"),
    ):
        with pytest.raises(InputError, match=message):
            ligermodels.generate(model, prompts, max_new_tokens=1, **options)


def test_stop_strings_end_rows_of_token_ids_too(model):
    tokenizer, prompts = new_tokenizer(), new_tokenizer().encode_batch(TEXTS)
    whole = sampled(model, prompts, stop_tokens=())[0]
    stop = text_of(prompts[0], whole[:9])[-3:]
    row, _ = sampled(model, prompts, stop_tokens=(), stop=stop, tokenizer=tokenizer)
    assert row == whole[: len(row)] and len(row) <= 9 and stop in text_of(prompts[0], row)
    ids = torch.tensor(prompts[:1], device=DEVICE)
    options = {"max_new_tokens": 24, "temperature": 1.5, "seed": 3, "stop_tokens": ()}
    assert model.generate(ids, stop=stop, tokenizer=tokenizer, **options).tolist() == [prompts[0] + row]
    with pytest.raises(InputError, match="stop strings need a tokenizer"):
        model.generate(ids, stop=stop, **options)
