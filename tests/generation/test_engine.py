"""The generation engine gives each request what a full forward of its tokens gives, whatever else it runs."""

import weakref

import pytest
import torch

import ligermodels
from ligermodels.errors import InputError
from ligermodels.generation import engine as engine_module
from ligermodels.generation.engine import Engine
from ligermodels.generation.paged_cache import PAGE_SIZE
from ligermodels.generation.rows import RowStates
from tests.cases import CASES
from tests.conftest import DEVICE
from tests.interop.folders import new_tokenizer, tiny_model
from tests.reference_model import prompt_of
from tests.suites import KINDS_OF_MODELS

PROMPTS = (3, 150, 70, 1, 64)  # tokens; windows are of a few, tables of windowed layers of two pages
NEW = 70

pytestmark = pytest.mark.filterwarnings("ignore:the text is longer than")


def build(name):
    """A model in fp64, on a GPU fp32, with sharp attention, so that a key that should not be seen shows."""
    dtype = torch.float64 if DEVICE == "cpu" else torch.float32
    model = ligermodels.create(CASES[name], device=DEVICE).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


def prompts(name, lengths=PROMPTS):
    return [prompt_of(CASES[name], length, seed=length).tolist() for length in lengths]


def run(engine, prompts, **options):
    """The completions of the prompts, in their order."""
    options = {"max_new_tokens": NEW, "stop_tokens": ()} | options
    for prompt in prompts:
        engine.submit(prompt, **options)
    return sorted(engine, key=lambda completion: (completion.request, completion.sample))


def full_forward(model, completion):
    """The logits [new tokens, V] of a full forward that the new tokens were drawn from."""
    row = torch.tensor([[*completion.prompt, *completion.ids]], device=DEVICE)
    with torch.no_grad():
        return model(row[:, :-1]).logits[0, len(completion.prompt) - 1 :]


def check_logprobs(completion, logits):
    """The log-probabilities are those of the softmax of these logits."""
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.ids, device=DEVICE)[:, None])[:, 0]
    exact = {"rtol": 1e-5, "atol": 1e-6} if DEVICE == "cpu" else {"rtol": 1e-4, "atol": 2e-3}  # of logits of some 100
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected.float().cpu(), **exact)


def check_greedy(model, completion):
    """Each token is the most likely one of a full forward of those before it, and has its log-probability."""
    logits = full_forward(model, completion)
    assert completion.ids == logits.argmax(-1).tolist()
    check_logprobs(completion, logits)


def all_free(engine):
    return [len(pool.free) for pool in engine.cache.pools] == [group.pages for group in engine.cache.groups]


@pytest.mark.parametrize("name", KINDS_OF_MODELS)
def test_every_kind_of_model_gives_the_tokens_of_its_full_forward(name, monkeypatch):
    """In a batch of two rows, which three of the prompts enter late; prompts come in pieces of 50 tokens.

    Two of them get a new page while they generate; layers with a window use an earlier one again.
    """
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 50)
    model, lengths = build(name), (3, 188, 60, 1, 64)
    engine = Engine(model, max_tokens=1024, max_rows=2)
    completions = run(engine, prompts(name, lengths), max_new_tokens=8)
    assert [completion.prompt for completion in completions] == prompts(name, lengths)
    for completion in completions:
        assert len(completion.ids) == 8 and completion.finish_reason == "length"
        check_greedy(model, completion)
    assert all_free(engine)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_rows_that_write_to_their_last_pages_at_once_have_a_page_each(name):
    """Without one they would write to the page that belongs to nobody, both at the same places."""
    model = build(name)
    for completion in run(Engine(model, max_tokens=512), prompts(name, (60, 124)), max_new_tokens=80):
        check_logprobs(completion, full_forward(model, completion))


@pytest.mark.parametrize("name", ["llama-rope-dynamic", "phi3-longrope-long"])
def test_frequencies_that_depend_on_the_length_are_those_of_each_request(name, monkeypatch):
    model = build(name)
    lengths = (3, 18, 22, 40)
    alone = [run(Engine(model, max_tokens=128), [prompt], max_new_tokens=25) for prompt in prompts(name, lengths)]
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 7)
    together = run(Engine(model, max_tokens=512, max_rows=3), prompts(name, lengths), max_new_tokens=25)
    assert [completion.ids for completion in together] == [completion.ids for [completion] in alone]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("length", [5, 64, 100])
