"""The parity tests notice: each listed one-line break of the code makes its named case fail."""

import pytest

from tests.sabotage import Sabotage
from tests.test_parity import check_parity

CPU = "cpu"  # where the ops are their references, which can be broken in place; kernels have tests of their own
ATTENTION = "ligermodels.kernels.attention"
ROPE = "ligermodels.layers.rope"
DECODER = "ligermodels.layers.decoder"

BREAKS = {
    "window off by one": Sabotage(f"{ATTENTION}:visible", "distance < window", "distance <= window", "qwen2-sliding"),
    "window ignored": Sabotage(f"{ATTENTION}:attention", "window >= k.shape[1]", "window >= 0", "qwen2-sliding"),
    "causal mask strict": Sabotage(f"{ATTENTION}:visible", "distance >= 0", "distance > -2", "qwen2-sliding"),
    "attention unscaled": Sabotage(f"{ATTENTION}:sdpa", "scale=scale", "scale=1.0", "llama"),
    "windowed layers shifted": Sabotage(
        "ligermodels.architectures.qwen2:Qwen2Config.window",
        "layer >= self.max_window_layers",
        "layer > self.max_window_layers",
        "qwen2-sliding",
    ),
    "layer_types ignored": Sabotage(
        "ligermodels.architectures.qwen2:Qwen2Config.window",
        "self.layer_types is not None",
        "False",
        "qwen2-layer-types",
    ),
    "unused window applied": Sabotage(
        "ligermodels.architectures.qwen2:Qwen2Config.window",
        "not self.use_sliding_window",
        "self.sliding_window is None",
        "qwen2-unused-window",
    ),
    "rope interleaved for half-split": Sabotage(
        "ligermodels.kernels.rope:rotate_reference",
        "rotated.chunk(2, -1)",
        "(rotated[..., ::2], rotated[..., 1::2])",
        "llama",
    ),
    "rope turns the other way": Sabotage(
        "ligermodels.kernels.rope:rotate_reference", "first * c - second * s", "first * c + second * s", "llama"
    ),
    "linear scaling dropped": Sabotage(f"{ROPE}:linear", " / rope.factor", "", "llama-rope-linear"),
    "llama3 blend reversed": Sabotage(f"{ROPE}:llama3", "(1 - keep)", "keep", "llama-rope-llama3"),
    "yarn ramp reversed": Sabotage(f"{ROPE}:yarn", "* ramp + inv_freq", "* (1 - ramp) + inv_freq", "llama-rope-yarn"),
    "yarn attention factor dropped": Sabotage(f"{ROPE}:attention_factor", "mscale(1.0)", "1.0", "llama-rope-yarn"),
    "yarn mscale_all_dim ignored": Sabotage(
        f"{ROPE}:attention_factor", " / mscale(rope.mscale_all_dim)", "", "llama-rope-yarn-mscale"
    ),
    "yarn always truncated": Sabotage(f"{ROPE}:yarn", "if rope.truncate", "if True", "llama-rope-yarn-mscale"),
    "dynamic theta not stretched": Sabotage(
        f"{ROPE}:DynamicRotaryEmbedding.frequencies", "* stretch", "* 1.0", "llama-rope-dynamic"
    ),
    "rope_theta ignored": Sabotage(f"{ROPE}:default", "rope.rope_theta", "10000.0", "llama"),
    "gate and up swapped": Sabotage(
        "ligermodels.weights.mapping:packed_gate_up",
        '(layer + "gate_proj", layer + "up_proj")',
        '(layer + "up_proj", layer + "gate_proj")',
        "llama",
    ),
    "exact gelu for tanh": Sabotage(
        "ligermodels.layers.config:Config.activation", "ACTIVATIONS[self.hidden_act]", '"gelu"', "llama-gelu-tanh"
    ),
    "residual lost": Sabotage(
        "ligermodels.kernels.rms_norm:add_rms_norm_reference", "hidden = x + residual", "hidden = x", "llama"
    ),
    "norm's epsilon dropped": Sabotage(
        "ligermodels.kernels.rms_norm:rms_norm_reference", " + eps)", " + 1e-2)", "llama"
    ),
    "labels not shifted": Sabotage(f"{DECODER}:next_tokens", "labels[:, 1:], (0, 1)", "labels, (0, 0)", "llama"),
    "padding row trained": Sabotage(
        f"{DECODER}:Decoder.forward",
        "self.embed_tokens(input_ids)",
        "F.embedding(input_ids, self.embed_tokens.weight)",
        "llama-padding",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_noticed(name, tmp_path, monkeypatch):
    sabotage = BREAKS[name]
    sabotage.apply(monkeypatch)
    with pytest.raises(AssertionError):
        check_parity(sabotage.case, tmp_path, CPU)


@pytest.mark.parametrize("case", sorted({sabotage.case for sabotage in BREAKS.values()}))
def test_the_unbroken_code_passes(case, tmp_path):
    """Without a break the same check is silent, so what the tests above notice is the break."""
    check_parity(case, tmp_path, CPU)
