"""Model FLOPs per token and the peak FLOP/s of a GPU, for model FLOPs utilisation (MFU).

Per token, each element of a weight matrix costs 2 FLOPs in forward, 2 in backward for the gradient of the input, and 2
for the gradient of the matrix if it is trained. Attention costs, per head and key, 2 FLOPs for each column of a query
and of a value in forward, and twice that in backward; a query attends to itself and the keys before it, within the
window. A state costs 6 FLOPs per element in forward with the gated delta rule, 4 with Mamba-2, and twice that in
backward. A row counts as one document. Blocks of cross-attention count with images alone: see `image_flops`. Embedding,
norms and activation functions do not count, nor does recomputation by activation checkpointing: these are FLOPs of the
model, not of the hardware.
Source: Chowdhery et al. 2022, appendix B, https://arxiv.org/abs/2204.02311. There every query attends to all keys of
its row, which doubles the attention FLOPs.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ligermodels.layers.block import Block
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mixer import mean_attended_keys
from ligermodels.layers.moe import MoE
from ligermodels.memory.model import decoder_blocks
from ligermodels.vision.mllama import CrossAttention
from ligermodels.weights.module import named_weights

# Dense TFLOP/s (bfloat16 with fp32 accumulation, tf32) by the driver's device name, from the vendors' data sheets and
# architecture white papers. Where those state only the figure with sparsity, half of it.
TERAFLOPS = {
    "NVIDIA GB200": (2500.0, 1250.0),
    "NVIDIA B200": (2250.0, 1125.0),
    "NVIDIA H200": (989.4, 494.7),
    "NVIDIA H200 NVL": (835.5, 417.5),
    "NVIDIA GH200 *GB": (989.4, 494.7),
    "NVIDIA H100 80GB HBM3": (989.4, 494.7),
    "NVIDIA H100 NVL": (835.5, 417.5),
    "NVIDIA H100 PCIe": (756.0, 378.0),
    "NVIDIA A100-SXM4-?0GB": (312.0, 156.0),
    "NVIDIA A100-PCIE-40GB": (312.0, 156.0),
    "NVIDIA A100 80GB PCIe": (312.0, 156.0),
    "NVIDIA L40S": (362.0, 183.0),
    "NVIDIA L40": (181.0, 90.5),
    "NVIDIA L4": (121.0, 60.0),
    "NVIDIA A40": (149.7, 74.8),
    "NVIDIA A30": (165.0, 82.0),
    "NVIDIA A10": (125.0, 62.5),
    "NVIDIA A10G": (70.0, 35.0),
    "NVIDIA RTX 6000 Ada Generation": (364.2, 182.1),
    "NVIDIA RTX A6000": (154.8, 77.4),
    "NVIDIA GeForce RTX 5090": (209.5, 104.8),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6),
    "NVIDIA GeForce RTX 3090": (71.0, 35.6),
    "AMD Instinct MI300X": (1307.4, 653.7),
}


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Returns the peak FLOP/s of one device in "bfloat16" or "tf32"; None if unknown, for "float32" and for CPUs."""
    return peak_flops_of_gpu(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def peak_flops_of_gpu(name: str, dtype: str) -> float | None:
    """Returns the peak FLOP/s for a device name; None if it is unknown, such as that of a MIG slice."""
    for pattern, (half, tf32) in TERAFLOPS.items():
        if fnmatchcase(name, pattern):
            teraflops = {"bfloat16": half, "tf32": tf32}.get(dtype)
            return None if teraflops is None else teraflops * 1e12
    return None


def flops_per_token(model: CausalLM, sequence_length: int) -> int:
    """Returns the model FLOPs per token of a training step on rows of sequence_length tokens.

    Parameters that are frozen at the time of the call cost no weight gradient. The model may be on the meta device, and
    may be sharded.
    """
    layers = [block.mixer for block in decoder_blocks(model)]
    pairs = sum(layer.score_width * mean_attended_keys(sequence_length, layer.window) for layer in layers)
    return matrix_flops(model) + round(6 * pairs) + 3 * sum(layer.state_flops for layer in layers)


def matrix_flops(model: CausalLM) -> int:
    """Returns the FLOPs per token of the matrix products. Of a mixture of experts, k of E experts count."""
    return sum((3 if weight.requires_grad else 2) * flops for weight, flops in text_products(model))


def forward_flops(model: CausalLM) -> int:
    """Returns those of a forward pass."""
    return sum(flops for _, flops in text_products(model))


def text_products(model: CausalLM) -> list[tuple[Tensor, int]]:
    """The matrices that every token of a text meets, with their FLOPs per token in a forward pass."""
    layers = enumerate(decoder_blocks(model))
    left_out = ("embed_tokens", *(f"layers.{n}." for n, block in layers if isinstance(block.mixer, CrossAttention)))
    products = (
        (weight, flops) for name, weight, flops in forward_products(model.model) if not name.startswith(left_out)
    )
    return [*products, (model.head.weight, 2 * model.head.weight.numel())]


def forward_products(module: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """The name of each matrix, the matrix, and its FLOPs per token in a forward pass."""
    routed = {
        f"{prefix}.experts.{name}": (moe.experts_per_token, moe.gate.num_experts)
        for prefix, moe in module.named_modules()
        if isinstance(moe, MoE)
        for name in named_weights(moe.experts)
    }
    for name, weight in named_weights(module).items():
        if weight.ndim >= 2 and not name.endswith("bias"):
            active, experts = routed.get(name, (1, 1))
            yield name, weight, 2 * weight.numel() * active // experts


def recomputed_flops(block: Block, sequence_length: int) -> float:
    """FLOPs per token to compute a block of the text model again for its backward pass: a forward pass without its last
    product, whose result nothing reads."""
    products = sum(flops for name, _, flops in forward_products(block) if "down_proj" not in name)
    mixer = block.mixer
    pairs = mixer.score_width * mean_attended_keys(sequence_length, mixer.window)
    return products + 2 * pairs + mixer.state_flops
