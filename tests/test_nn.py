"""The drop-in modules agree with what they replace: values, gradients, names of parameters."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import parametrize
from transformers import FalconH1Config, GemmaConfig, LlamaConfig, MixtralConfig, Phi3Config, Qwen3MoeConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from ligermodels import nn
from tests.conftest import DEVICE

HIDDEN, INNER = 32, 20
# fp32 on both sides: sums of up to a hundred terms in different orders, a few units of 2^-24 each.
VALUES = {"rtol": 1e-5, "atol": 1e-5}
GRADIENTS = {"rtol": 1e-4, "atol": 2e-5}


def draw(*shape):
    return torch.randn(shape, device=DEVICE)


def randomized(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return module.to(DEVICE)


def assert_drop_in(ours, theirs, *shape):
    """`ours` takes the state_dict of `theirs` and then has the same outputs and gradients. Returns their gradients."""
    ours = ours.to(DEVICE)
    randomized(theirs)
    ours.load_state_dict(theirs.state_dict())
    x = draw(*shape).requires_grad_()
    upstream = draw(*shape)
    (dx, found), (expected_dx, expected) = (step(module, x, upstream) for module in (ours, theirs))
    torch.testing.assert_close(ours(x), theirs(x), **VALUES)
    torch.testing.assert_close(dx, expected_dx, **GRADIENTS)
    for kind in ("weight", "bias"):
        if f"gate_up_proj.{kind}" in found and f"gate_proj.{kind}" in expected:
            pairs = [expected.pop(f"{name}_proj.{kind}") for name in ("gate", "up")]
            expected[f"gate_up_proj.{kind}"] = torch.cat(pairs)
    torch.testing.assert_close(found, expected, **GRADIENTS)


def step(module, x, upstream):
    names, parameters = zip(*module.named_parameters(), strict=True) if list(module.parameters()) else ((), ())
    dx, *gradients = torch.autograd.grad(module(x), (x, *parameters), upstream)
    return dx, dict(zip(names, gradients, strict=True))


def test_rms_norm_replaces_that_of_llama():
    assert_drop_in(nn.RMSNorm(HIDDEN), LlamaRMSNorm(HIDDEN), 3, 5, HIDDEN)


def test_rms_norm_with_an_offset_replaces_that_of_gemma():
    ours, theirs = nn.RMSNorm(HIDDEN, offset=1.0), GemmaRMSNorm(HIDDEN)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))  # zeros: the scale minus one
    assert_drop_in(ours, theirs, 3, 5, HIDDEN)


def test_rms_norm_replaces_that_of_torch():
    assert_drop_in(nn.RMSNorm(HIDDEN, eps=1e-4), torch.nn.RMSNorm(HIDDEN, eps=1e-4), 3, HIDDEN)


def test_rms_norm_without_a_weight_replaces_that_of_torch_and_has_no_offset():
    options = {"eps": 1e-4, "elementwise_affine": False}
    assert_drop_in(nn.RMSNorm(HIDDEN, **options), torch.nn.RMSNorm(HIDDEN, **options), 3, HIDDEN)
    with pytest.raises(ValueError, match="offset is 1"):
        nn.RMSNorm(HIDDEN, offset=1.0, elementwise_affine=False)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 0.1}])
def test_layer_norm_replaces_that_of_torch(options):
    ours, theirs = nn.LayerNorm(HIDDEN, **options), torch.nn.LayerNorm(HIDDEN, **options)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))
    assert_drop_in(ours, theirs, 3, 5, HIDDEN)


def test_layer_norm_takes_the_shape_as_a_sequence_of_one_and_refuses_more():
    assert nn.LayerNorm([HIDDEN]).normalized_shape == torch.nn.LayerNorm([HIDDEN]).normalized_shape
    with pytest.raises(ValueError, match="only one dimension"):
        nn.LayerNorm((4, HIDDEN))


def sizes(config, **options):
    return config(hidden_size=HIDDEN, intermediate_size=INNER, **options)


@pytest.mark.parametrize(
    ("theirs", "activation"),
    [
        (LlamaMLP(sizes(LlamaConfig)), "silu"),
        (Phi3MLP(sizes(Phi3Config, pad_token_id=0)), "silu"),
        (GemmaMLP(sizes(GemmaConfig, hidden_activation="gelu_pytorch_tanh")), "gelu_tanh"),
        (LlamaMLP(sizes(LlamaConfig, hidden_act="gelu")), "gelu"),
    ],
    ids=["Llama", "Phi-3", "Gemma", "gelu"],
)
def test_gated_mlp_replaces_separate_and_packed_projections(theirs, activation):
    assert_drop_in(nn.GatedMLP(HIDDEN, INNER, activation), theirs, 3, 5, HIDDEN)


@pytest.mark.parametrize("hooked", [False, True])
def test_gated_mlp_with_multipliers_replaces_that_of_falcon_h1(hooked):
    theirs = FalconH1MLP(sizes(FalconH1Config, mlp_multipliers=[0.75, 1.5], mlp_bias=True))
    ours = nn.GatedMLP(HIDDEN, INNER, bias=True, gate_multiplier=0.75, down_multiplier=1.5)
    if hooked:
        ours.down_proj.register_forward_hook(lambda *_: None)
    assert_drop_in(ours, theirs, 3, 5, HIDDEN)


def test_gated_mlp_packs_separate_biases_inside_of_a_larger_model():
    theirs = torch.nn.ModuleDict({"mlp": randomized(LlamaMLP(sizes(LlamaConfig, mlp_bias=True)))})
    ours = torch.nn.ModuleDict({"mlp": nn.GatedMLP(HIDDEN, INNER, bias=True)}).to(DEVICE)
    state = theirs.state_dict()
    names = list(state)
    ours.load_state_dict(state)
    assert list(state) == names  # the caller's dictionary is left as it was
    x = draw(3, HIDDEN)
    torch.testing.assert_close(ours["mlp"](x), theirs["mlp"](x), **VALUES)


def test_gated_mlp_calls_projections_that_are_hooked_or_wrapped():
    mlp, x = randomized(nn.GatedMLP(HIDDEN, INNER)), draw(3, HIDDEN)
    expected = 2 * mlp(x)
    with mlp.down_proj.register_forward_hook(lambda module, inputs, output: 2 * output):
        torch.testing.assert_close(mlp(x), expected, **VALUES)
    mlp.down_proj = torch.nn.Sequential(mlp.down_proj, Double())
    torch.testing.assert_close(mlp(x), expected, **VALUES)


class Double(torch.nn.Module):
    def forward(self, x):
        return 2 * x


def test_gated_mlp_sees_parametrized_weights():
    mlp, x = randomized(nn.GatedMLP(HIDDEN, INNER)), draw(3, HIDDEN)
    expected = 2 * mlp(x)
    parametrize.register_parametrization(mlp.down_proj, "weight", Double())
    torch.testing.assert_close(mlp(x), expected, **VALUES)


def test_a_hook_may_keep_the_packed_projection(kernels):
    mlp, kept = randomized(nn.GatedMLP(HIDDEN, INNER)), []
    mlp.gate_up_proj.register_forward_hook(lambda module, inputs, output: kept.append(output))
    out = mlp(draw(3, HIDDEN))
    before = kept[0].detach().clone()
    out.sum().backward()
    torch.testing.assert_close(kept[0].detach(), before, rtol=0, atol=0)


def test_gated_mlp_refuses_an_unknown_activation():
    with pytest.raises(ValueError, match="relu"):
        nn.GatedMLP(HIDDEN, INNER, "relu").to(DEVICE)(draw(3, HIDDEN))


def test_rotary_embedding_gives_the_angles_of_hugging_face():
    config = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=4)
    config.rope_parameters["rope_theta"] = 500000.0
    positions = torch.tensor([[0, 1, 2, 5000], [7, 8, 9, 10]], device=DEVICE)
    expected = LlamaRotaryEmbedding(config).to(DEVICE)(draw(1), positions)
    got = nn.RotaryEmbedding(8, theta=500000.0).to(DEVICE)(positions)
    # An angle of 5000 in fp32 has an error of 2^-12 radians at most.
    torch.testing.assert_close(got, tuple(table[..., :4] for table in expected), rtol=0, atol=2.0**-12)


def test_rotary_embedding_rotates_as_hugging_face_does():
    rotary = nn.RotaryEmbedding(8).to(DEVICE)
    q, k, v = draw(2, 5, 4, 8), draw(2, 5, 2, 8), draw(2, 5, 2, 8)
    positions = torch.arange(10, device=DEVICE).view(2, 5)
    doubled = (torch.cat((table, table), -1) for table in rotary(positions))
    expected = [x.transpose(1, 2) for x in apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *doubled)]
    torch.testing.assert_close([*rotary.rotate(q, k, positions)], expected)
    packed = torch.cat((q, k, v), 2).flatten(2)
    torch.testing.assert_close([*rotary.rotate_packed(packed, 4, 2, positions)], [*expected, v])


def test_rotary_embedding_counts_positions_from_zero_where_none_are_given():
    rotary = nn.RotaryEmbedding(8, interleaved=True).to(DEVICE)
    q, k = draw(2, 5, 4, 8), draw(2, 5, 2, 8)
    expected = rotary.rotate(q, k, torch.arange(5, device=DEVICE))
    torch.testing.assert_close(rotary.rotate(q, k), expected)
    packed = torch.cat((q, k, k), 2).flatten(2)
    torch.testing.assert_close(rotary.rotate_packed(packed, 4, 2)[:2], expected)


def test_rotary_embedding_keeps_its_frequencies_in_fp32():
    rotary = nn.RotaryEmbedding(8)
    expected = rotary.inv_freq.clone()
    assert rotary.to(torch.bfloat16).inv_freq.dtype == torch.float32
    assert torch.equal(nn.RotaryEmbedding(8, device="meta").to_empty(device="cpu").inv_freq, expected)
    assert not rotary.state_dict()


@pytest.mark.parametrize("dim", [0, 7])
def test_rotary_embedding_refuses_an_odd_dimension(dim):
    with pytest.raises(ValueError, match="even"):
        nn.RotaryEmbedding(dim)


def targets_of(*shape, classes):
    targets = torch.randint(classes, shape, device=DEVICE)
    return torch.where(torch.rand(shape, device=DEVICE) < 0.3, -100, targets)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}])
def test_cross_entropy_loss_replaces_that_of_torch(options):
    logits, targets = draw(3, 5, 17).requires_grad_(), targets_of(3, 5, classes=17)
    got = nn.CrossEntropyLoss(**options)(logits, targets)
    flat = torch.nn.CrossEntropyLoss(**options)(logits.flatten(0, 1), targets.flatten())
    expected = flat.view(got.shape)
    torch.testing.assert_close(got, expected, **VALUES)
    upstream = torch.randn_like(got)
    gradients = (torch.autograd.grad(loss, logits, upstream) for loss in (got, expected))
    torch.testing.assert_close(*gradients, **GRADIENTS)


def test_cross_entropy_loss_passes_its_options_on():
    logits, targets = draw(4, 17), torch.tensor([0, 1, 2, 16], device=DEVICE)
    loss = nn.CrossEntropyLoss(ignore_index=2, softcap=3.0, logit_scale=0.5, z_loss=0.1, reduction="sum")
    capped = 3 * torch.tanh(0.5 * logits / 3)
    kept = targets != 2
    expected = F.cross_entropy(capped, targets, ignore_index=2, reduction="sum")
    expected = expected + 0.1 * capped.logsumexp(-1)[kept].square().sum()
    torch.testing.assert_close(loss(logits, targets), expected, **VALUES)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_loss_with_class_weights_replaces_that_of_torch(reduction, label_smoothing, kernels):
    logits, targets, weight = draw(5, 17).requires_grad_(), targets_of(5, classes=17), torch.rand(17, device=DEVICE)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    ours, theirs = nn.CrossEntropyLoss(class_weight=weight, **options), torch.nn.CrossEntropyLoss(weight, **options)
    assert [x.tolist() for x in ours.state_dict().values()] == [x.tolist() for x in theirs.state_dict().values()]
    losses = [loss(logits, targets) for loss in (ours, theirs)]
    torch.testing.assert_close(*losses, **VALUES)
    upstream = torch.randn_like(losses[0])
    torch.testing.assert_close(*(torch.autograd.grad(x, logits, upstream) for x in losses), **GRADIENTS)


def test_losses_return_their_metrics():
    hidden, weight, bias = draw(4, HIDDEN), draw(17, HIDDEN), draw(17)
    logits, targets = F.linear(hidden, weight, bias), torch.tensor([0, 1, -100, 16], device=DEVICE)
    options = {"z_loss": 0.1, "token_scaling": True, "metrics": True}
    outputs = [
        nn.CrossEntropyLoss(**options)(logits, targets),
        nn.LinearCrossEntropyLoss(**options)(hidden, weight, targets, bias),
    ]
    losses = F.cross_entropy(logits, targets, reduction="none")
    probability = (-losses).exp() * (targets != -100)
    z_loss = (0.1 * logits.logsumexp(-1).square() * probability).sum() / 3
    for output in outputs:
        torch.testing.assert_close(output.loss, (losses * probability).sum() / 3 + z_loss, **VALUES)
        torch.testing.assert_close(output.z_loss, z_loss, **VALUES)
        assert torch.equal(output.predicted_tokens, logits.argmax(-1).where(targets != -100, -1))
        assert output.token_accuracy == (logits.argmax(-1) == targets).sum() / 3
        entropy = torch.distributions.Categorical(logits=logits).entropy() * (targets != -100)
        torch.testing.assert_close(output.entropy, entropy, **VALUES)


def test_the_mean_loss_of_no_target_is_zero():
    ignored = torch.full((4,), -100, device=DEVICE)
    assert nn.CrossEntropyLoss()(draw(4, 17), ignored) == 0


def test_cross_entropy_loss_in_place_writes_its_gradient_over_the_logits(kernels):
    x, targets = draw(4, 17).requires_grad_(), targets_of(4, classes=17)
    (expected,) = torch.autograd.grad(F.cross_entropy(x, targets), x)
    logits = x * 1
    nn.CrossEntropyLoss(inplace=True)(logits, targets).backward()
    torch.testing.assert_close(x.grad, expected, **GRADIENTS)
    torch.testing.assert_close(logits.detach(), expected, **GRADIENTS)


@pytest.mark.parametrize("low_memory", [False, True], ids=["default", "low memory"])
def test_linear_cross_entropy_loss_replaces_a_projection_and_a_loss(low_memory, kernels):
    hidden, weight = draw(3, 5, HIDDEN).requires_grad_(), draw(17, HIDDEN).requires_grad_()
    targets = targets_of(3, 5, classes=17)
    got = nn.LinearCrossEntropyLoss(low_memory=low_memory, label_smoothing=0.1)(hidden, weight, targets)
    logits = F.linear(hidden, weight).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(got, expected, **VALUES)
    gradients = (torch.autograd.grad(loss, (hidden, weight)) for loss in (got, expected))
    torch.testing.assert_close(*gradients, **GRADIENTS)


def test_losses_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match="median"):
        nn.CrossEntropyLoss(reduction="median")(draw(4, 17), targets_of(4, classes=17))
    with pytest.raises(ValueError, match="shape"):
        nn.LinearCrossEntropyLoss()(draw(4, HIDDEN), draw(17, HIDDEN), targets_of(5, classes=17))


def test_moe_replaces_that_of_mixtral():
    config = sizes(MixtralConfig, num_local_experts=5, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    assert_drop_in(nn.MoE(HIDDEN, INNER, 5, 2), MixtralSparseMoeBlock(config), 2, 7, HIDDEN)


@pytest.mark.parametrize("normalize", [True, False])
def test_moe_replaces_that_of_qwen3(normalize):
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=5, num_experts_per_tok=2, norm_topk_prob=normalize
    )
    config._experts_implementation = "eager"
    assert_drop_in(nn.MoE(HIDDEN, INNER, 5, 2, normalize=normalize), Qwen3MoeSparseMoeBlock(config), 2, 7, HIDDEN)


def test_a_hook_on_the_gate_sees_the_router_logits():
    moe, x, seen = randomized(nn.MoE(HIDDEN, INNER, 5, 2)), draw(2, 7, HIDDEN), []
    moe.gate.register_forward_hook(lambda module, inputs, logits: seen.append(logits))
    moe(x)
    torch.testing.assert_close(seen[0], F.linear(x.flatten(0, 1), moe.gate.weight))


@pytest.mark.parametrize("name", nn.__all__)
def test_every_module_has_a_docstring_and_a_line_in_the_module_docstring(name):
    assert issubclass(getattr(nn, name), torch.nn.Module)
    assert getattr(nn, name).__doc__
    assert f"`{name}`" in nn.__doc__


@pytest.mark.parametrize(
    "module",
    [
        nn.RMSNorm(4, device="meta", dtype=torch.bfloat16),
        nn.LayerNorm(4, device="meta", dtype=torch.bfloat16),
        nn.GatedMLP(4, 6, device="meta", dtype=torch.bfloat16),
        nn.MoE(4, 6, 3, 2, device="meta", dtype=torch.bfloat16),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_are_made_on_the_device_and_in_the_dtype_that_they_are_given(module):
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    assert type(module).__name__ in repr(module)


@pytest.mark.parametrize(
    "module", [nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN), nn.GatedMLP(HIDDEN, INNER), nn.MoE(HIDDEN, INNER, 5, 2)],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_kernels_and_reference_agree(module, request):
    """Values and gradients on a CPU, where both run; a GPU's tests above ran the kernels."""
    if DEVICE != "cpu":
        pytest.skip("references run on CPU tensors")
    x, upstream = draw(3, HIDDEN).requires_grad_(), draw(3, HIDDEN)
    expected = step(module, x, upstream)
    request.getfixturevalue("kernels")
    torch.testing.assert_close(step(module, x, upstream), expected, **GRADIENTS)
