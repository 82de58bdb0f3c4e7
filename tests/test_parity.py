"""Every family and each of its switches against the reference implementation: logits, loss, SGD step, generation."""

import copy
import statistics

import pytest
import torch

import ligermodels
from ligermodels.weights.mapping import plan_pieces
from tests.cases import CASES
from tests.conftest import DEVICE
from tests.kernels.error_budget import relative_error
from tests.parity import FP32_FACTOR, HALF, check_half_precision, moved, reference_results, results
from tests.reference_model import labels_of, prompt_of, save_reference, tokens
from tests.suites import KINDS_OF_MODELS, of_families, quick

VANISHING = 1e-12  # gradients that are smaller in fp64 are 0, and rounding is left of them
FEW_NUMBERS = 16  # the reference's error of fewer may be tiny by chance: they are allowed that of a typical tensor


# Cases that together reach every kernel and every option of it; the other cases only change the kernels' inputs.
ON_KERNELS = [
    "llama", "llama-mlp-bias", "llama-gelu", "qwen2-sliding", "gemma2", "gemma3_text", "olmo2", "glm4",
    "phi3-longrope-partial", "granite", "mixtral", "qwen2_moe-mlp-only-layers", "gpt_oss", "qwen3_5_text", "qwen3_5",
    "qwen3_next", "deepseek_v3", "lfm2", "gemma4_text-moe", "granitemoehybrid",
]  # fmt: skip
ON_FEW_KERNELS = ["llama", "gemma2", "mixtral", "qwen3_next", "deepseek_v3", "granitemoehybrid"]
# Every kind of norm, QK-norm, RoPE and experts. Every token uses all experts: otherwise rounding can flip the choice
# between two nearly equal experts, an error that cannot be bounded.
IN_HALF_PRECISION = [
    "llama-attention-bias", "qwen2-sliding", "qwen3", "gemma2", "gemma3_text", "olmo2", "olmo3-rope-yarn", "glm",
    "glm4", "granite", "phi3-longrope-long", "smollm3", "ministral3", "exaone4", "hunyuan_v1_dense", "cohere2",
    "glm4_moe-every-expert", "mixtral-every-expert", "qwen2_moe-every-expert", "granitemoe-every-expert",
    "gpt_oss-every-expert", "qwen3_5", "qwen3_next-every-expert", "lfm2", "granitemoehybrid-dense",
    "deepseek_v3-every-expert", "gemma4_text", "gemma4_text-keys-are-values", "gemma4_text-every-expert",
]  # fmt: skip
FEW_IN_HALF_PRECISION = ["llama-attention-bias", "gemma2", "gpt_oss-every-expert", "qwen3_5", "granitemoehybrid-dense"]
GENERATING = [
    *of_families(CASES), "llama-rope-llama3", "llama-tied", "qwen2-sliding",
    "qwen2-layer-types", "qwen3-sliding", "mistral-no-window", "mixtral-window", "qwen2_moe-sliding",
    "qwen3_moe-sliding", "phi3-window", "smollm3-sliding", "olmo3-rope-yarn", "gemma2-untied", "gemma3_text-untied",
    "deepseek_v3-no-query-latent", "deepseek_v3-rope-yarn", "gemma4_text-own-keys", "gemma4_text-keys-are-values",
    "gemma4_text-moe", "granitemoehybrid-groups",
]  # fmt: skip
# Switches whose code is that of all families: one of each is quick, and those that tests/test_sabotage.py breaks.
COMMON_SWITCHES = ("-tied", "-untied", "-every-expert", "-aux-loss")
FEW_OF_COMMON_SWITCHES = [
    "llama-tied", "llava-tied", "lfm2-tied", "gemma-untied", "paligemma-untied", "mixtral-every-expert",
    *(f"{family}-aux-loss" for family in ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe")),
]  # fmt: skip
QUICK = [*(name for name in CASES if not name.endswith(COMMON_SWITCHES)), *FEW_OF_COMMON_SWITCHES]
PACKED = [
    *KINDS_OF_MODELS, "llama-tied", "qwen2-sliding", "smollm3-sliding", "olmo3-rope-yarn",
    "phi3-window",
]  # fmt: skip


def inputs_of(name, length):
    input_ids = tokens(CASES[name], length=length)
    return {"input_ids": input_ids, "labels": labels_of(input_ids)}


def check_parity(name, device=DEVICE, length=23):
    """Compares logits, loss and the change of every weight in one SGD step, in fp32."""
    folder, exact, theirs = reference_results(name, inputs_of, length, step_from_zero=True)
    model = ligermodels.load(folder.name, device=device)
    ours = results(model, moved(inputs_of(name, length), device), step_from_zero=True)
    buffers = {key: buffer.shape for key, buffer in model.stored_buffers().items()}
    untrained = {*model.kept, *(piece.tensor for piece in plan_pieces(buffers, model.export_rules()))}
    assert set(exact) - set(ours) - untrained <= {"lm_head.weight", "language_model.lm_head.weight"}
    reference_errors = {what: relative_error(theirs[what], exact[what]) for what in ours}
    typical = statistics.median(reference_errors.values())
    for what, value in ours.items():
        floor = torch.finfo(torch.float32).eps
        if exact[what].abs().max() < VANISHING:  # key biases without RoPE, which add the same to all scores
            assert value.abs().max() <= FP32_FACTOR * max(theirs[what].abs().max(), floor), what
            continue
        error = relative_error(value, exact[what])
        if value.numel() < FEW_NUMBERS:
            floor = max(floor, typical)
        allowed = FP32_FACTOR * max(reference_errors[what], floor)
        assert error <= allowed, f"{what}: error {error:.1e}, allowed {allowed:.1e}"


@pytest.mark.parametrize("name", quick(CASES, QUICK))
def test_fp32_results_equal_those_of_the_reference(name):
    check_parity(name)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", quick(ON_KERNELS, ON_FEW_KERNELS))
def test_fp32_results_of_the_kernels_equal_those_of_the_reference(name):
    # The interpreter runs one program after another, most of them for one token. LongRoPE changes behind 20.
    check_parity(name, length=23 if DEVICE == "cuda" or "longrope" in name else 10)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", quick(IN_HALF_PRECISION, FEW_IN_HALF_PRECISION))
def test_half_precision_is_within_the_error_budget(name, tmp_path):
    reference = save_reference(CASES[name], tmp_path)
    model = ligermodels.load(tmp_path, dtype=HALF, device=DEVICE)
    inputs = {"input_ids": tokens(CASES[name], length=64 if DEVICE == "cuda" else 12)}  # the interpreter is slow
    check_half_precision(model, reference, inputs, inputs)


def continued(reference, prompt, count, use_cache=True):
    """The reference's greedy continuation of a prompt by `count` tokens."""
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["use_cache"] = use_cache
    row = prompt[None]
    every = torch.ones_like(row)  # without it the padding id, here an ordinary token, would be masked
    return reference.generate(row, attention_mask=every, **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", quick(GENERATING, KINDS_OF_MODELS))
def test_greedy_generation_gives_the_tokens_of_the_reference(name, tmp_path):
    """Prompts longer and shorter than the window, in one batch; the reference runs them separately."""
    reference = save_reference(CASES[name], tmp_path)
    model = ligermodels.load(tmp_path, device=DEVICE)
    # With these seeds the two most likely tokens are never so close that rounding could swap them.
    prompts = [prompt_of(CASES[name], length, seed=500 + length) for length in (1, 3, 9, 14)]
    ours = ligermodels.generate(model, prompts, max_new_tokens=8, stop_tokens=())
    assert ours == [continued(reference, prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("name", ["phi3-longrope-long", "phi3-longrope-partial", "llama-rope-dynamic"])
def test_generation_is_right_across_the_length_where_rope_frequencies_change(name, tmp_path):
    """LongRoPE switches at 20 tokens, also for the earlier tokens. Dynamic scaling starts at 16, for later tokens only.

    The prompts stay below the switch, cross it at the last or at an earlier token, start at it, and start beyond it.
    Some versions of transformers keep the keys from before LongRoPE's switch in their cache: without it they are right.
    """
    reference = save_reference(CASES[name], tmp_path)
    model = ligermodels.load(tmp_path, device=DEVICE)
    for length in (3, 8, 9, 14, 19, 20, 21, 23):
        prompt = tokens(CASES[name], 1, length, seed=length)[0]
        fresh = copy.deepcopy(reference)  # which remembers the longest sequence that it has seen
        truth = continued(fresh, prompt, 12, use_cache="longrope" not in name)
        assert ligermodels.generate(model, [prompt], max_new_tokens=12, stop_tokens=()) == [truth], length


@pytest.mark.parametrize("name", quick(PACKED, KINDS_OF_MODELS))
def test_packed_documents_give_the_results_of_separate_runs(name):
    model = ligermodels.create(CASES[name], device=DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)  # sharp attention, so that attention across documents would show
    lengths = [7, 1, 12, 4]
    row = tokens(CASES[name], 1, sum(lengths)).to(DEVICE)
    cu_seqlens = torch.tensor([0, 7, 8, 20, 24], dtype=torch.int32, device=DEVICE)
    supervised = sum(length - 1 for length in lengths)

    def apart(model, row):
        """Logits and loss of the documents, run separately."""
        documents = row.split(lengths, dim=1)
        losses = [model(d, d, num_items_in_batch=supervised).loss for d in documents]
        return torch.cat([model(d).logits for d in documents], 1).cpu(), torch.stack(losses).sum().cpu()

    logits = model(row, cu_seqlens=cu_seqlens, max_seqlen=12).logits
    loss = model(row, row, cu_seqlens=cu_seqlens, max_seqlen=12, num_items_in_batch=supervised).loss
    exact = apart(copy.deepcopy(model).cpu().double(), row.cpu())
    for packed, separate, truth in zip((logits, loss), apart(model, row), exact, strict=True):
        allowed = FP32_FACTOR * max(relative_error(separate, truth), torch.finfo(torch.float32).eps)
        assert relative_error(packed.cpu(), truth) <= allowed


def test_editing_one_document_does_not_change_another():
    model = ligermodels.create(CASES["llama"], device=DEVICE)
    row = tokens(CASES["llama"], 1, 20).to(DEVICE)
    cu_seqlens = torch.tensor([0, 9, 20], dtype=torch.int32, device=DEVICE)
    before = model(row, cu_seqlens=cu_seqlens).logits
    row[0, 4] = (row[0, 4] + 1) % 99
    after = model(row, cu_seqlens=cu_seqlens).logits
    assert torch.equal(before[:, 9:], after[:, 9:])
    assert not torch.equal(before[:, 4:9], after[:, 4:9])
