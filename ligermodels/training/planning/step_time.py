"""The time of a training step by its parts, about, to choose between settings that differ in speed and memory.

The parts are products, recomputation, accumulation of gradients, the optimizer, copies to and from host memory, and
what FSDP2 sends. Of steps of Llama-3-8B on H200s the sum is within 3 % of what was measured
(tests/training/planning/test_step_time.py).
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from ligermodels.layers.checkpointing.kept_tensors import choose_kept
from ligermodels.layers.decoder import CausalLM
from ligermodels.memory.model import TrainingMemory, decoder_blocks, trained_parameters
from ligermodels.training.reporting.flops import flops_per_token, peak_flops_of_gpu, recomputed_flops

# What a step reaches of the peak FLOP/s, recomputation included: Llama-3-8B, 8 x 2048, H200, 2026-11-22 to 26.
UTILISATION = 0.63
FP32_OF_BF16 = 1 / 16  # the peak of fp32 products: of an H100 67 of 989 TFLOP/s, of an A100 19.5 of 312
# Bytes a second that a copy in device memory reads and writes. H200: 2026-11-20 to 26. H100: of the 3.35 TB/s of its
# data sheet the same part, 89 %. Others: FLOPs of the peak a byte, between those of an A100, 170, and of an H100, 330.
COPY_RATES = {"NVIDIA H200*": 4.27e12, "NVIDIA H100 80GB HBM3": 3.0e12}
FLOPS_PER_BYTE = 250
# Bytes a second to the host, and at the same time from it. PCIe 5: from the 42 GB of Llama-3-8B's states each way,
# 11,518 tokens/s on an H100, 2026-11-27. Others have PCIe 4.
HOST_RATES = {"NVIDIA [HB][0-9]00*": 46e9}
OTHER_HOST_RATE = 23e9
# Bytes a second that a rank receives from the others of its host, over NVLink: an all-reduce of 1 GiB on two H100s,
# 2026-11-13. Others have PCIe 4.
LINK_RATES = {"NVIDIA [HB][0-9]00*": 330e9}
OTHER_LINK_RATE = 20e9
# What a micro-batch takes beside its tokens, in tokens: gemma-4-e4b, 4 x 2048 beside 2 x 2048, H200, 2026-11-26.
TOKENS_OF_MICRO_BATCH = 200
# The host's time for a block, forward and backward: SmolLM2-135M, 57 ms a step of 30 blocks, H200, 2026-11-27.
HOST_SECONDS_OF_BLOCK = 1.9e-3
BF16_BYTES = 2
SHARE_OF_8_BITS = 0.77  # of the copy rate that 8-bit AdamW reaches, Llama-3-8B, H200, 2026-11-26; AdamW 0.97


@dataclass(frozen=True)
class Rates:
    """What a device does a second. flops: in the products of a step. copy: bytes of its memory read and written. host:
    bytes copied to the host, and at the same time from it. link: bytes received from the other ranks."""

    flops: float
    copy: float
    host: float
    link: float


def device_rates(name: str, dtype: str) -> Rates:
    """The rates of a GPU by its device name, computing in `dtype`. An unknown one has the proportions of others."""
    half = peak_flops_of_gpu(name, "bfloat16") or peak_flops_of_gpu("NVIDIA H100 80GB HBM3", "bfloat16")
    assert half is not None
    peak = half * FP32_OF_BF16 if dtype == "float32" else peak_flops_of_gpu(name, dtype) or half
    copy, host, link = (
        next((rate for pattern, rate in known.items() if fnmatchcase(name, pattern)), other)
        for known, other in (
            (COPY_RATES, half / FLOPS_PER_BYTE), (HOST_RATES, OTHER_HOST_RATE), (LINK_RATES, OTHER_LINK_RATE),
        )
    )  # fmt: skip
    return Rates(UTILISATION * peak, copy, host, link)


class StepTime:
    """The time of a model's step on one rank."""

    def __init__(self, model: CausalLM, sequence_length: int, rates: Rates, shards: int = 1) -> None:
        """Reads a model, which is unsharded, on any device, and is to be sharded over so many ranks."""
        self.rates, self.blocks, self.length = rates, model.blocks, sequence_length
        whole = sum(parameter.nbytes for parameter in trained_parameters(model))
        self.trained = whole / shards
        # Of a micro-batch: weights are gathered in bf16 before the forward and again before the backward pass, and the
        # gradients, in the dtype of the parameters, summed. It takes its time: products beside it are slower.
        gathered = sum(min(parameter.itemsize, BF16_BYTES) * parameter.numel() for parameter in model.parameters())
        self.sent = (2 * gathered + whole) * (shards - 1) / shards
        self.flops = flops_per_token(model, sequence_length)
        text = decoder_blocks(model)
        towers = [0.0] * (len(self.blocks) - len(text))  # their rows are patches, which are not counted here
        self.recomputed = [*towers, *(recomputed_flops(block, sequence_length) for block in text)]

    def seconds(
        self, memory: TrainingMemory, tokens: int, micro_batches: int, checkpointed_blocks: int, kept_tensors: int, *,
        in_backward: bool, in_8_bits: bool,
    ) -> float:  # fmt: skip
        """The seconds of a step with this plan of the memory. tokens are those of a micro-batch. in_backward and
        in_8_bits describe the optimizer."""
        rates, trained = self.rates, self.trained
        products = self.flops * (tokens + TOKENS_OF_MICRO_BATCH) / rates.flops
        again = tokens * self.recomputed_by(checkpointed_blocks, kept_tensors) / rates.flops
        micro_batch = max(products + again, len(self.blocks) * HOST_SECONDS_OF_BLOCK) + self.sent / rates.link
        accumulation = 3 * trained * (micro_batches - 1) / rates.copy  # two are read, and their sum is written
        states = memory.optimizer_states + memory.offloaded_states
        # Weights, states and, for their norm too, gradients are read; weights and states are written.
        update = (4 * trained + 2 * states / (SHARE_OF_8_BITS if in_8_bits else 1)) / rates.copy
        hidden = micro_batch - products / 3 if in_backward else 0.0  # beside the backward pass
        copies = max(0.0, memory.offloaded_states / rates.host - hidden)
        copies += 2 * memory.offloaded_states / rates.copy  # device memory has less time for all else
        return micro_batches * micro_batch + accumulation + update + copies

    def recomputed_by(self, checkpointed_blocks: int, kept_tensors: int) -> float:
        """The FLOPs per token that are computed again."""
        kept = choose_kept(self.blocks[:checkpointed_blocks], kept_tensors, self.length)
        saved = sum(tensor.flops for tensors in kept for tensor in tensors)
        return max(0.0, sum(self.recomputed[:checkpointed_blocks]) - saved)
