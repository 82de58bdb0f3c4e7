"""ligermodels' fused kernels in a Hugging Face Llama: RMSNorm, gated MLP and the loss over the vocabulary.

    python examples/kernels_in_your_model.py

Runs in seconds on a CPU (plain PyTorch reference implementations) and on a GPU (Triton kernels). The weights are
random and nothing is downloaded. Prints the losses of the unpatched and the patched model, checks that losses and
gradients agree, and measures step time and peak memory on a GPU.
"""

import time

import torch
from torch import Tensor
from torch.nn import Module
from transformers import LlamaConfig, LlamaForCausalLM

from ligermodels import nn, ops

TINY = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "vocab_size": 1000}
LARGER = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "vocab_size": 128256}


def use_fused_kernels(model: LlamaForCausalLM) -> None:
    """Replaces norms and MLPs by modules that share their weights; gate_proj and up_proj are packed into one."""
    size, eps = model.config.hidden_size, model.config.rms_norm_eps
    replace(model.model, "norm", nn.RMSNorm(size, eps, device="meta"))
    for layer in model.model.layers:
        replace(layer, "input_layernorm", nn.RMSNorm(size, eps, device="meta"))
        replace(layer, "post_attention_layernorm", nn.RMSNorm(size, eps, device="meta"))
        replace(layer, "mlp", nn.GatedMLP(size, model.config.intermediate_size, device="meta"))


def replace(parent: Module, name: str, fused: Module) -> None:
    fused.load_state_dict(getattr(parent, name).state_dict(), assign=True)
    setattr(parent, name, fused)


def fused_loss(model: LlamaForCausalLM, input_ids: Tensor) -> Tensor:
    """The causal language modelling loss, without the logits of all tokens in memory."""
    hidden = model.model(input_ids).last_hidden_state
    return ops.linear_cross_entropy(hidden[:, :-1], model.lm_head.weight, input_ids[:, 1:])


def plain_loss(model: LlamaForCausalLM, input_ids: Tensor) -> Tensor:
    return model(input_ids, labels=input_ids).loss


def packed_gradients(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Gradients by name, with those of separate gate and up projections concatenated."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for name in [name for name in found if "gate_proj" in name]:
        gate, up = found.pop(name), found.pop(name.replace("gate_proj", "up_proj"))
        found[name.replace("gate_proj", "gate_up_proj")] = torch.cat((gate, up))
    return found


def build(sizes: dict[str, int], device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).to(device, dtype)


def measure(loss_of, model: LlamaForCausalLM, input_ids: Tensor) -> str:
    for step in range(5):
        if step == 2:  # after the kernels are compiled
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
        loss_of(model, input_ids).backward()
        model.zero_grad()
    torch.cuda.synchronize()
    milliseconds = (time.perf_counter() - start) / 3 * 1e3
    return f"{milliseconds:.1f} ms a step, peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    input_ids = torch.randint(TINY["vocab_size"], (2, 128), device=device)
    plain, fused = (build(TINY, device, torch.float32) for _ in range(2))
    use_fused_kernels(fused)

    losses = plain_loss(plain, input_ids), fused_loss(fused, input_ids)
    print(f"loss: Hugging Face {losses[0]:.6f}, fused {losses[1]:.6f}")
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(packed_gradients(fused), packed_gradients(plain), rtol=1e-3, atol=1e-5)
    print(f"gradients of {len(packed_gradients(fused))} parameters agree")

    if device == "cuda":
        input_ids = torch.randint(LARGER["vocab_size"], (4, 2048), device=device)
        model = build(LARGER, device, torch.bfloat16)
        print(f"Hugging Face: {measure(plain_loss, model, input_ids)}")
        use_fused_kernels(model)
        print(f"fused: {measure(fused_loss, model, input_ids)}")


if __name__ == "__main__":
    main()
