"""`generate` of transformers continues prompts with our models as with its own: token by token."""

import pytest
import torch
from transformers import MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ligermodels.errors import InputError
from ligermodels.integrations.transformers import GenerationCache
from tests.interop.models import FAMILIES, KINDS, VOCABULARY

PROMPTS = torch.randint(5, VOCABULARY, (2, 14), generator=torch.Generator().manual_seed(3))
PADDED = torch.ones_like(PROMPTS)
PADDED[0, :5] = 0
LENGTH = {"max_new_tokens": 10, "pad_token_id": 0, "eos_token_id": None}
STRATEGIES = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "beam search": {"num_beams": 3},
    "beam search with sampling": {"num_beams": 2, "do_sample": True},
    "several beams": {"num_beams": 4, "num_return_sequences": 2},
    "penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "stop token": {"eos_token_id": list(range(40, 60))},
    "prefill in chunks": {"prefill_chunk_size": 4},
}
ONE_ROW = {"prompt lookup"}


def generate(model, prompts=PROMPTS, **options):
    torch.manual_seed(0)
    return model.eval().generate(prompts, **(LENGTH | options))


@pytest.mark.parametrize(
    ("family", "padding"), [("llama", "no padding"), *((family, "left padding") for family in FAMILIES)]
)
def test_tokens_are_those_of_transformers_own_model(family, padding, folders):
    ours, reference = (KINDS[kind](folders[family]) for kind in ("face", "transformers"))
    for name, options in STRATEGIES.items():
        rows = slice(0, 1) if name in ONE_ROW else slice(None)
        mask = PADDED[rows] if padding == "left padding" and name not in ONE_ROW else torch.ones_like(PROMPTS[rows])
        options = {"max_new_tokens": 7, "attention_mask": mask} | options
        got, expected = (generate(m, PROMPTS[rows], **options) for m in (ours, reference))
        assert torch.equal(got, expected), name


def test_longrope_switches_the_frequencies_of_all_positions(folders):
    """Within the generated tokens, where the cache is filled again."""
    model = KINDS["face"](folders["phi3-longrope-long"])
    assert PROMPTS.shape[1] < model.bare.config.longrope_switch_length < PROMPTS.shape[1] + LENGTH["max_new_tokens"]
    assert torch.equal(generate(model), generate(model, use_cache=False))


def test_dynamic_frequencies_follow_the_length(folders):
    ours, reference = (KINDS[kind](folders["llama-rope-dynamic"]) for kind in ("face", "transformers"))
    assert torch.equal(generate(ours), generate(reference))


def test_an_assistant_changes_no_token(folders):
    model, assistant = KINDS["face"](folders["llama"]), KINDS["face"](folders["mistral"])
    prompt = PROMPTS[:1]
    assert torch.equal(generate(model, prompt, assistant_model=assistant), generate(model, prompt))
    assert torch.equal(generate(model, prompt, assistant_model=model), generate(model, prompt))


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append("end")


class StopAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **_):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_streamers_and_stopping_criteria_work(folders):
    streamer, stop = Collector(), StoppingCriteriaList([StopAt(18), MaxTimeCriteria(3600)])
    tokens = generate(KINDS["face"](folders["llama"]), PROMPTS[:1], streamer=streamer, stopping_criteria=stop)
    assert tokens.shape[1] == 18
    assert streamer.tokens == [*tokens[0].tolist(), "end"]


def test_scores_and_hidden_states_are_those_of_transformers_own_model(folders):
    everything = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    got, expected = (generate(KINDS[kind](folders["llama"]), **everything) for kind in ("face", "transformers"))
    torch.testing.assert_close(got.scores, expected.scores, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.hidden_states, expected.hidden_states, rtol=1e-4, atol=1e-4)


def test_a_loop_of_ones_own_continues_the_cache(folders):
    """Without a length known before: the cache grows."""
    model = KINDS["face"](folders["mistral"])
    expected = model(PROMPTS).logits
    cache, logits = None, []
    for columns in PROMPTS.split(3, 1):
        position = 0 if cache is None else cache.get_seq_length()
        positions = torch.arange(position, position + columns.shape[1]).expand_as(columns)
        out = model(columns, past_key_values=cache, position_ids=positions, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-4)
    assert isinstance(cache, GenerationCache) and cache.get_seq_length() == PROMPTS.shape[1]
    with pytest.raises(ValueError, match="do not continue those of the cache"):
        model(PROMPTS[:, :1], past_key_values=cache, position_ids=torch.zeros(2, 1, dtype=torch.int64))


def test_a_cache_with_other_numbers_is_refused(folders):
    with pytest.raises(InputError, match="cache_implementation 'quantized' is not supported"):
        generate(KINDS["face"](folders["llama"]), cache_implementation="quantized")
