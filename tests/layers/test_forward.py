"""What a model's forward takes besides token ids, its outputs, and its state dict, over every family."""

import json
import re
import types

import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening

import ligermodels
from ligermodels.generation.kv_cache import KVCache
from ligermodels.hub.models import select_architecture
from tests.cases import CASES
from tests.kernels.error_budget import relative_error
from tests.parity import FP32_FACTOR
from tests.reference_model import prompt_of, reference_model, tokens
from tests.suites import KINDS_OF_MODELS, few_of_each_switch, of_families, quick

LENGTH = 14
FAMILIES = of_families(CASES)
# With the switches that padding concerns, of positions and of which tokens see each other; with those of tied tensors.
FEW = few_of_each_switch(CASES)
PADDED = [*KINDS_OF_MODELS, *(name for name in FEW if re.search("-.*(rope|dynamic|sliding|window|layer-types)", name))]
TIED = [*FAMILIES, *(name for name in FEW if re.search("-.*tied", name))]
EXACT = {"rtol": 1e-9, "atol": 1e-12}  # in fp64: only the order of sums differs


def build(name, **changes):
    """A model in fp64 with sharp attention, so that a token that should not be seen shows."""
    model = ligermodels.create(CASES[name] | changes).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


def padded_batch(name):
    """Rows padded on the left, on the right and on both sides, and where each row's tokens are."""
    # The frequencies of LongRoPE and dynamic scaling depend on the longest row of a call.
    lengths = (10, 10, 10) if "longrope" in name or "dynamic" in name else (10, 5, 8)
    places = [slice(LENGTH - lengths[0], LENGTH), slice(0, lengths[1]), slice(3, 3 + lengths[2])]
    ids = tokens(CASES[name], 3, LENGTH)
    mask = torch.zeros_like(ids)
    for row, place in enumerate(places):
        mask[row, place] = 1
    return ids, mask, places


def gradients(model, loss):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, parameters, allow_unused=True)


@pytest.mark.parametrize("name", quick(PADDED, KINDS_OF_MODELS))
def test_padded_rows_give_the_results_of_unpadded_rows(name):
    model = build(name, output_router_logits=False)
    ids, mask, places = padded_batch(name)
    rows = [ids[row : row + 1, place] for row, place in enumerate(places)]
    supervised = sum(row.shape[1] - 1 for row in rows)
    out = model(ids, ids, attention_mask=mask, num_items_in_batch=supervised, skip_logits=False)
    apart = [model(row, row, num_items_in_batch=supervised, skip_logits=False) for row in rows]
    torch.testing.assert_close(out.loss, sum(each.loss for each in apart), **EXACT)
    for row, (place, each) in enumerate(zip(places, apart, strict=True)):
        torch.testing.assert_close(out.logits[row, place], each.logits[0], **EXACT)
    assert not out.logits[mask == 0].any()
    for got, expected in zip(gradients(model, out.loss), gradients(model, sum(e.loss for e in apart)), strict=True):
        assert (got is None) == (expected is None)
        assert got is None or relative_error(got, expected) <= EXACT["rtol"]  # single numbers may cancel


def test_labels_at_padding_are_ignored_and_a_mask_of_ones_changes_nothing():
    model = build("llama")
    ids, mask, _ = padded_batch("llama")
    ignored = ids.masked_fill(mask == 0, -100)
    losses = [model(ids, labels, attention_mask=mask).loss for labels in (ids, ignored)]
    assert torch.equal(*losses)
    ones = torch.ones_like(ids)
    for same in (ones, ones.bool(), ones.double()):
        assert torch.equal(model(ids, attention_mask=same).logits, model(ids).logits)


def test_a_row_of_padding_alone_changes_nothing():
    model = build("mixtral")
    ids, mask, _ = padded_batch("mixtral")
    mask[1] = 0
    out = model(ids, ids, attention_mask=mask)
    assert torch.equal(out.loss, model(ids[[0, 2]], ids[[0, 2]], attention_mask=mask[[0, 2]]).loss)


