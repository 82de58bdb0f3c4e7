"""Which linears are converted to float8, the error of their products, and unsupported devices."""

import sys

import pytest
import torch
import torchao.float8
from torchao.float8.float8_linear import Float8Linear

import ligermodels
from ligermodels.architectures import ARCHITECTURES
from ligermodels.errors import InputError
from ligermodels.layers.lm_head import LMHead
from ligermodels.training.parallel import float8
from tests.conftest import DEVICE
from tests.kernels.error_budget import relative_error
from tests.layers.adapters import adapt

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def capable(monkeypatch):
    """A GPU that supports float8; without a GPU its products are emulated."""
    if DEVICE == "cpu":
        config = torchao.float8.Float8LinearConfig
        monkeypatch.setattr(config, "from_recipe_name", staticmethod(lambda name: config(emulate=True)))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))


def converted(model):
    names = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    return {name.removeprefix("model.layers.0.") for name in names if ".layers.0." in name}


ATTENTION = {"self_attn.qkv_proj", "self_attn.o_proj"}
SHARED = {"mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj"}


@pytest.mark.parametrize(
    ("architecture", "mixer"),
    [
        ("qwen3_5_text", {"linear_attn.in_proj", "linear_attn.out_proj"}),
        ("lfm2", {"conv.in_proj", "conv.out_proj"}),
        ("granitemoehybrid", {"mamba.in_proj", "mamba.out_proj"}),
    ],
)
def test_the_linears_of_layers_with_states_are_converted(architecture, mixer, capable):
    """Where the rows of in_proj are a multiple of 16, as they are in every published model."""
    heads = {"linear_num_value_heads": 8, "mamba_n_heads": 16}
    raw = ARCHITECTURES[architecture].SIZES["tiny"]
    model = ligermodels.create(raw | {name: heads[name] for name in heads if name in raw}, device="meta")
    float8.convert(model, GPU)
    assert {name for name in converted(model) if not name.startswith("mlp")} == mixer


@pytest.mark.parametrize("architecture, mlp", [("llama", {"mlp.gate_up_proj", "mlp.down_proj"}), ("qwen2_moe", SHARED)])
def test_only_the_linears_of_the_blocks_are_converted(architecture, mlp, capable):
    sizes = {"num_experts": 16} if mlp is SHARED else {}  # so many that the router has convertible sizes
    model = ligermodels.create(ARCHITECTURES[architecture].SIZES["tiny"] | sizes, device="meta")
    before = dict(model.named_parameters())
    assert float8.convert(model, GPU) == 4 * model.config.num_hidden_layers
    assert converted(model) == ATTENTION | mlp
    assert type(model.lm_head) is LMHead
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


def test_with_lora_the_base_layer_is_converted(capable):
    model = ligermodels.create("llama", size="tiny", device="meta")
    with torch.device("meta"):
        adapt(model, targets=["q_proj"])
    float8.convert(model, GPU)
    expected = {"self_attn.qkv_proj.base_layer", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}
    assert converted(model) == expected


CONFIG = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def test_gradients_differ_by_no_more_than_float8_rounding(capable):
    model = ligermodels.create(CONFIG, dtype=torch.float32, device=DEVICE).to(torch.bfloat16)
    model.initialize(0)
    ids = torch.randint(97, (2, 32), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def loss_and_gradients():
        model.zero_grad()
        loss = model(ids, ids).loss
        loss.backward()
        return loss.item(), {name: p.grad.double() for name, p in model.named_parameters()}

    loss, gradients = loss_and_gradients()
    float8.convert(model, GPU)
    rounded_loss, rounded = loss_and_gradients()
    assert rounded_loss == pytest.approx(loss, rel=1e-3)
    for name, gradient in gradients.items():
        error = relative_error(rounded[name], gradient)
        # Gradients are rounded to e5m2, with errors up to 2^-3; errors of several products average out.
        assert error < 2**-3, (name, error)
        if name.endswith("_proj.weight"):
            assert error > 2**-8, (name, error)


def test_devices_without_float8_support_are_rejected(monkeypatch):
    model = ligermodels.create("llama", size="tiny", device="meta")
    with pytest.raises(InputError, match=r"compute capability 8\.9 .*, not a cpu"):
        float8.convert(model, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(InputError, match=r"8\.9 .*, not compute capability 8\.0"):
        float8.convert(model, GPU)


def test_a_model_without_a_convertible_linear_is_rejected(capable):
    model = ligermodels.create(CONFIG | {"hidden_size": 40, "head_dim": 8}, device="meta")
    with pytest.raises(InputError, match=r"no linear of the blocks has sizes that are multiples of 16"):
        float8.convert(model, GPU)


def test_without_torchao_the_error_says_how_to_install_it_if_the_device_supports_float8(monkeypatch, capable):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(InputError, match="not a cpu"):
        float8.convert(ligermodels.create("llama", size="tiny", device="meta"), CPU)
    with pytest.raises(InputError, match=r"--float8: needs torchao, but cannot import it: .*; pip install torchao"):
        float8.convert(ligermodels.create("llama", size="tiny", device="meta"), GPU)
