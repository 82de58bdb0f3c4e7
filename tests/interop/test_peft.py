"""PEFT on our models adapts the Hub's projections, and trains, merges and saves as on transformers' own models."""

import copy
import pickle
import warnings

import peft
import pytest
import torch
from torch import nn

import ligermodels
from ligermodels.errors import InputError
from ligermodels.layers.packed import PackedLinear, PackedPart
from tests.cases import CASES
from tests.reference_model import labels_of, reference_model, save_reference, tokens

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of tied weights and of missing base models
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TIED, BIASED = {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TWO_LAYERS = {"num_hidden_layers": 2}


def lora(*targets, **settings):
    chosen = {"target_modules": list(targets)} if targets else {}
    return peft.LoraConfig(**({"r": 4, "lora_alpha": 6} | chosen | settings))


CONFIGS = {
    "the usual seven": ("llama", {}, lambda: lora(*SEVEN)),
    "two of three packed": ("mistral", {}, lambda: lora("q_proj", "v_proj")),
    "with biases": ("llama", BIASED, lambda: lora(*SEVEN)),
    "trained biases": ("llama", BIASED, lambda: lora("q_proj", "up_proj", bias="lora_only")),
    "all biases": ("llama", BIASED, lambda: lora("k_proj", bias="all")),
    "tied": ("qwen2", TIED, lambda: lora(*SEVEN)),
    "sandwich norms and windows": ("gemma3_text", {}, lambda: lora("k_proj", "gate_proj", "down_proj")),
    "all-linear": ("llama", {}, lambda: lora(target_modules="all-linear", exclude_modules=["lm_head"])),
    "a pattern": ("llama", {}, lambda: lora(target_modules=r".*\.1\.(self_attn\.[qk]|mlp\.up)_proj")),
    "one layer": ("llama", {}, lambda: lora("v_proj", "o_proj", layers_to_transform=[1])),
    "ranks and alphas": ("llama", {}, lambda: lora("q_proj", "k_proj", rank_pattern={"k_proj": 2}, use_rslora=True)),
    "DoRA": ("llama", {}, lambda: lora("q_proj", "gate_proj", "o_proj", use_dora=True)),
    "head and embedding saved": ("llama", {}, lambda: lora("v_proj", modules_to_save=["lm_head", "embed_tokens"])),
    "head and embedding saved, tied": (
        "qwen2",
        TIED,
        lambda: lora("v_proj", modules_to_save=["lm_head", "embed_tokens"], ensure_weight_tying=True),
    ),
    "a packed part saved": ("llama", {}, lambda: lora("o_proj", modules_to_save=["k_proj"])),
    "an adapted embedding": ("gemma", {}, lambda: lora("embed_tokens", "q_proj")),
    "the Hub packs as we do": ("phi3", {}, lambda: lora("qkv_proj", "gate_up_proj")),
    "the Hub packs one": ("glm", {}, lambda: lora("q_proj", "gate_up_proj")),
    "attention of experts": ("qwen3_moe", {}, lambda: lora("q_proj", "o_proj")),
    "routed experts": ("mixtral", {}, lambda: lora("q_proj", target_parameters=EXPERTS)),
    "one projection of experts": ("qwen3_moe", {}, lambda: lora(target_parameters=EXPERTS[:1], target_modules=[])),
    "shared expert": ("qwen2_moe", {}, lambda: lora("v_proj", "shared_expert.up_proj")),
    "base weights changed": ("llama", {}, lambda: lora("q_proj", "up_proj", init_lora_weights="olora")),
    "IA3": ("llama", {}, lambda: peft.IA3Config(target_modules=["k_proj", "up_proj"], feedforward_modules=["up_proj"])),
    "LoHa": ("llama", {}, lambda: peft.LoHaConfig(r=2, target_modules=["k_proj", "up_proj"])),
    "AdaLoRA": ("llama", {}, lambda: peft.AdaLoraConfig(init_r=4, total_step=9, target_modules=["v_proj", "up_proj"])),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Returns a function: config.json -> transformers' model and ours, with equal weights."""
    folders = {}

    def load_both(family, changes):
        raw = CASES[family] | TWO_LAYERS | changes
        key = repr(raw)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(family)
            save_reference(raw, folders[key])
        return raw, reference_model(raw), ligermodels.load(folders[key])

    return load_both


def randomize(model):
    """Random values for all adapters."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad and not any(f"{part}." in name for part in ("base_layer", "modules_to_save")):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def trained(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adapt_both(load, name):
    family, changes, config = CONFIGS[name]
    raw, theirs, ours = load(family, changes)
    theirs, ours = peft.get_peft_model(theirs, config()), peft.get_peft_model(ours, config())
    assert trained(ours).keys() == trained(theirs).keys()
    randomize(theirs)
    values = trained(theirs)
    with torch.no_grad():
        for key, parameter in trained(ours).items():
            parameter.copy_(values[key])
    return raw, theirs, ours


def step(model, ids):
    """One training step; returns the loss and the gradients."""
    loss = model(input_ids=ids, labels=labels_of(ids)).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in trained(model).items()}
    with torch.no_grad():
        for name, parameter in trained(model).items():
            parameter.sub_(0.01 * gradients[name])
            parameter.grad = None
    return loss, gradients


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_training_equals_that_of_transformers_model(load, name):
    raw, theirs, ours = adapt_both(load, name)
    ids = tokens(raw)
    for _ in range(2):
        assert_close(step(ours, ids), step(theirs, ids))
    assert_close(trained(ours), trained(theirs))