MASK = torch.ones(2, 6, dtype=torch.int64)
REFUSED = {
    "has padding between tokens": {"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1], [1] * 6])},
    "has only padding": {"attention_mask": 0 * MASK},
    "values must be 1": {"attention_mask": 2 * MASK},
    "has shape [2, 5]": {"attention_mask": MASK[:, 1:]},
    "has shape [1, 6]": {"attention_mask": MASK[:1]},
    "has shape [2, 1, 6, 6]": {"attention_mask": torch.ones(2, 1, 6, 6)},
    "either attention_mask or cu_seqlens": {"attention_mask": MASK, "cu_seqlens": torch.tensor([0, 6])},
    "position_ids have shape [2, 5]": {"position_ids": MASK[:, 1:]},
    "position_ids have shape [6]": {"position_ids": MASK[0]},
    "must be equal": {"cu_seq_lens_q": torch.tensor([0, 6]), "cu_seq_lens_k": torch.tensor([0, 3, 6])},
    "either input_ids or inputs_embeds": {"inputs_embeds": torch.ones(2, 6, 48)},
    "output_attentions=True is not supported": {"output_attentions": True},
    "use_cache=True is not supported": {"use_cache": True},
    "token_type_ids": {"token_type_ids": MASK},
    "seq_idx is not supported": {"seq_idx": MASK},
}


@pytest.mark.parametrize("message", REFUSED)
def test_arguments_that_cannot_be_used_are_refused(message):
    model = ligermodels.create(CASES["llama"])
    with pytest.raises((ValueError, TypeError)) as error:
        model(torch.ones(2, 6, dtype=torch.int64), **REFUSED[message])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_cache_refuses_masks_of_other_shapes_and_positions_beside_a_mask():
    model, ids = ligermodels.create(CASES["llama"]), torch.ones(2, 6, dtype=torch.int64)
    for mask in (MASK[:1], MASK[:, 1:], torch.ones(2, 1, 6, 6)):
        with pytest.raises(ValueError, match="with a cache it must be"):
            model(ids, attention_mask=mask, cache=KVCache(model.kept_by_layers(), 2, 8, ids.device))
    with pytest.raises(ValueError, match="either attention_mask, which gives positions, or position_ids"):
        model(ids, attention_mask=MASK, position_ids=MASK, cache=KVCache(model.kept_by_layers(), 2, 8, ids.device))


@pytest.mark.parametrize("name", KINDS_OF_MODELS)
def test_restarting_positions_are_packed_documents(name):
    """Over a batch of two rows, which cu_seqlens cannot describe."""
    model, ids = build(name), tokens(CASES[name], 2, 12)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3], [*range(12)]])
    offsets = torch.tensor([0, 5, 8, 12, 24], dtype=torch.int32)
    out = model(ids, ids, position_ids=positions, skip_logits=False)
    packed = ids.view(1, -1)
    expected = model(packed, packed, cu_seqlens=offsets, max_seqlen=12, skip_logits=False)
    torch.testing.assert_close(out.loss, expected.loss, **EXACT)
    torch.testing.assert_close(out.logits.view(1, 24, -1), expected.logits, **EXACT)
    row = model(ids[:1], position_ids=positions[:1]).logits
    torch.testing.assert_close(row, expected.logits[:, :12], **EXACT)


def test_positions_that_continue_leave_rows_as_they_are():
    model, ids = build("llama"), tokens(CASES["llama"], 2, 8)
    assert torch.equal(model(ids, position_ids=torch.arange(8)[None]).logits, model(ids).logits)
    shifted = model(ids, position_ids=torch.arange(5, 13).expand(2, 8)).logits
    torch.testing.assert_close(
        shifted, model(ids).logits, rtol=1e-5, atol=1e-5
    )  # RoPE is relative; its angles are fp32


@pytest.mark.parametrize("flash_attention", [False, True])
def test_the_batches_of_the_padding_free_collator(flash_attention):
    model = build("llama")
    documents = [{"input_ids": tokens(CASES["llama"], 1, n, seed=n)[0].tolist()} for n in (5, 8, 3)]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=flash_attention)(documents)
    assert ("cu_seq_lens_q" in batch) == flash_attention
    row = torch.tensor([[token for document in documents for token in document["input_ids"]]])
    cu_seqlens = torch.tensor([0, 5, 13, 16], dtype=torch.int32)
    assert torch.equal(model(**batch).loss, model(row, row, cu_seqlens=cu_seqlens, max_seqlen=8).loss)


# Per-layer embeddings need the token ids.
@pytest.mark.parametrize("name", [n for n in KINDS_OF_MODELS if not n.startswith("gemma4")])
def test_embeddings_in_place_of_token_ids(name):
    model = build(name)
    ids, mask, _ = padded_batch(name)
    embeddings = model.get_input_embeddings()(ids)
    out = model(inputs_embeds=embeddings, labels=ids, attention_mask=mask, skip_logits=False)
    expected = model(ids, ids, attention_mask=mask, skip_logits=False)
    assert torch.equal(out.loss, expected.loss) and torch.equal(out.logits, expected.logits)
    (gradient,) = torch.autograd.grad(out.loss, embeddings)
    assert gradient[mask == 1].any() and not gradient[mask == 0].any()


