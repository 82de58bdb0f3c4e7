"""Modules trained as a whole beside LoRA: exchanged with PEFT both ways, merged, and trained in a wider dtype."""

import json
import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file

import ligermodels
from ligermodels.errors import CheckpointError, InputError
from ligermodels.layers.lora import lora_modules
from tests.adapters.test_adapters import TENSORS, adapter_config, logits, read_by_peft
from tests.cases import CASES
from tests.layers.adapters import adapt
from tests.reference_model import reference_model, save_reference, tokens
from tests.test_round_trip import FAMILIES, parameters_equal, reread, weights

TWO_LAYERS = {"num_hidden_layers": 2}
LLAMA, GEMMA3 = CASES[FAMILIES["llama"]] | TWO_LAYERS, CASES[FAMILIES["gemma3"]]
TIED = LLAMA | {"tie_word_embeddings": True}
BOTH = ["embed_tokens", "lm_head"]
EMBEDDING, HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"


@torch.no_grad()
def randomize_whole(model):
    """Adds noise to the weights that are trained as a whole."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" not in name:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


CASES_TO_EXPORT = {
    "both": (LLAMA, BOTH, BOTH, [EMBEDDING, HEAD]),
    "the head": (LLAMA, ["lm_head"], ["lm_head"], [HEAD]),
    "tied": (TIED, ["embed_tokens"], BOTH, [EMBEDDING, HEAD]),
    "all norms": (LLAMA, "norm", ["input_layernorm", "norm", "post_attention_layernorm"], 5),
    "the last norm": (LLAMA, ["model.norm"], ["model.norm"], ["base_model.model.model.norm.weight"]),
    "norms of blocks": (
        CASES[FAMILIES["qwen3"]] | TWO_LAYERS,
        ["q_norm", "1.input_layernorm"],
        ["1.input_layernorm", "q_norm"],
        3,
    ),
    "below language_model": (GEMMA3, BOTH, BOTH, 2),
    "beside experts": (CASES[FAMILIES["mixtral"]], BOTH, BOTH, [EMBEDDING, HEAD]),
}


@pytest.mark.parametrize("name", CASES_TO_EXPORT)
def test_peft_the_merged_export_and_load_adapter_give_the_logits_of_our_modules(name, tmp_path):
    raw, names, written, stored = CASES_TO_EXPORT[name]
    save_reference(raw, tmp_path / "in")
    targets = ["all-linear", "experts"] if name == "beside experts" else "all-linear"
    model = adapt(ligermodels.load(tmp_path / "in"), targets=targets, modules_to_save=names)
    before = logits(model, raw)
    expected = logits(randomize_whole(model), raw)
    assert (expected - before).abs().max() > 1e-2

    ligermodels.export_adapter(model, tmp_path / "adapter")
    config = adapter_config(tmp_path / "adapter")
    assert config["modules_to_save"] == sorted(written)
    assert config.get("ensure_weight_tying") is (True if name in ("tied", "below language_model") else None)
    whole = [name for name in load_file(tmp_path / "adapter" / TENSORS) if "lora_" not in name]
    assert sorted(whole) == sorted(stored) if isinstance(stored, list) else len(whole) == stored
    torch.testing.assert_close(logits(read_by_peft(raw, tmp_path / "adapter"), raw), expected, rtol=1e-4, atol=1e-4)

    other = ligermodels.load(tmp_path / "in")
    ligermodels.load_adapter(other, tmp_path / "adapter")
    assert parameters_equal(other, model) and torch.equal(logits(other, raw), expected)
    assert other.modules_to_save == model.modules_to_save
    assert {n for n, p in other.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }
    ligermodels.export(model, tmp_path / "merged")
    assert weights(tmp_path / "merged").keys() == weights(tmp_path / "in").keys()
    torch.testing.assert_close(logits(reread(tmp_path / "merged"), raw), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tying", [False, True])
@pytest.mark.parametrize("names", [["embed_tokens"], ["lm_head"], BOTH, ["norm"]], ids="-".join)
@pytest.mark.parametrize("raw", [LLAMA, TIED], ids=["apart", "tied"])
def test_an_adapter_of_peft_gives_its_logits(raw, names, tying, tmp_path):
    """PEFT trains copies of a tied embedding and head, apart from each other unless ensure_weight_tying is set."""
    save_reference(raw, tmp_path / "in")
    kept = list(names)  # PEFT changes the list
    settings = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=kept, ensure_weight_tying=tying)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the missing base, and of weights that are no longer tied
        theirs = randomize_whole(peft.get_peft_model(reference_model(raw), settings))
        theirs.save_pretrained(tmp_path / "adapter")
    model = ligermodels.load(tmp_path / "in")
    ligermodels.load_adapter(model, tmp_path / "adapter")
    expected = logits(theirs, raw)
    torch.testing.assert_close(logits(model, raw), expected, rtol=1e-4, atol=1e-4)

    ligermodels.export(model, tmp_path / "merged")
    torch.testing.assert_close(logits(ligermodels.load(tmp_path / "merged"), raw), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(reread(tmp_path / "merged"), raw), expected, rtol=1e-4, atol=1e-4)
    untied = raw is TIED and not tying and names != ["norm"]
    merged = json.loads((tmp_path / "merged/config.json").read_text())
    assert merged["tie_word_embeddings"] == (raw is TIED and not untied)
    if untied:
        model = adapt(ligermodels.load(tmp_path / "in"), targets="q_proj", rank=8, alpha=8, modules_to_save=names)
        with pytest.raises(CheckpointError, match="with an embedding and a head that are not tied"):
            ligermodels.load_adapter(model, tmp_path / "adapter")


def trained_whole(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad and "lora_" not in name}


def test_modules_in_a_config_of_peft_are_those_named_to_add_lora():
    by_config, by_name = ligermodels.create(LLAMA), ligermodels.create(LLAMA)
    ligermodels.add_lora(
        by_config, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head", "model.norm"])
    )
    ligermodels.add_lora(by_name, rank=8, alpha=8, targets="q_proj", modules_to_save=["lm_head", "model.norm"])
    assert trained_whole(by_config) == trained_whole(by_name) == {"model.norm.weight", "lm_head.weight"}
    assert by_config.modules_to_save == by_name.modules_to_save == ("model.norm", "lm_head")


@pytest.mark.parametrize("name", ["q_proj", "head", "mlp.gate", "proj", "layernorm2", ""])
def test_a_module_that_is_not_trained_whole_is_refused_with_those_that_can_be(name):
    model = ligermodels.create(CASES["mixtral"])
    if name == "head":  # the end of a name is enough
        ligermodels.add_lora(model, modules_to_save=name)
        assert trained_whole(model) == {"lm_head.weight"}
        return
    message = (
        rf"modules_to_save: '{name}' is neither the embedding nor the head nor a norm; choose from: embed_tokens, "
        "input_layernorm, post_attention_layernorm, norm, lm_head. Projections are trained by LoRA, as its targets"
    )
    with pytest.raises(InputError, match=message):
        ligermodels.add_lora(model, modules_to_save=["lm_head", name])
    assert not any(lora_modules(model)) and all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("raw", [LLAMA, TIED], ids=["apart", "tied"])
def test_fp32_modules_over_a_bf16_base_compute_as_bf16_ones_and_are_exported_in_bf16(raw, tmp_path):
    ids = tokens(raw)
    losses, gradients = [], []
    for dtype in (torch.float32, torch.bfloat16):
        model = ligermodels.create(raw, dtype=torch.bfloat16, seed=1)
        ligermodels.add_lora(model, rank=2, targets="q_proj", modules_to_save=[*BOTH, "norm"], dtype=dtype)
        assert model.dtype == torch.bfloat16 and model.lm_head.weight.dtype == model.model.norm.weight.dtype == dtype
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (raw is TIED)
        losses.append(model(ids, ids).loss)
        losses[-1].backward()
        gradients.append({name: model.get_parameter(name).grad for name in trained_whole(model)})
        ligermodels.export(model, tmp_path / str(dtype))
    assert torch.equal(*losses) and gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert gradient.dtype == torch.float32 and gradient.any()
        expected = gradients[1][name].float()
        assert (gradient - expected).abs().max() <= 0.01 * expected.abs().max(), name
    for file in ("model.safetensors", "config.json"):
        assert len({(tmp_path / str(dtype) / file).read_bytes() for dtype in (torch.float32, torch.bfloat16)}) == 1

    wide = model.float()  # the dtype of what the embedding returns follows
    assert wide(ids).logits.dtype == torch.float32


def test_an_adapter_is_loaded_in_the_dtype_of_the_model_or_of_its_lora(tmp_path):
    save_reference(LLAMA, tmp_path / "in")
    model = adapt(ligermodels.load(tmp_path / "in", dtype="bfloat16"), modules_to_save=BOTH, dtype=torch.float32)
    ligermodels.export_adapter(randomize_whole(model), tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / TENSORS)
    assert torch.equal(stored[EMBEDDING], model.model.embed_tokens.weight) and stored[HEAD].dtype == torch.float32

    narrow = ligermodels.load(tmp_path / "in", dtype="bfloat16")
    ligermodels.load_adapter(narrow, tmp_path / "adapter")
    assert torch.equal(narrow.lm_head.weight, stored[HEAD].bfloat16())
    assert {layer.lora_A.dtype for layer in lora_modules(narrow)} == {torch.float32}
    wide = adapt(ligermodels.load(tmp_path / "in", dtype="bfloat16"), modules_to_save=BOTH, dtype=torch.float32)
    ligermodels.load_adapter(wide, tmp_path / "adapter")
    assert torch.equal(wide.lm_head.weight, stored[HEAD]) and torch.equal(logits(wide, LLAMA), logits(narrow, LLAMA))
    without = adapt(ligermodels.load(tmp_path / "in"))
    with pytest.raises(
        CheckpointError, match=r"different LoRA: modules_to_save is \[\], the adapter's is \['model\.emb"
    ):
        ligermodels.load_adapter(without, tmp_path / "adapter")
