"""PEFT on our models adapts the Hub's projections, and trains, merges and saves as on transformers' own models."""

import copy

import peft
import pytest
import torch
from safetensors.torch import load_file

import ligermodels
from ligermodels.errors import InputError
from ligermodels.integrations.transformers import TransformersModel
from ligermodels.layers.packed import PackedLinear
from tests.cases import CASES
from tests.kernels.error_budget import relative_error
from tests.reference_model import labels_of, reference_model, save_reference, tokens

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of tied weights and of missing base models
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TIED, BIASED = {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EPSILON = torch.finfo(torch.float32).eps
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
    "an adapted embedding": ("gemma3_text", {}, lambda: lora("embed_tokens", "q_proj")),
    "the Hub packs as we do": ("phi3", {}, lambda: lora("qkv_proj", "gate_up_proj")),
    "the Hub packs one": ("glm", {}, lambda: lora("q_proj", "gate_up_proj")),
    "attention of experts": ("qwen3_moe", {}, lambda: lora("q_proj", "o_proj")),
    **{
        f"all-linear of {family}": (
            family,
            {},
            lambda: lora(target_modules="all-linear", exclude_modules=["lm_head"]),
        )
        for family in ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe")
    },
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

    def load_both(family, changes, read=ligermodels.load):
        raw = CASES[family] | TWO_LAYERS | changes
        key = repr(raw)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(family)
            save_reference(raw, folders[key])
        return raw, reference_model(raw), read(folders[key])  # both in evaluation mode: no dropout

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


def adapt_both(load, name, read=ligermodels.load):
    family, changes, config = CONFIGS[name]
    raw, theirs, ours = load(family, changes, read)
    theirs, ours = peft.get_peft_model(theirs, config()), peft.get_peft_model(ours, config())
    make_equal(ours, theirs)
    return raw, theirs, ours


@torch.no_grad()
def make_equal(ours, theirs):
    """Gives both models the same random adapters, which must have the same names."""
    randomize(theirs)
    values = trained(theirs)
    assert trained(ours).keys() == values.keys()
    for name, parameter in trained(ours).items():
        parameter.copy_(values[name])


def step(model, ids):
    """One training step; returns the loss and the gradients."""
    loss = model(input_ids=ids, labels=labels_of(ids)).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in trained(model).items()}
    with torch.no_grad():
        for name, parameter in trained(model).items():
            parameter.sub_(0.01 * gradients[name])
            parameter.grad = None
    return gradients | {"loss": loss.detach()}


def assert_close(ours, theirs):
    """Differences of at most 1e-5 of the largest value."""
    for name, expected in theirs.items():
        error, scale = (ours[name] - expected).abs().max(), expected.abs().max()
        assert error <= 1e-5 * scale + 1e-7, f"{name}: {error} of {scale}"


def assert_within_budget(ours, theirs, exact):
    """Errors against float64 of at most three times those of transformers' model, whose sums are in another order, and
    a few roundings, where its own error is small by chance."""
    for name, expected in exact.items():
        error, allowed = relative_error(ours[name], expected), 3 * relative_error(theirs[name], expected) + 4 * EPSILON
        assert error <= allowed, f"{name}: {error:.1e}, allowed {allowed:.1e}"


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


# The face for transformers is adapted as the bare model is, and PEFT leaves its head out of "all-linear".
OF_FACE = ("the usual seven", "all biases", "tied", "all-linear of qwen2_moe", "routed experts", "DoRA")
BARE_AND_FACE = [
    *((name, ligermodels.load) for name in CONFIGS),
    *((n, TransformersModel.from_pretrained) for n in OF_FACE),
]


@pytest.mark.parametrize("name, read", BARE_AND_FACE)
def test_training_equals_that_of_transformers_model(load, name, read):
    raw, theirs, ours = adapt_both(load, name, read)
    exact = copy.deepcopy(theirs).double()
    ids = tokens(raw)
    for _ in range(2):
        assert_within_budget(step(ours, ids), step(theirs, ids), step(exact, ids))
    assert_within_budget(trained(ours), trained(theirs), trained(exact))


