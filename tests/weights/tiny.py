"""A tiny model that implements the contract between models and weights/ (HubModule)."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from ligermodels.weights.mapping import Concat, Rename, stacked_experts
from ligermodels.weights.module import HubModule

VOCAB, HIDDEN, Q, KV, INNER, LAYERS, EXPERTS, EXPERT_INNER = 11, 6, 8, 2, 5, 2, 3, 4

RAW = {
    "architectures": ["TinyForCausalLM"],
    "model_type": "tiny",
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class TinyConfig:
    raw: dict = field(default_factory=lambda: dict(RAW))
    tie_word_embeddings: bool = False
    alternative_names: ClassVar = {"experts": "local_experts"}


class TinyAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj = nn.Linear(HIDDEN, Q + 2 * KV)
        self.o_proj = nn.Linear(Q, HIDDEN, bias=False)


class TinyExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(EXPERTS, 2 * EXPERT_INNER, HIDDEN))
        self.down_proj = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, EXPERT_INNER))


class TinyMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = TinyExperts()
        self.gate_up_proj = nn.Linear(HIDDEN, 2 * INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)


class TinyLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN)
        self.self_attn = TinyAttention()
        self.mlp = TinyMLP()

    def forward(self, x):
        qkv = self.self_attn.qkv_proj(self.input_layernorm(x))
        x = x + self.self_attn.o_proj(qkv[..., :Q])
        gate, up = self.mlp.gate_up_proj(x).chunk(2, -1)
        return x + self.mlp.down_proj(gate * up)


class TinyBody(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(TinyLayer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)


class Tiny(HubModule):
    hub_class = "TinyForCausalLM"

    def __init__(self, config=None):
        super().__init__(config or TinyConfig())
        self.model = TinyBody()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def weight_rules(self):
        attention, mlp = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
        return (
            Concat(attention + "qkv_proj", tuple(attention + f"{x}_proj" for x in "qkv"), (Q, KV, KV)),
            Concat(mlp + "gate_up_proj", (mlp + "gate_proj", mlp + "up_proj"), (INNER, INNER)),
            *stacked_experts("sparse.experts", gate="w1", up="w3", down="w2"),
        )

    def other_weight_rules(self):
        """Packed, as the parameters are, with everything below `model` one level deeper."""
        return ((Rename("model.language_model", "model"),),)


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with random parameters, norms and biases too, so that no default value hides an unfilled tensor."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def hub_state(model: Tiny) -> dict[str, torch.Tensor]:
    """The model's checkpoint, written out by hand, without the weight rules under test."""
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        for kind in ("weight", "bias"):
            packed = state.pop(f"{attention}qkv_proj.{kind}")
            state[f"{attention}q_proj.{kind}"] = packed[:Q]
            state[f"{attention}k_proj.{kind}"] = packed[Q : Q + KV]
            state[f"{attention}v_proj.{kind}"] = packed[Q + KV :]
        packed = state.pop(f"{mlp}gate_up_proj.weight")
        state[f"{mlp}gate_proj.weight"], state[f"{mlp}up_proj.weight"] = packed[:INNER], packed[INNER:]
        gate_up, down = (state.pop(f"{mlp}experts.{name}_proj") for name in ("gate_up", "down"))
        for expert in range(EXPERTS):
            hub = f"model.layers.{layer}.sparse.experts.{expert}"
            state[f"{hub}.w1.weight"] = gate_up[expert, :EXPERT_INNER]
            state[f"{hub}.w3.weight"] = gate_up[expert, EXPERT_INNER:]
            state[f"{hub}.w2.weight"] = down[expert]
    return {name: tensor.clone() for name, tensor in state.items()}
