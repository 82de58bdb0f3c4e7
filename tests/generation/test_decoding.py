"""Seeds, stop tokens and refusals of generate. The parity tests check greedy decoding against the reference."""

import warnings

import pytest
import torch

import ligermodels
from ligermodels.errors import InputError
from ligermodels.generation import decoding
from ligermodels.generation.capacity import longest_request
from ligermodels.generation.sampling import CACHE_TOKENS
from ligermodels.generation.texts import model_stop_tokens
from tests.cases import LLAMA
from tests.conftest import DEVICE


def model():
    return ligermodels.create(LLAMA, device=DEVICE).eval()


def test_equal_seeds_give_equal_tokens():
    runs = [ligermodels.generate(model(), [[5, 6]], max_new_tokens=8, temperature=1.0, seed=s) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_a_row_ends_at_its_stop_token_while_other_rows_continue():
    free = ligermodels.generate(model(), [[5, 6], [9]], max_new_tokens=8, stop_tokens=())
    assert [len(row) for row in free] == [8, 8]
    stop = free[0][3]
    stopped = ligermodels.generate(model(), [[5, 6], [9]], max_new_tokens=8, stop_tokens=[stop])
    for row, unstopped in zip(stopped, free, strict=True):
        end = unstopped.index(stop) + 1 if stop in unstopped else 8
        assert row == unstopped[:end]


def test_stop_tokens_come_from_generation_config_or_else_from_config():
    network = model()
    assert model_stop_tokens(network) == {2}
    network.generation_config = {"eos_token_id": [7, 8]}
    assert model_stop_tokens(network) == {7, 8}


def test_an_empty_prompt_is_refused():
    for prompts in ([[5], []], [[]]):
        with pytest.raises(InputError, match="a prompt is empty"):
            ligermodels.generate(model(), prompts, max_new_tokens=1)


def test_a_number_of_new_tokens_below_zero_is_refused_and_without_prompts_there_is_nothing():
    with pytest.raises(InputError, match="max_new_tokens is -5; must be at least 1"):
        ligermodels.generate(model(), [[5]], max_new_tokens=-5)
    assert ligermodels.generate(model(), [], max_new_tokens=4) == []
    assert list(ligermodels.stream(model(), [], 4)) == []


@pytest.mark.parametrize(
    ("function", "prompt", "new", "options", "message"),
    [
        (
            ligermodels.generate,
            [5] * 20_000,
            3,
            {},
            "a prompt of 20,000 tokens and 3 new ones is longer than the 16,384",
        ),
        (ligermodels.stream, [5] * 20_000, 3, {}, "a prompt of 20,000 tokens and 3 new ones is longer than the 16,384"),
        (ligermodels.generate, [5, 6], 10**12, {}, "2 tokens and 1,000,000,000,000 new ones is longer than the 16,384"),
        (ligermodels.generate, [5], 3, {"n": 10**9, "temperature": 1.0}, "n is 1000000000, but the engine runs 256"),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_before_it_gets_a_cache(
    function, prompt, new, options, message, monkeypatch
):
    monkeypatch.setattr(decoding, "Engine", None)
    with pytest.raises(InputError, match=message):
        function(ligermodels.create(LLAMA), [prompt], max_new_tokens=new, **options)


def test_a_prompt_may_be_as_long_as_the_model_was_trained_for():
    model = ligermodels.create(LLAMA | {"max_position_embeddings": 20_000})
    assert longest_request(model, 1) == 20_000
    assert longest_request(ligermodels.create(LLAMA), 1) == CACHE_TOKENS == 16_384


def test_a_prompt_of_numbers_that_are_not_whole_is_refused():
    with pytest.raises(InputError, match=r"5\.7 is not a token id"):
        ligermodels.generate(model(), [[5.7]], max_new_tokens=1)


def test_samples_of_a_prompt_are_consecutive_rows():
    options = {"max_new_tokens": 5, "n": 2, "temperature": 1.0, "seed": 1, "stop_tokens": ()}
    rows = ligermodels.generate(model(), [[5, 6], [9, 8]], **options)
    assert rows[:2] == ligermodels.generate(model(), [[5, 6]], **options) and rows[0] != rows[1]
    ids = torch.tensor([[5, 6], [9, 8]], device=DEVICE)
    whole = model().generate(ids, **options)
    assert whole.tolist() == [[*prompt, *row] for prompt, row in zip([[5, 6]] * 2 + [[9, 8]] * 2, rows, strict=True)]
    assert len(ligermodels.generate(model(), [[5]], **options | {"max_new_tokens": 0})) == 2


def test_an_end_of_text_token_beyond_the_vocabulary_is_never_drawn():
    network = model()
    network.generation_config = {"eos_token_id": [7, 1000]}
    assert model_stop_tokens(network) == {7}
    assert ligermodels.generate(network, [[5]], max_new_tokens=2)


@pytest.mark.parametrize("token", [-1, LLAMA["vocab_size"]])
def test_a_token_id_outside_the_vocabulary_is_refused(token):
    with pytest.raises(InputError, match=f"token id {token} is outside the vocabulary of {LLAMA['vocab_size']}"):
        ligermodels.generate(model(), [[5], [6, token]], max_new_tokens=1)


def ropes(rope_type, **scaling):
    return {"max_position_embeddings": 100, "rope_scaling": {"rope_type": rope_type, **scaling}}


LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 20}


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({"max_position_embeddings": 100}, 100),
        (ropes("dynamic", factor=2.0), 200),
        (ropes("linear", factor=4.0), 400),
        (ropes("yarn", factor=4.0, original_max_position_embeddings=40), 160),
        (ropes("yarn", factor=2.0, original_max_position_embeddings=40), 100),
        (ropes("llama3", **LLAMA_3), 100),
    ],
)
def test_the_trained_length_is_that_of_the_config_stretched_by_its_scaling(changes, length):
    assert type(model().config).from_dict(LLAMA | changes).trained_length == length


def test_generating_beyond_the_trained_length_warns_when_it_happens():
    network = ligermodels.create(LLAMA | {"max_position_embeddings": 8}, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "attention over packed documents in float32")
        rows = ligermodels.generate(network, [[5, 6, 7]], max_new_tokens=6, stop_tokens=())  # the last is not read
        stopped = ligermodels.generate(network, [[5, 6, 7]], max_new_tokens=99, stop_tokens=rows[0][:1])
    assert [len(rows[0]), len(stopped[0])] == [6, 1]
    with pytest.warns(UserWarning, match="longer than the 8 tokens that the model was trained for") as caught:
        warnings.filterwarnings("ignore", "attention over packed documents in float32")
        assert len(ligermodels.generate(network, [[5], [5, 6, 7]], max_new_tokens=9, stop_tokens=())[0]) == 9
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="longer than the 8 tokens"):
        next(ligermodels.stream(network, [[5] * 9], 1))