def outputs(model, ids):
    """Logits of a model with two adapters, in each state that PEFT can bring it to."""
    found = {"first": logits(model, ids)}
    model.set_adapter("second")
    found["second"] = logits(model, ids)
    with model.disable_adapter():
        found["disabled"] = logits(model, ids)
    model.base_model.set_adapter(["default", "second"])
    found["both"] = logits(model, ids)
    model.merge_adapter()
    found["merged"] = logits(model, ids)
    model.unmerge_adapter()
    found["unmerged"] = logits(model, ids)
    model.set_adapter("default")
    found["unloaded"] = logits(model.merge_and_unload(safe_merge=True), ids)
    return found


@pytest.mark.parametrize("read", [ligermodels.load, TransformersModel.from_pretrained])
@pytest.mark.parametrize("name", ["the usual seven", "DoRA", "tied", "routed experts"])
def test_adapters_are_switched_merged_and_unloaded_as_on_transformers_model(load, name, read):
    family, changes, config = CONFIGS[name]
    raw, *models = load(family, changes, read)
    theirs, ours = (peft.get_peft_model(model, config()) for model in models)
    for adapted in (theirs, ours):
        adapted.add_adapter("second", config())
        adapted.set_requires_grad(["default", "second"])
    make_equal(ours, theirs)
    found = outputs(ours, tokens(raw))
    assert_close(found, outputs(theirs, tokens(raw)))
    assert all((found[a] - found[b]).abs().max() > 1e-2 for a, b in (("first", "second"), ("first", "disabled")))
    packed = [module for module in models[1].modules() if isinstance(module, PackedLinear)]
    assert packed and all(module.is_whole for module in packed)


def test_a_merged_model_is_exported_and_an_adapted_one_is_refused(load, tmp_path):
    raw, theirs, ours = adapt_both(load, "the usual seven")
    base = ours.get_base_model()
    with pytest.raises(InputError, match=r"model\.layers\.0\.self_attn\.o_proj has an adapter of PEFT: merge it first"):
        ligermodels.export(base, tmp_path / "out")
    with pytest.raises(InputError, match="has adapters of PEFT; merge them"):
        ligermodels.add_lora(base)
    merged = ours.merge_and_unload()
    ligermodels.export(merged, tmp_path / "out")
    ids = tokens(raw)
    read = logits(ligermodels.load(tmp_path / "out"), ids)
    assert_close({"logits": read}, {"logits": logits(theirs.merge_and_unload(), ids)})


