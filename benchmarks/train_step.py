"""Whole training steps on one GPU: tokens/s and peak memory of full fine-tuning in bf16.

    python -m benchmarks.train_step --model llama-3-8b --batch 8 --length 2048
    python -m benchmarks.train_step --supervised 0.2  # chats: the last fifth of each sequence is the answer

Each provider runs in its own process on the same GPU. Weights and the moments of AdamW are bf16, except where the
provider's name says otherwise. Our AdamW keeps the 16 bits that rounding a weight to bf16 loses, so that it learns as
with fp32 weights; PyTorch's, on bf16 weights, rounds to nearest and loses small updates: beside it stands "rounded to
nearest", and beside ours a peer with fp32 weights, which autocast computes with in bf16. Weights and tokens are random,
and the time is the median of the timed steps after a warm-up. A provider is a function from the content of a
config.json to a model whose output has `.loss`. A provider that is not installed or fails is listed with its error.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import results, timing
from benchmarks.processes import print_rows_of_providers

MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    },
    "llama-3-8b-8-layers": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    },
    "qwen2.5-32b": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 27648,
        "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
    },
    "llama-3.2-1b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
    "qwen2-0.5b": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "rope_theta": 1000000.0,
        "max_position_embeddings": 32768, "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 100000.0,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
    "phi-3-mini": {
        "model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 4096, "pad_token_id": 32000,
    },
    "gemma-2-2b": {
        "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "sliding_window": 512, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "qwen3-30b-a3b-8-layers": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "gpt-oss-20b-6-layers": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 6, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
        "pad_token_id": 199999,
    },
    "qwen3.5-4b": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216,
        "num_hidden_layers": 32, "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
    },
    "qwen3.5-35b-a3b-8-layers": {
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 8,
        "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "glm-4.5-air-4-layers": {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
        "num_hidden_layers": 4, "first_k_dense_replace": 1, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "attention_bias": True, "use_qk_norm": False, "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.5, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1,
        "topk_group": 1, "num_nextn_predict_layers": 0, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    },
    "gemma-4-e4b": {
        "model_type": "gemma4_text", "vocab_size": 262144, "vocab_size_per_layer_input": 262144, "hidden_size": 2560,
        "hidden_size_per_layer_input": 256, "intermediate_size": 10240, "num_hidden_layers": 42,
        "num_kv_shared_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "global_head_dim": 512, "sliding_window": 512,
        "layer_types": 7 * (5 * ["sliding_attention"] + ["full_attention"]),
        "final_logit_softcapping": 30.0, "use_double_wide_mlp": False, "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "mistral-7b-window-1024": {
        "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 1024,
        "max_position_embeddings": 32768,
    },
    "mixtral-3-layers": {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 32768,
    },
}  # fmt: skip


def hugging_face(raw, checkpointing, attention=None, dtype=torch.bfloat16):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**raw, use_cache=False)
    torch.set_default_dtype(dtype)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    torch.set_default_dtype(torch.float32)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def hugging_face_eager(raw, checkpointing):
    """Eager attention, which applies softcapping. transformers' default, SDPA, silently omits it up to version 5.17."""
    return hugging_face(raw, checkpointing, "eager")


def liger(raw, checkpointing, attention=None, dtype=torch.bfloat16):
    import liger_kernel.transformers as patches

    kind = raw["model_type"]  # Liger patches the texts of some vision models under the name of the whole
    names = f"apply_liger_kernel_to_{kind}", f"apply_liger_kernel_to_{kind.removesuffix('_text')}"
    getattr(patches, names[0] if hasattr(patches, names[0]) else names[1])()
    return hugging_face(raw, checkpointing, attention, dtype)


def hugging_face_fp32(raw, checkpointing):
    return hugging_face(raw, checkpointing, dtype=torch.float32)


def liger_fp32(raw, checkpointing):
    return liger(raw, checkpointing, dtype=torch.float32)


def liger_eager(raw, checkpointing):
    return liger(raw, checkpointing, "eager")


def ligermodels(raw, checkpointing):
    """checkpointing: as --activation-checkpointing of `ligermodels train`, but auto."""
    import ligermodels

    model = ligermodels.create(raw, dtype=torch.bfloat16, device="cuda")
    if checkpointing:
        model.checkpoint_activations(kept_tensors=None if checkpointing == "selective" else 0)
    return model


def fill_memory(model, batch, length, gib, **settings):
    """Applies --activation-checkpointing auto for `gib` GiB to a model; returns the estimate of the peak in GiB.

    settings: further ones of `training_memory`.
    """
    from functools import partial

    from ligermodels.memory.model import training_memory
    from ligermodels.training.parallel.activation_checkpointing import least_checkpointing

    estimate = partial(training_memory, model, batch, length, torch.bfloat16, **settings)
    chosen = least_checkpointing(model, estimate, gib * 2**30)
    model.checkpoint_activations(*chosen, length)
    peak = estimate(checkpointed_blocks=chosen.blocks, kept_tensors=chosen.kept_tensors).peak
    return {"blocks": chosen.blocks, "kept_tensors": chosen.kept_tensors, "planned_gib": round(peak / 2**30, 1)}


