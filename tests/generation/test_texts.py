"""Prompts that are texts: what is generated is the text of what token ids give, up to a stop token."""

import copy

import pytest
import torch
from tokenizers import AddedToken

import ligermodels
from ligermodels.errors import InputError
from ligermodels.generation.requests import Request, Sample
from ligermodels.generation.sampling import SamplingOptions
from ligermodels.generation.texts import RowText, StopStrings, model_stop_tokens
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
        return [row.step(token) for token in tokens] + [row.flush()]

    assert pieces(first, second, third) == ["", "", "你", ""]
    assert pieces(first) == ["", "\N{REPLACEMENT CHARACTER}"]


def test_the_text_of_the_prompt_is_left_out_also_where_its_end_is_held_back(tmp_path):
    """Byte tokens are held back until their run ends, which is after the prompt."""
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "llama2"))
    prompt = tokenizer.encode("It is 你")
    assert tokenizer.tokenizer.id_to_token(prompt[-1]) == "<0xA0>"
    more = tokenizer.encode(" one", add_special_tokens=False)
    row = RowText(tokenizer, prompt)
    shown = "".join(map(row.step, more)) + row.flush()
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


@pytest.mark.parametrize(
    ("stop", "text"), [("</s>", "It is你"), ("你</s>", "It is"), ("</s> two", "It is你"), ("three", "It is你 two")]
)
def test_stop_strings_see_special_tokens_which_are_not_shown(tmp_path, stop, text):
    """The last byte token before one is held back for a next byte."""
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "llama2"))
    ids = [*tokenizer.encode("It is你"), tokenizer.eos_token_id, *tokenizer.encode(" two", add_special_tokens=False)]
    assert tokenizer.tokenizer.id_to_token(ids[ids.index(tokenizer.eos_token_id) - 1]) == "<0xA0>"
    options = SamplingOptions(stop=stop)
    request = Request(0, 0, [1], len(ids), frozenset(), options, 0, ())
    sample = Sample(request, 0, [], RowText(tokenizer, ()), StopStrings(options.stop))
    for token in ids:
        if sample.finish_reason is None:
            sample.append(token, 0.0)
    assert sample.completion().text.replace("  ", " ") == text
    assert sample.finish_reason == ("length" if stop == "three" else "stop")


def test_a_special_token_as_a_stop_string_ends_a_row(model):
    tokenizer = copy.copy(new_tokenizer())  # which other tests share
    tokenizer.tokenizer = copy.deepcopy(tokenizer.tokenizer)
    prompts = tokenizer.encode_batch(TEXTS)[:1]
    whole = sampled(model, prompts, stop_tokens=())[0]
    token = whole[6]
    special = AddedToken(tokenizer.tokenizer.id_to_token(token), special=True, normalized=False)
    tokenizer.tokenizer.add_special_tokens([special])
    tokenizer.special_ids = frozenset({token})
    [row] = sampled(model, prompts, stop_tokens=(), stop=special.content, tokenizer=tokenizer)
    assert row == whole[: whole.index(token) + 1]