@pytest.mark.parametrize(
    "name", ["the usual seven", "two of three packed", "tied", "the Hub packs one", "both experts"]
)
def test_saved_adapters_have_the_hubs_names_and_are_read_everywhere(load, name, tmp_path):
    family, changes, config = CONFIGS[name] if name in CONFIGS else CONFIGS["routed experts"]
    raw, _, ours = load(family, changes)
    plain = ligermodels.load(ours.source)
    ours = peft.get_peft_model(ours, config())
    randomize(ours)
    expected = {"logits": logits(ours, tokens(raw))}
    ours.save_pretrained(tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert stored.keys() == {key.replace(".default", "") for key in trained(ours)}

    ligermodels.load_adapter(plain, tmp_path / "saved")
    assert_close({"logits": logits(plain, tokens(raw))}, expected)
    ligermodels.export_adapter(plain, tmp_path / "exported")
    for folder in ("saved", "exported"):
        fresh = ligermodels.load(plain.source)
        for model in (peft.PeftModel.from_pretrained(m, tmp_path / folder) for m in (reference_model(raw), fresh)):
            assert_close({"logits": logits(model, tokens(raw))}, expected)


def test_peft_refuses_by_name_what_cannot_be_adapted(load):
    for config, error, message in (
        (
            lora(target_modules="all-linear"),
            InputError,
            r"lm_head cannot have an adapter.*exclude_modules=\['lm_head'\]",
        ),
        (lora("qkv_proj"), ValueError, "PackedLinear.*parts=q_proj, k_proj, v_proj.* is not supported"),
        (lora(target_modules=r".*\.mlp\..*_proj"), ValueError, "PackedLinear.*parts=gate_proj, up_proj"),
        (lora("query"), ValueError, "query"),
    ):
        with pytest.raises(error, match=message):
            peft.get_peft_model(ligermodels.create(CASES["llama"]), config)
    model = ligermodels.create(CASES["llama"])
    ligermodels.add_lora(model)
    with pytest.raises(
        InputError, match="q_proj, k_proj, v_proj: the linear that packs them was replaced, as LoRA does"
    ):
        peft.get_peft_model(model, lora("q_proj"))


def test_the_causal_language_model_of_peft_generates(load):
    raw, _, ours = load("llama", {})
    ids = tokens(raw)[:1]
    expected = ours.generate(ids, max_new_tokens=4)
    model = peft.get_peft_model(ours, lora(*SEVEN, task_type="CAUSAL_LM"))
    assert torch.equal(model.generate(ids, max_new_tokens=4), expected)
    assert isinstance(model.get_base_model().model.embed_tokens._forward_hooks, dict)
    assert not model.get_base_model().model.embed_tokens._forward_hooks  # none that makes embeddings require gradients


LORA_CONFIGS = {
    name: CONFIGS[name]
    for name in ("the usual seven", "a pattern", "one layer", "the Hub packs one", "routed experts", "shared expert")
} | {
    "all but": ("llama", {}, lambda: lora("q_proj", "down_proj", exclude_modules=["0.self_attn.q_proj"])),
    "ranks, alphas": (
        "llama",
        {},
        lambda: lora("v_proj", "o_proj", rank_pattern={"o_proj": 2}, alpha_pattern={"v_proj": 3}, use_rslora=True),
    ),
    "all-linear": ("llama", {}, lambda: lora(target_modules="all-linear")),
    "layers below a name": (
        "llama",
        {},
        lambda: lora("q_proj", layers_to_transform=[1], layers_pattern="layers"),
    ),
}


@pytest.mark.parametrize("name", LORA_CONFIGS)
def test_add_lora_takes_the_configuration_of_peft(load, name, tmp_path):
    """The adapters that PEFT adds to transformers' model: their names, shapes and effect."""
    family, changes, config = LORA_CONFIGS[name]
    raw, theirs, ours = load(family, changes)
    theirs = peft.get_peft_model(theirs, config())
    randomize(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    ligermodels.add_lora(ours, config())
    ligermodels.export_adapter(ours, tmp_path / "ours")
    shapes = (
        {key: value.shape for key, value in load_file(tmp_path / folder / "adapter_model.safetensors").items()}
        for folder in ("adapter", "ours")
    )
    assert next(shapes) == next(shapes)
    ligermodels.load_adapter(ours, tmp_path / "adapter")  # refuses other ranks, scales or projections
    assert_close({"logits": logits(ours, tokens(raw))}, {"logits": logits(theirs, tokens(raw))})


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("llama", lora("q_proj", use_dora=True), "LoraConfig: use_dora is True; is not supported"),
        ("llama", lora("q_proj", modules_to_save=["k_proj"]), "modules_to_save: 'k_proj' is neither the embedding nor"),
        ("llama", lora("q_proj", bias="all"), "bias is 'all'; must be 'none'"),
        ("llama", lora("q_proj", init_lora_weights="gaussian"), "init_lora_weights is 'gaussian'; a new adapter needs"),
        ("llama", lora("q_proj", inference_mode=True), "inference_mode is True; a new adapter needs False"),
        (
            "llama",
            lora("q_proj", "k_proj", rank_pattern={"k_proj": 2}),
            "must give the same values to .*q_proj, .*k_pr",
        ),
        ("llama", lora("q_proj", "query"), "'query' is not a projection that can have LoRA"),
        ("llama", lora(target_modules=r".*query"), "selects no projection"),
        ("llama", lora(), "target_modules is None; must be"),
        ("mixtral", lora(target_modules="all-linear"), "'all-linear' includes the routers"),
        ("mixtral", lora("q_proj", target_parameters=EXPERTS[:1]), "must be both projections of all routed experts"),
        ("mixtral", lora("q_proj", target_parameters=["gate.weight"]), "'gate.weight' is not the projection of routed"),
    ],
)
def test_add_lora_refuses_by_name_what_it_does_not_support(family, config, message):
    model = ligermodels.create(CASES[family])
    with pytest.raises(InputError, match=message):
        ligermodels.add_lora(model, config)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_add_lora_takes_a_configuration_or_keywords():
    with pytest.raises(InputError, match="pass either a config, or rank, alpha, dropout, targets and modules_to_save"):
        ligermodels.add_lora(ligermodels.create(CASES["llama"]), lora("q_proj"), rank=4)