def ligermodels_without_flash_attention_4(raw, checkpointing):
    from ligermodels.kernels.attention import attention

    attention.runs_flash_attention = lambda q: False
    return ligermodels(raw, checkpointing)


def ligermodels_with_low_memory_loss(raw, checkpointing):
    """As --low-memory-loss."""
    model = ligermodels(raw, checkpointing)
    model.lm_head.low_memory_loss = True
    return model


OURS = "ligermodels and its AdamW"
OURS_NEAREST = f"{OURS}, rounded to nearest"  # as --param-rounding nearest
OURS_8BIT = f"{OURS} in 8 bits"
OURS_IN_BACKWARD = f"{OURS}, in backward"  # as --optimizer-in-backward
OURS_OFFLOADED = f"{OURS_IN_BACKWARD}, offloaded states"  # as --offload optimizer
IN_BACKWARD = f"{OURS_8BIT}, in backward"
IN_BACKWARD_LOW_MEMORY = f"{IN_BACKWARD}, low-memory loss"
OFFLOADED_STATES = f"{IN_BACKWARD_LOW_MEMORY}, offloaded states"
OFFLOADED_INPUTS = f"{IN_BACKWARD_LOW_MEMORY}, offloaded inputs"  # as --offload activations
OFFLOADED_BOTH = f"{IN_BACKWARD_LOW_MEMORY}, offloaded states and inputs"
PACKED = f"{OURS}, packed"  # each sequence is a document of one row, as `ligermodels train` gives them
PACKED_BEFORE = f"{PACKED}, without flash-attn-4"
PACKED_ROWS = f"{PACKED}, supervised rows"  # they alone meet the head, as in `ligermodels train` on chats
FP32_WEIGHTS = ", fp32 weights"  # computed with in bf16, by autocast
PROVIDERS = {
    "hugging face": hugging_face,
    "hugging face + liger": liger,
    f"hugging face{FP32_WEIGHTS}": hugging_face_fp32,
    f"hugging face + liger{FP32_WEIGHTS}": liger_fp32,
    "hugging face, eager attention": hugging_face_eager,
    "hugging face + liger, eager attention": liger_eager,
    "ligermodels": ligermodels,
    OURS: ligermodels,
    OURS_NEAREST: ligermodels,
    OURS_8BIT: ligermodels,
    OURS_IN_BACKWARD: ligermodels,
    OURS_OFFLOADED: ligermodels,
    IN_BACKWARD: ligermodels,
    IN_BACKWARD_LOW_MEMORY: ligermodels_with_low_memory_loss,
    OFFLOADED_STATES: ligermodels_with_low_memory_loss,
    OFFLOADED_INPUTS: ligermodels_with_low_memory_loss,
    OFFLOADED_BOTH: ligermodels_with_low_memory_loss,
    PACKED: ligermodels,
    PACKED_BEFORE: ligermodels_without_flash_attention_4,
    PACKED_ROWS: ligermodels,
}


def make_optimizer(provider: str, model):
    """torch's fused AdamW, so that only the models differ; our AdamW for the providers that name it."""
    if not provider.startswith(OURS):
        return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    from ligermodels.training.optimizers.adamw import AdamW, AdamW8bit

    make = AdamW8bit if provider.startswith(OURS_8BIT) else AdamW
    rounding = "nearest" if provider == OURS_NEAREST else "exact"
    optimizer = make(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.01, param_rounding=rounding)
    if "offloaded states" in provider:
        optimizer.offload_states()
    optimizer.create_states()
    return optimizer


def plan_settings(provider: str, optimizer) -> dict[str, Any]:
    """What `training_memory` has to know of a provider whose AdamW is ours; nothing of another."""
    if not provider.startswith(OURS):
        return {}
    from ligermodels.memory.model import state_bytes
    from ligermodels.training.optimizers.offloaded import bytes_where_offloaded

    states = bytes_where_offloaded(optimizer)[0] if "offloaded states" in provider else state_bytes(optimizer)
    return {
        "optimizer_states": states, "low_memory_loss": "low-memory loss" in provider,
        "step_in_backward": "in backward" in provider,
    }  # fmt: skip


def training_step(provider: str, model, optimizer, inputs: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Forward, backward and the optimizer's step, within the backward pass for the providers that say so."""

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=provider.endswith(FP32_WEIGHTS)):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if "in backward" not in provider:
        return step
    from ligermodels.training.optimizers import OptimizerInBackward

    updates = OptimizerInBackward(optimizer)

    def step_in_backward():
        loss = model(**inputs).loss
        updates.begin(loss)
        loss.backward()
        updates.finish()
        return loss.detach()

    return step_in_backward