def test_samples_of_a_request_share_the_pages_of_its_prompt(name, length):
    """Only pages that a sample writes to are its own: the page where the prompt ends, and those behind."""
    model = build(name)
    engine = Engine(model, max_tokens=1024)
    prompt = prompts(name, [length])[0]
    completions = run(engine, [prompt], n=3, temperature=2.0, seed=1)
    assert len({tuple(completion.ids) for completion in completions}) == 3
    for completion in completions:
        check_logprobs(completion, full_forward(model, completion) / 2.0)
    whole = -(-(length + NEW - 1) // PAGE_SIZE)
    shared = length // PAGE_SIZE
    assert engine.cache.pages_needed(length, length + NEW - 1, 3)[0] == shared + 3 * (whole - shared)
    assert all_free(engine)


def test_layers_with_a_window_keep_the_pages_of_their_window():
    engine = Engine(build("gemma2"), max_tokens=4096, max_rows=4)
    full, windowed = engine.cache.groups
    assert full.window is None and full.pages == 64 and full.width == 64
    assert windowed.window == CASES["gemma2"]["sliding_window"] and windowed.width == 2 and windowed.pages == 8


def test_a_sample_ends_at_its_stop_token_and_others_go_on():
    model = build("llama")
    free = run(Engine(model, max_tokens=1024), prompts("llama"))
    stop = free[1].ids[4]
    for completion, whole in zip(
        run(Engine(model, max_tokens=1024), prompts("llama"), stop_tokens=[stop]), free, strict=True
    ):
        stopped = stop in whole.ids
        assert completion.ids == (whole.ids[: whole.ids.index(stop) + 1] if stopped else whole.ids)
        assert completion.finish_reason == ("stop" if stopped else "length")


def test_an_engine_takes_more_requests_and_new_weights_after_it_has_run():
    model = build("llama")
    engine = Engine(model, max_tokens=512)
    first = run(engine, prompts("llama", [5]))
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(-1)
    second = run(engine, prompts("llama", [5]))
    assert first[0].ids != second[0].ids and [first[0].request, second[0].request] == [0, 1]
    check_greedy(model, second[0])


def test_weights_may_be_elsewhere_at_the_next_run():
    """As those that are gathered for each run; on a GPU each run captures its graphs anew."""
    model = build("llama")
    engine = Engine(model, max_tokens=512)
    (expected,) = run(engine, prompts("llama", (3,)))
    elsewhere_before = []
    for _ in range(2):
        for parameter in model.parameters():
            elsewhere_before.append(parameter.data)
            parameter.data = parameter.data.clone()
        (got,) = run(engine, prompts("llama", (3,)))
        assert got.ids == expected.ids


def test_a_run_that_ends_early_leaves_nothing_behind():
    model = build("llama")
    engine = Engine(model, max_tokens=512, max_rows=2)
    for prompt in prompts("llama"):
        engine.submit(prompt, max_new_tokens=9)
    for step in engine.run():
        assert step
        break
    assert all_free(engine) and not engine.waiting and not engine.samples and not engine.launched
    check_greedy(model, run(engine, prompts("llama", [5]))[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "a prompt is empty; give each at least one token"),
        ({"prompt": [5, 99]}, "token id 99 is outside the vocabulary of 99"),
        ({"prompt": [5, -1]}, "token id -1 is outside the vocabulary of 99"),
        ({"prompt": [5, 6.0]}, "6.0 is not a token id, which is a whole number"),
        ({"prompt": torch.tensor([[5, 6]])}, r"\[5, 6\] is not a token id"),
        ({"stop_tokens": [2, 99]}, "token id 99 is outside the vocabulary of 99; leave it out of stop_tokens"),
        ({"stop_tokens": [-1]}, "token id -1 is outside the vocabulary of 99; leave it out of stop_tokens"),
        ({"stop": "."}, "stop strings need a tokenizer; give that of load_tokenizer, or use stop_tokens"),
        ({"top_p": 2}, "top_p is 2; must be a number above 0 and at most 1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; must be at least 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5; must be at least 1"),
        ({"prompt": "text"}, "a prompt is a text; give the engine a tokenizer"),
        ({"n": 5, "temperature": 1.0}, "n is 5, but the engine runs 4 samples at a time"),
        ({"max_new_tokens": 200}, "a prompt of 2 tokens and 200 new ones is longer than the 128 that the engine holds"),
        (
            {"n": 4, "temperature": 1.0, "max_new_tokens": 120},
            "4 samples of a prompt of 2 tokens and 120 new ones need 512 tokens of the cache",
        ),
    ],
)
def test_a_request_that_cannot_run_is_refused_when_it_is_submitted(options, message):
    engine = Engine(build("llama"), max_tokens=256, max_length=128, max_rows=4)
    with pytest.raises(InputError, match=message):
        engine.submit(**{"prompt": [5, 6], "max_new_tokens": 4} | options)
    assert not engine.waiting