@pytest.mark.parametrize("name", quick(TIED, FAMILIES))
def test_the_state_dict_of_the_reference_implementation_gives_its_hidden_states_and_logits(name):
    """Copied, and assigned to a model without memory: its results are then those of the copy, bit by bit."""
    reference, ids = reference_model(CASES[name]), tokens(CASES[name])
    model, assigned = ligermodels.create(CASES[name]), ligermodels.create(CASES[name], device="meta")
    model.load_state_dict(reference.state_dict())
    assigned.load_state_dict(reference.state_dict(), assign=True)
    with torch.no_grad():
        ours, again, theirs = (each(ids, output_hidden_states=True) for each in (model, assigned, reference))
        exact = reference.double()(ids, output_hidden_states=True)
    # The reference has no states of blocks of cross-attention, which it leaves out for texts.
    left_out = getattr(model.config, "cross_attention_layers", ())
    blocks = [number for number in range(len(model.model.layers)) if number not in left_out]
    first, *others, last = ours.hidden_states
    states = first, *(others[number] for number in blocks[:-1]), last
    tensors = [(ours.logits, *states), *((out.logits, *out.hidden_states) for out in (theirs, exact))]
    for got, baseline, truth in zip(*tensors, strict=True):
        allowed = FP32_FACTOR * max(relative_error(baseline, truth), torch.finfo(torch.float32).eps)
        assert relative_error(got, truth) <= allowed
    assert all(map(torch.equal, (again.logits, *again.hidden_states), (ours.logits, *ours.hidden_states)))
    for each in (model, assigned):
        tied = each.config.tie_word_embeddings
        assert (each.get_output_embeddings().weight is each.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_state_dict_has_each_tied_weight_once_and_loads_under_any_name(name):
    model, other = build(name), build(name)
    state, tied = model.state_dict(), model.config.tie_word_embeddings
    assert set(state) == {key for key, _ in model.named_parameters()}
    assert ("lm_head.weight" in state) != tied
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    other.load_state_dict(state, assign=True)
    assert other.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    if tied:
        other = build(name)
        other.load_state_dict({"lm_head.weight": state.pop("model.embed_tokens.weight"), **state})
        assert torch.equal(other.model.embed_tokens.weight, model.lm_head.weight)
    del state["model.norm.weight"]
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight"):
        other.load_state_dict(state)


def test_inside_another_module_both_names_of_a_tied_weight_are_saved_and_stay_tied():
    wrapper = nn.Sequential(build("gemma2"))
    state = {key: value.clone() for key, value in wrapper.state_dict().items()}
    assert torch.equal(state["0.lm_head.weight"], state["0.model.embed_tokens.weight"])
    wrapper.load_state_dict(state, assign=True)
    assert wrapper[0].lm_head.weight is wrapper[0].model.embed_tokens.weight
    wrapper.to("meta").to_empty(device="cpu")
    assert wrapper[0].lm_head.weight is wrapper[0].model.embed_tokens.weight


def test_outputs_by_name_index_and_slice():
    model, ids = ligermodels.create(CASES["llama"]), tokens(CASES["llama"])
    training, plain = model(ids, ids), model.eval()(ids)
    assert training["loss"] is training.loss is training[0] and training.logits is None and len(training[:]) == 1
    assert plain["logits"] is plain.logits is plain[0] and plain["loss"] is None and plain[1:] == ()
    both = model(ids, ids)
    assert both[0] is both.loss and both[1] is both.logits and both[:2] == (both.loss, both.logits)


def test_logits_are_computed_where_they_are_needed():
    model, ids = build("gemma2"), tokens(CASES["gemma2"])
    assert model(ids, ids).logits is None and model(ids).logits is not None
    assert model(ids, ids, skip_logits=False).logits is not None and model(ids, skip_logits=True).logits is None
    assert model.eval()(ids, ids).logits is not None
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, model(ids).logits[:, -2:], **EXACT)


def head_hooked(model):
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * 1.0)


def head_replaced(model):
    head = nn.Linear(48, 99, bias=False)
    head.weight = model.lm_head.weight
    model.set_output_embeddings(head)


def head_patched(model):
    model.lm_head.forward = types.MethodType(lambda self, x: nn.functional.linear(x, self.weight), model.lm_head)


