"""A mixture-of-experts layer after routing. Shape: [tokens, hidden, intermediate, experts, experts per token].

The shapes are those of Qwen3-30B-A3B and Mixtral, and a small one whose time is bound by the host. `biased_experts` are
those of gpt-oss-20b: with biases and a clamped activation.
"""

import os

import torch

from benchmarks.ops import Op, random_input, work_per_pass
from benchmarks.timing import MATMUL
from ligermodels.kernels.moe.experts import experts_reference, route

# Liger's autotuner compiles for minutes per shape, so it runs only if LIGER_FUSED_MOE_AUTOTUNE is set to another value
# than 0. Liger reads the variable at its first import.
AUTOTUNE = os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0") != "0"
SHAPES = [(16384, 2048, 768, 128, 8), (8192, 4096, 14336, 8, 2), (64, 1024, 512, 8, 2)]


def inputs(tokens, hidden, inner, experts, k):
    weight, index = route(torch.randn(tokens, experts), k, normalize=True)
    gate_up = random_input(experts, 2 * inner, hidden, scale=hidden**-0.5)
    down = random_input(experts, hidden, inner, scale=inner**-0.5)
    return [random_input(tokens, hidden), index, weight.requires_grad_(), gate_up, down]


def work(tokens, hidden, inner, experts, k):
    return work_per_pass(6 * tokens * k * hidden * inner, 12 * tokens * k * hidden * inner)


def reference(x, index, weight, gate_up, down):
    return experts_reference(x, index, weight, gate_up, down, "silu")


experts = Op("experts", SHAPES, inputs, reference, work, ceiling=MATMUL)


@experts.provider("pytorch")
def pytorch(*shape):
    return reference


@experts.provider("transformers")
def transformers(tokens, hidden, inner, experts, k):
    """The fastest implementation in transformers, `grouped_mm`."""
    from torch.func import functional_call
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inner, num_experts=experts, num_experts_per_tok=k)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)

    def grouped(x, index, weight, gate_up, down):
        return functional_call(module, {"gate_up_proj": gate_up, "down_proj": down}, (x, index, weight))

    return grouped


@experts.provider("liger" if AUTOTUNE else "liger, untuned", layout=lambda x, index, *rest: (x, index.int(), *rest))
def liger(*shape):
    from liger_kernel.ops import LigerFusedMoEFunction

    return lambda x, index, weight, gate_up, down: LigerFusedMoEFunction.apply(x, gate_up, down, index, weight)


@experts.provider("ligermodels")
def ours(*shape):
    from ligermodels.kernels.moe.experts import experts

    return lambda x, index, weight, gate_up, down: experts(x, index, weight, gate_up, down, "silu")


BIASED_SHAPES = [(16384, 2880, 2880, 32, 4), (64, 1024, 512, 8, 2)]


def biased_inputs(tokens, hidden, inner, experts, k):
    sizes = 2 * inner, hidden
    return [*inputs(tokens, hidden, inner, experts, k), *(random_input(experts, size, scale=0.1) for size in sizes)]


def biased_reference(x, index, weight, gate_up, down, gate_up_bias, down_bias):
    return experts_reference(
        x, index, weight, gate_up, down, "clamped_silu", gate_up_bias=gate_up_bias, down_bias=down_bias
    )


biased_experts = Op("biased_experts", BIASED_SHAPES, biased_inputs, biased_reference, work, ceiling=MATMUL)


@biased_experts.provider("pytorch")
def biased_pytorch(*shape):
    return biased_reference


def as_gpt_oss(x, index, weight, gate_up, down, gate_up_bias, down_bias):
    """The layout of gpt-oss in transformers: inputs before outputs, gate and up alternate."""
    gate_up, gate_up_bias = (y.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) for y in (gate_up, gate_up_bias))
    matrices = (y.mT.contiguous() for y in (gate_up, down))
    return x, index, weight, *matrices, gate_up_bias.contiguous(), down_bias


@biased_experts.provider("transformers", layout=as_gpt_oss)
def biased_transformers(tokens, hidden, inner, experts, k):
    """The fastest implementation in transformers, `grouped_mm`."""
    from torch.func import functional_call
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(
        hidden_size=hidden, intermediate_size=inner, num_local_experts=experts, num_experts_per_tok=k
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = GptOssExperts(config)

    def grouped(x, index, weight, *parameters):
        names = "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"
        return functional_call(module, dict(zip(names, parameters, strict=True)), (x, index, weight))

    return grouped


@biased_experts.provider("ligermodels")
def biased_ours(*shape):
    from ligermodels.kernels.moe.experts import experts

    return lambda x, index, weight, gate_up, down, gate_up_bias, down_bias: experts(
        x, index, weight, gate_up, down, "clamped_silu", gate_up_bias=gate_up_bias, down_bias=down_bias
    )