@pytest.mark.parametrize("name", ["max_tokens", "max_length", "max_rows"])
def test_an_engine_of_no_size_is_refused(name):
    with pytest.raises(InputError, match=f"{name} is 0; must be at least 1"):
        Engine(ligermodels.create(CASES["llama"]), **{"max_tokens": 64} | {name: 0})


class Interrupted(KeyboardInterrupt):
    pass


@pytest.mark.parametrize("place", ["take", "copy_prompt", "forward", "append"])
def test_an_interrupt_in_any_part_of_a_step_leaves_nothing_allocated(place, monkeypatch):
    """Rows of three samples that share pages; the engine then runs as a new one."""
    model = build("llama")
    engine = Engine(model, max_tokens=1024, max_rows=4)
    owners = {"take": engine.cache, "copy_prompt": engine.cache, "forward": model.model.layers[1], "append": RowStates}
    function, calls = getattr(owners[place], place), []

    def interrupt(*args, **options):
        calls.append(function(*args, **options))
        if len(calls) == 2:
            raise Interrupted
        return calls[-1]

    for prompt in prompts("llama", [70, 3]):
        engine.submit(prompt, max_new_tokens=5, n=2, temperature=1.0, seed=1)
    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(owners[place], place, interrupt)
        list(engine)
    assert all_free(engine) and not engine.waiting and not engine.samples and not engine.launched
    check_greedy(model, run(engine, prompts("llama", [5]))[0])


def test_a_stop_string_that_never_comes_ends_at_the_limit():
    engine = Engine(tiny_model("llama").to(DEVICE).eval(), tokenizer=new_tokenizer(), max_tokens=256)
    for stop in (None, "never\N{SNOWMAN}", [" ", "n"]):
        engine.submit("Once", max_new_tokens=8, stop_tokens=(), stop=stop)
    free, never, spaces = sorted(engine, key=lambda completion: completion.request)
    assert never.text == free.text and never.ids == free.ids and never.finish_reason == "length"
    assert len(free.text) > 8 and spaces.text == free.text[: len(spaces.text)]
    assert all_free(engine)


def test_on_the_cpu_the_size_of_the_cache_must_be_given():
    with pytest.raises(InputError, match="max_tokens is missing; on the CPU"):
        Engine(ligermodels.create(CASES["llama"]))


def test_an_engine_is_freed_with_its_last_reference():
    """Its cache may be most of the memory: it must not wait for the garbage collector."""
    engine = Engine(build("llama"), max_tokens=512)
    run(engine, prompts("llama", [5]))
    pool = weakref.ref(engine.cache)
    del engine
    assert pool() is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error(value, temperature):
    model = build("llama")
    model.model.norm.weight.data[2] = value
    engine = Engine(model, max_tokens=256)
    with pytest.raises(InputError, match=r"the logits of prompt 0, token 0, are not finite: the model's weights have"):
        run(engine, prompts("llama", (3,)), temperature=temperature, seed=0)
    assert not engine.samples
