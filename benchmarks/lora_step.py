"""Whole LoRA training steps on one GPU: tokens/s and peak memory, with the frozen base in bf16 or in few bits (QLoRA).

    python -m benchmarks.lora_step --model llama-3-8b --batch 8 --length 2048
    python -m benchmarks.lora_step --model qwen3-30b-a3b --batch 4 --targets all-linear experts \
        --providers "ligermodels, QLoRA" "ligermodels, LoRA on FP8" --activation-checkpointing full
    python -m benchmarks.lora_step --model gpt-oss-20b --batch 4 --providers "ligermodels, LoRA on MXFP4"
    python -m benchmarks.lora_step --batch 1 --length 100000 --rank 32 --gpu-memory 24 --steps 1 --warm-up 0 \
        --activation-checkpointing full --providers "ligermodels, QLoRA, offloaded inputs"

Rank 16 on every linear of the blocks, unless ligermodels is given others; adapters and AdamW states are in fp32 for
ligermodels, in the dtype that PEFT chooses for the others. Random weights and tokens. Rows are measured as in
`train_step`.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import results, timing
from benchmarks.processes import print_rows_of_providers
from benchmarks.train_step import MODELS, hugging_face, time_steps

RANK, ALPHA = 16, 32
CONFIGS = Path(__file__).parents[1] / "tests" / "data" / "configs"
LORA_MODELS = MODELS | {
    "llama-3-70b": MODELS["llama-3-8b"] | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "gpt-oss-20b": json.loads((CONFIGS / "openai--gpt-oss-20b.json").read_text()),
    "qwen3-30b-a3b": MODELS["qwen3-30b-a3b-8-layers"] | {"num_hidden_layers": 48},
}  # fmt: skip
OFFLOADED = "ligermodels, QLoRA, offloaded inputs"  # of checkpointed blocks, as --offload activations
OFFLOADED_WEIGHTS = f"{OFFLOADED} and weights"  # those of the base, as --offload activations weights
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def ligermodels_lora(
    raw: dict[str, Any], checkpointing: bool, targets: Sequence[str], rank: int, base: str | None = None,
    offload: bool = False, float8: bool = False, offload_weights: bool = False,
) -> nn.Module:  # fmt: skip
    import ligermodels
    from ligermodels.adapters.lora_targets import expert_projections
    from ligermodels.adapters.quantising import multiply_in_fp8, quantise
    from ligermodels.kernels.quant.mxfp4 import EXPONENT_BIAS, Mxfp4Layout
    from ligermodels.layers.lora import initialize_lora
    from ligermodels.layers.quantised import FrozenWeights

    model = ligermodels.create(raw, dtype=torch.bfloat16, device="meta")
    if base == "mxfp4":  # routed experts alone, as gpt-oss stores them
        quantise(model, base, list(expert_projections(model)))
    elif base is not None:
        quantise(model, base)
    if float8:
        multiply_in_fp8(model)
    ligermodels.add_lora(model, rank=rank, alpha=2 * rank, targets=targets, dtype=torch.float32)
    if offload_weights:
        model.offload_weights("cuda")
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        if parameter.is_floating_point():
            nn.init.normal_(parameter.data, std=0.02)
    for module in model.modules():
        for weight in module.quantised_weights().values() if isinstance(module, FrozenWeights) else ():
            if isinstance(weight.layout, Mxfp4Layout):
                weight.data.random_(256)
                weight.layout.view(weight.data)[0].fill_(EXPONENT_BIAS - 7)
                continue
            dense = torch.empty(weight.shape, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)
            weight.data.copy_(weight.layout.quantize(dense))
    initialize_lora(model, torch.Generator("cuda").manual_seed(0))
    if checkpointing:
        model.checkpoint_activations()
    if offload:
        model.offload_inputs()
    return model.train()


def peft_lora(raw: dict[str, Any], checkpointing: bool) -> nn.Module:
    import peft

    model = hugging_face(raw, checkpointing)
    model.enable_input_require_grads()
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LINEARS))


def peft_lora_liger(raw: dict[str, Any], checkpointing: bool) -> nn.Module:
    import liger_kernel.transformers as patches

    getattr(patches, f"apply_liger_kernel_to_{raw['model_type']}")()
    return peft_lora(raw, checkpointing)


def peft_qlora(raw: dict[str, Any], checkpointing: bool) -> nn.Module:
    """A base in bitsandbytes' NF4 with double quantisation, as transformers would load it."""
    import bitsandbytes
    import peft

    model = hugging_face(raw, checkpointing)
    for name, linear in [*model.named_modules()]:
        if isinstance(linear, nn.Linear) and name.rpartition(".")[2] in LINEARS:
            quantised = bitsandbytes.nn.Linear4bit(
                linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=torch.bfloat16,
                compress_statistics=True, quant_type="nf4", device="meta",
            )  # fmt: skip
            quantised.weight = bitsandbytes.nn.Params4bit(
                linear.weight.data.cpu(), requires_grad=False, compress_statistics=True, quant_type="nf4"
            )
            quantised.bias = linear.bias
            model.set_submodule(name, quantised.cuda())
    torch.cuda.empty_cache()
    model = peft.prepare_model_for_kbit_training(
        model, use_gradient_checkpointing=checkpointing, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LINEARS))