def measure(
    provider: str, model_name: str, batch: int, length: int, checkpointing: str, steps: int, warm_up: int,
    supervised: float, gib: float, offload_every: int,
) -> dict:  # fmt: skip
    """Measures one row. Runs in its own process, because Liger patches the classes of transformers in place."""
    torch.manual_seed(0)
    raw = MODELS[model_name]
    model = PROVIDERS[provider](raw, checkpointing if checkpointing in ("selective", "full") else None)
    if "inputs" in provider:
        model.offload_inputs(every=offload_every)
    attention = getattr(model.config, "_attn_implementation", None)
    optimizer = make_optimizer(provider, model)
    filled = {}
    if checkpointing == "auto":
        filled = fill_memory(model, batch, length, gib, **plan_settings(provider, optimizer))
    ids = torch.randint(raw["vocab_size"], (batch, length), device="cuda")
    labels = ids.clone()
    labels[:, : length - round(supervised * length)] = -100
    labels[:, 0] = -100  # the first token of a sequence is never a target
    inputs: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if provider in (PACKED, PACKED_BEFORE, PACKED_ROWS):
        packed = {"input_ids": ids.view(1, -1), "labels": labels.view(1, -1)}
        inputs = packed | documents(batch, length)
    if provider == PACKED_ROWS:
        from ligermodels.training.data.rows.run_rows import supervised_rows

        rows = supervised_rows(labels.cpu(), pinned=True)
        inputs["rows"] = None if rows is None else rows.cuda()

    step = training_step(provider, model, optimizer, inputs)
    row = time_steps(step, steps, batch * length, warm_up)
    if provider.startswith(OURS) and checkpointing in ("full", "none"):
        blocks = len(model.blocks) if checkpointing == "full" else 0
        row |= planned(provider, model, optimizer, batch, length, blocks, offload_every)
    return row | filled | ({"attention": attention} if attention else {})


def documents(count: int, length: int) -> dict[str, Any]:
    """The offsets of documents in one row: of `length` tokens, but for 16 more or fewer, since documents of equal
    length are computed as rows."""
    offsets = torch.arange(0, count * length + 1, length, dtype=torch.int32)
    offsets[1:-1:2] += 16
    longest = int(offsets.diff().max())
    return {"cu_seqlens": offsets.cuda(), "max_seqlen": longest}


def planned(provider: str, model, optimizer, batch: int, length: int, blocks: int, offload_every: int) -> dict:
    """The peak that `ligermodels train` would plan for a row with so many checkpointed blocks."""
    from ligermodels.memory.model import training_memory

    offloaded = len(range(0, blocks, offload_every)) if "inputs" in provider else 0
    room = offloaded * batch * length * model.config.hidden_size * torch.bfloat16.itemsize
    needs = training_memory(
        model, batch, length, torch.bfloat16, checkpointed_blocks=blocks, room_for_inputs=room,
        **plan_settings(provider, optimizer),
    )  # fmt: skip
    return {"planned_gib": round(needs.peak / 2**30, 1), "inputs_on_host_gib": round(needs.offloaded_inputs / 2**30, 1)}


def time_steps(step: Callable[[], torch.Tensor], steps: int, tokens: int, warm_up: int = 3) -> dict:
    """What one row reports, after so many steps of warm-up; a step has so many tokens and returns its loss."""
    loss = torch.zeros(())
    for _ in range(warm_up):
        loss = step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        loss = step()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return {
        "tokens_per_second": round(1e3 * tokens / statistics.median(times)),
        "step_ms": round(statistics.median(times), 1),
        "spread_ms": round(max(times) - min(times), 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "loss": round(loss.item(), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--supervised", type=float, default=1.0, help="share of each sequence, at its end")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder for the dated JSON file")
    parser.add_argument(
        "--providers", nargs="+", choices=PROVIDERS, default=[name for name in PROVIDERS if "eager" not in name]
    )
    parser.add_argument(
        "--activation-checkpointing", choices=("full", "selective", "auto", "none"), nargs="+", default=["full", "none"]
    )
    parser.add_argument("--memory", type=float, default=80.0, help="GiB that auto fills, of ligermodels' providers")
    parser.add_argument("--offload-every", type=int, default=1, help="of inputs: those of every k-th block")
    parser.add_argument("--row", nargs=2, metavar=("PROVIDER", "CHECKPOINTING"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        provider, checkpointing = args.row
        shape = args.batch, args.length, checkpointing, args.steps, args.warm_up
        further = args.supervised, args.memory, args.offload_every
        print(json.dumps(measure(provider, args.model, *shape, *further)))
        return

    rows = print_rows_of_providers("benchmarks.train_step", args.providers, args.activation_checkpointing)
    settings = {"model": args.model, "batch": args.batch, "length": args.length, "supervised": args.supervised}
    settings |= {"offload_every": args.offload_every}
    report = results.environment() | {"ceilings": timing.ceilings()} | settings | {"rows": rows}
    print(results.save(args.output, f"train-step-{args.model}-{args.batch}x{args.length}", report))


if __name__ == "__main__":
    main()
