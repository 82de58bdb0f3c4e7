"""LoRA: its maths, and which modules of a model get it."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ligermodels
from ligermodels.adapters.lora_targets import add_lora
from ligermodels.errors import InputError
from ligermodels.layers.fused import apply_linear
from ligermodels.layers.lora import LoRALinear, lora_modules
from tests.cases import CASES, LLAMA
from tests.conftest import DEVICE
from tests.layers.adapters import ALPHA, RANK, adapt, lora


def base(bias=True, dtype=torch.float64):
    return nn.Linear(12, 20, bias, device=DEVICE, dtype=dtype).requires_grad_(False)


def test_the_output_equals_that_of_the_merged_weight():
    layer = lora(base(), columns=((0, 8), (14, 20)))
    delta = torch.zeros(20, 12, dtype=torch.float64, device=DEVICE)
    delta[:8] = layer.lora_B[:8] @ layer.lora_A[:4]
    delta[14:] = layer.lora_B[8:] @ layer.lora_A[4:]
    x = torch.randn(2, 3, 12, dtype=torch.float64, device=DEVICE)
    merged = F.linear(x, layer.base_layer.weight + ALPHA / RANK * delta, layer.base_layer.bias)
    torch.testing.assert_close(layer(x), merged)


def test_a_new_adapter_changes_no_output_and_gets_gradients():
    layer = LoRALinear(base(), RANK, ALPHA)
    x = torch.randn(5, 12, dtype=torch.float64, device=DEVICE)
    y = layer(x)
    assert torch.equal(y, layer.base_layer(x))
    y.sin().sum().backward()
    assert layer.lora_B.grad.abs().min() > 0 and layer.base_layer.weight.grad is None
    bound = 1 / math.sqrt(12)  # as for the weight of nn.Linear
    assert 0.8 * bound < layer.lora_A.abs().max() <= bound


def test_dropout_applies_only_to_the_input_of_the_update():
    layer = lora(base(), dropout=0.5)
    x = torch.randn(5, 12, dtype=torch.float64, device=DEVICE)
    torch.manual_seed(1)
    dropped = F.dropout(x, 0.5)
    torch.manual_seed(1)
    expected = layer.base_layer(x) + ALPHA / RANK * (dropped @ layer.lora_A.T) @ layer.lora_B.T
    torch.testing.assert_close(apply_linear(layer, x), expected)
    layer.eval()
    merged = layer.base_layer(x) + ALPHA / RANK * (x @ layer.lora_A.T) @ layer.lora_B.T
    torch.testing.assert_close(apply_linear(layer, x), merged)


@pytest.mark.usefixtures("kernels")
def test_lora_parameters_may_be_fp32_over_an_fp16_base():
    model = adapt(ligermodels.create(LLAMA, dtype=torch.float16, device=DEVICE), dtype=torch.float32)
    ids = torch.randint(3, 99, (2, 16), device=DEVICE)
    model(ids, ids).loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    assert len(trained) == 3 * 4 * 2
    assert all("lora_" in name and p.grad.dtype == torch.float32 and p.grad.any() for name, p in trained.items())


HIDDEN, Q, KV, INNER = 48, 48, 16, 80


def layout(model):
    """The modules of the first block that have LoRA, with their columns."""
    layer = model.model.layers[0]
    return {name: module.columns for name, module in layer.named_modules() if isinstance(module, LoRALinear)}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("q_proj", {"self_attn.qkv_proj": ((0, Q),)}),
        (("v_proj", "q_proj"), {"self_attn.qkv_proj": ((0, Q), (Q + KV, Q + 2 * KV))}),
        (("mlp.up_proj", "o_proj"), {"self_attn.o_proj": ((0, HIDDEN),), "mlp.gate_up_proj": ((INNER, 2 * INNER),)}),
        (["model.layers.1.mlp.down_proj"], {}),
        (
            "all-linear",
            {
                "self_attn.qkv_proj": ((0, Q), (Q, Q + KV), (Q + KV, Q + 2 * KV)),
                "self_attn.o_proj": ((0, HIDDEN),),
                "mlp.gate_up_proj": ((0, INNER), (INNER, 2 * INNER)),
                "mlp.down_proj": ((0, HIDDEN),),
            },
        ),
    ],
)
def test_targets_are_the_names_of_projections_on_the_hub(targets, expected):
    model = ligermodels.create(LLAMA)
    add_lora(model, targets=targets, rank=2)
    assert layout(model) == expected
    assert {type(m) for n, m in model.model.layers[1].named_modules() if n == "mlp.down_proj"} == (
        {LoRALinear} if "down_proj" in str(targets) or targets == "all-linear" else {nn.Linear}
    )


def test_a_projection_stored_packed_on_the_hub_is_targeted_by_its_packed_name():
    phi3 = ligermodels.create(CASES["phi3"])
    with pytest.raises(
        InputError, match=r"'q_proj' is not a projection .* from: down_proj, gate_up_proj, o_proj, qkv_"
    ):
        add_lora(phi3, targets="q_proj")
    add_lora(phi3, targets="qkv_proj")
    columns = layout(phi3)["self_attn.qkv_proj"]
    assert columns == ((0, phi3.config.query_size + 2 * phi3.config.key_value_size),)


def test_all_linear_in_a_mixture_of_experts_means_attention_and_the_shared_expert():
    model = ligermodels.create(CASES["qwen2_moe"])
    add_lora(model)
    assert set(layout(model)) == {
        f"{part}_proj"
        for part in ("self_attn.qkv", "self_attn.o", "mlp.shared_expert.gate_up", "mlp.shared_expert.down")
    }


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        (
            "llama",
            ["q_proj", "lm_head"],
            "'lm_head' is not a projection that can have LoRA; choose from: down_proj, gate_proj",
        ),
        ("llama", "embed_tokens", "'embed_tokens' is not a projection"),
        ("llama", "proj", "'proj' is not a projection"),
        ("llama", "input_layernorm", "'input_layernorm' is not a projection"),
        ("mixtral", ["w1"], "'w1' is not a projection .* routed experts are selected by the name 'experts'"),
        ("qwen3_moe", "mlp.gate", "'mlp.gate' is not a projection"),
        ("llama", ["q_proj", "experts"], "'experts': the model has no routed experts"),
        ("qwen2_moe", "up_proj", r"'up_proj' also names .*mlp\.experts\.0\.up_proj, .* as in 'shared_expert\.up_proj'"),
    ],
)
def test_unsupported_targets_are_refused_and_leave_the_model_unchanged(name, targets, message):
    model = ligermodels.create(CASES[name])
    with pytest.raises(InputError, match=message):
        add_lora(model, targets=targets)
    assert not layout(model) and all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("settings", [{"rank": 0}, {"rank": 2.5}, {"alpha": 0}, {"dropout": 1.0}, {"dropout": -0.1}])
def test_invalid_settings_are_refused(settings):
    with pytest.raises(
        InputError, match="rank must be a whole number above 0, alpha must be above 0, dropout must be at least 0"
    ):
        add_lora(ligermodels.create(LLAMA), **settings)


def test_lora_cannot_be_added_twice():
    model = ligermodels.create(LLAMA)
    add_lora(model)
    with pytest.raises(InputError, match="has LoRA already"):
        add_lora(model)


def test_exactly_the_lora_parameters_get_gradients():
    model = ligermodels.create(CASES["llama-tied"])
    add_lora(model, rank=2)
    ids = torch.randint(3, 99, (2, 16))
    model(ids, ids).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "lora_" in name} and len(trained) == 24


def test_initialising_a_model_from_meta_gives_the_same_base_weights_as_without_lora_and_zero_updates():
    plain, model = ligermodels.create(LLAMA, seed=3), ligermodels.create(LLAMA, device="meta")
    add_lora(model, rank=2)
    model.to_empty(device="cpu").initialize(3)
    weights = {name.replace("base_layer.", ""): p for name, p in model.named_parameters() if "lora_" not in name}
    assert all(torch.equal(p, weights.pop(name)) for name, p in plain.named_parameters()) and not weights
    ids = torch.randint(3, 99, (2, 16))
    assert torch.equal(model.eval()(ids).logits, plain.eval()(ids).logits)
    assert all(not layer.lora_B.any() for layer in lora_modules(model))
    first, *others = (layer.lora_A for layer in lora_modules(model))
    assert first.any() and all(not torch.equal(first, other) for other in others if other.shape == first.shape)