def unsloth_qlora(raw: dict[str, Any], checkpointing: bool) -> nn.Module:
    """As Unsloth loads a folder in 4 bits; its checkpointing keeps the inputs of blocks in host memory."""
    from unsloth import FastLanguageModel  # first: it patches the others when they are imported
    from tokenizers import Tokenizer, models  # isort: skip
    from transformers import PreTrainedTokenizerFast  # isort: skip

    with tempfile.TemporaryDirectory() as folder:
        hugging_face(raw, checkpointing=False).save_pretrained(folder)
        words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
        PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", bos_token="<eos>"
        ).save_pretrained(folder)
        torch.cuda.empty_cache()
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=raw["max_position_embeddings"], dtype=torch.bfloat16, load_in_4bit=True,
            fix_tokenizer=False,
        )  # fmt: skip
    return FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=ALPHA, target_modules=LINEARS, lora_dropout=0, bias="none",
        use_gradient_checkpointing="unsloth" if checkpointing else False,
    ).train()  # fmt: skip


PROVIDERS: dict[str, Callable[..., nn.Module]] = {
    "ligermodels, LoRA": ligermodels_lora,
    "ligermodels, QLoRA": partial(ligermodels_lora, base="nf4"),
    OFFLOADED: partial(ligermodels_lora, base="nf4", offload=True),
    OFFLOADED_WEIGHTS: partial(ligermodels_lora, base="nf4", offload=True, offload_weights=True),
    "ligermodels, LoRA on FP8": partial(ligermodels_lora, base="fp8"),
    "ligermodels, LoRA on FP8, multiplied in FP8": partial(ligermodels_lora, base="fp8", float8=True),
    "ligermodels, LoRA on MXFP4": partial(ligermodels_lora, base="mxfp4"),
    "hugging face + peft, LoRA": peft_lora,
    "hugging face + peft + liger, LoRA": peft_lora_liger,
    "hugging face + peft + bitsandbytes, QLoRA": peft_qlora,
    "unsloth, QLoRA": unsloth_qlora,
}

# Of models whose experts are not stored in MXFP4, and with and without activation checkpointing.
USUAL = [name for name in PROVIDERS if not name.endswith("MXFP4") and not name.startswith(OFFLOADED)]


def measure(provider: str, checkpointing: bool, args: argparse.Namespace) -> dict:
    torch.manual_seed(0)
    if args.gpu_memory:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.gpu_memory * 1e9 / total)
    raw = LORA_MODELS[args.model] | ({"num_hidden_layers": args.layers} if args.layers else {})
    batch, length = args.batch, args.length
    model = PROVIDERS[provider](raw, checkpointing, *([args.targets, args.rank] if "ligermodels" in provider else []))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    ids = torch.randint(raw["vocab_size"], (batch, length), device="cuda")
    labels = ids.masked_fill(torch.arange(length, device="cuda") == 0, -100)

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled="ligermodels" not in provider):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return {"trained": sum(p.numel() for p in trained)} | time_steps(step, args.steps, batch * length, args.warm_up)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=LORA_MODELS, default="llama-3-8b")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--layers", type=int, help="other than the model has")
    parser.add_argument("--rank", type=int, default=RANK, help="of ligermodels")
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help="what the allocator may take")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder for the dated JSON file")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=[*USUAL])
    parser.add_argument("--activation-checkpointing", choices=("full", "none"), nargs="+", default=["full", "none"])
    parser.add_argument("--targets", nargs="+", default=["all-linear"], help="of ligermodels, as all-linear experts")
    parser.add_argument("--row", nargs=2, metavar=("PROVIDER", "CHECKPOINTING"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        provider, checkpointing = args.row
        print(json.dumps(measure(provider, checkpointing == "full", args)))
        return
    rows = print_rows_of_providers("benchmarks.lora_step", args.providers, args.activation_checkpointing)
    names = "model", "batch", "length", "targets", "rank", "layers", "gpu_memory"
    settings = {name: getattr(args, name) for name in names}
    report = results.environment() | {"ceilings": timing.ceilings()} | settings | {"rows": rows}
    print(results.save(args.output, f"lora-step-{args.model}-{args.batch}x{args.length}", report))


if __name__ == "__main__":
    main()