@pytest.mark.parametrize("change", [head_hooked, head_replaced, head_patched])
@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_a_changed_head_is_called_and_its_logits_are_scaled_and_softcapped(name, change):
    model, ids = build(name), tokens(CASES[name])
    plain = model(ids, ids).loss
    expected = gradients(model, plain)
    change(model)
    changed = model(ids, ids, num_items_in_batch=44).loss * 44 / (2 * 22)
    torch.testing.assert_close(changed, plain, **EXACT)
    for ours, theirs in zip(gradients(model, changed), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_the_loss_follows_what_a_hook_of_the_head_returns():
    model, ids = build("llama"), tokens(CASES["llama"])
    model.lm_head.register_forward_hook(lambda module, inputs, logits: torch.zeros_like(logits))
    torch.testing.assert_close(model(ids, ids).loss, torch.tensor(99.0).log().double(), check_dtype=False)


@pytest.mark.parametrize("name", CASES)
def test_config_as_a_dict_is_json_and_builds_the_same_model(name):
    _, config = select_architecture(CASES[name], name)
    model = ligermodels.create(json.loads(json.dumps(config.to_dict())), device="meta")
    assert model.config == config
    assert model.device == torch.device("meta") and model.dtype == torch.float32
    assert model.to(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("name", KINDS_OF_MODELS)
def test_generate_of_left_padded_rows_continues_each_row(name):
    model = build(name).eval()
    prompts = [prompt_of(CASES[name], n, seed=n).tolist() for n in (6, 3, 9)]
    ids = torch.tensor([[0] * (9 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (9 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    expected = ligermodels.generate(model, prompts, max_new_tokens=5, stop_tokens=())
    out = model.generate(ids, mask, max_new_tokens=5, stop_tokens=())
    assert torch.equal(out, torch.cat([ids, torch.tensor(expected)], 1))


def test_generate_pads_behind_a_stop_token():
    model = build("smollm3").eval()  # its padding id is 4
    prompts = torch.tensor([[7, 8, 9], [10, 11, 12]])
    rows = ligermodels.generate(model, prompts, max_new_tokens=6, stop_tokens=())
    stop = rows[0][1]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in rows]
    assert len(cut[0]) < len(cut[1])
    out = model.generate(prompts, max_new_tokens=6, stop_tokens=[stop])
    assert out[:, 3:].tolist() == [row + [4] * (max(map(len, cut)) - len(row)) for row in cut]


@pytest.mark.parametrize("name", KINDS_OF_MODELS)
def test_a_cache_with_left_padded_masks_gives_the_logits_of_whole_rows(name):
    """A prompt padded on the left, then a chunk padded on the left, then single tokens."""
    model, lengths = build(name).eval(), (7, 4)
    rows = tokens(CASES[name], 2, 12)
    cache = KVCache(model.kept_by_layers(), 2, 24, rows.device)

    def padded(starts, stops, width):
        ids, mask = torch.zeros(2, width, dtype=torch.int64), torch.zeros(2, width, dtype=torch.int64)
        for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            ids[row, width - (stop - start) :] = rows[row, start:stop]
            mask[row, width - (stop - start) :] = 1
        return ids, mask

    history = torch.zeros(2, 0, dtype=torch.int64)
    steps = [((0, 0), lengths, 8), (lengths, (8, 7), 4), ((8, 7), (9, 8), 1), ((9, 8), (10, 9), 1)]
    with torch.no_grad():
        for starts, stops, width in steps:
            ids, mask = padded(starts, stops, width)
            history = torch.cat([history, mask], 1)  # the mask of all tokens so far
            logits = model(ids, attention_mask=history, cache=cache).logits[:, -1]
            assert cache.lengths.tolist() == list(stops)
            for row, stop in enumerate(stops):
                expected = model(rows[row : row + 1, :stop]).logits[0, -1]
                torch.testing.assert_close(logits[row], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_gradient_checkpointing_gives_equal_gradients_and_can_be_disabled(name):
    model = build(name)
    ids, mask, _ = padded_batch(name)

    def step():
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x):
            loss = model(ids, ids, attention_mask=mask).loss
        return gradients(model, loss), sum(saved)

    expected, everything = step()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    recomputed, inputs = step()
    model.gradient_checkpointing_disable()
    _, again = step()
    assert inputs < everything == again
    for ours, theirs in zip(recomputed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)
    with pytest.raises(ValueError, match="use_reentrant must be False"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
