"""A second conversion of the two GGUF files, written from llama.cpp's rules alone: what our loader is compared with."""

import struct
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}  # fmt: skip
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


class Reader(gguf.GGUFReader):
    """Passes over arrays: it would make several of each token and merge of the vocabulary, for half a minute."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list, list[int], list]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data, end = memoryview(self.data), orig_offs + 12
        kind, count = struct.unpack("<IQ", data[orig_offs:end])
        if kind in self.gguf_scalar_to_np:
            end += count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        else:  # strings, each behind its length
            for _ in range(count):
                end += 8 + int.from_bytes(data[end : end + 8], "little")
        return end - orig_offs, [], [], []


def converted(file: Path) -> dict[str, Tensor]:
    """The tensors of a GGUF file of Llama or Gemma 3 in bf16, by their names on the Hub."""
    reader = Reader(file)
    family = reader.fields["general.architecture"].contents()
    heads = {
        "attn_q": reader.fields[f"{family}.attention.head_count"].contents(),
        "attn_k": reader.fields[f"{family}.attention.head_count_kv"].contents(),
    }
    tensors = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        stem = tensor.name.removesuffix(".weight")
        _, layer, part = stem.split(".") if stem not in ENDS else ("", "", stem)
        if family == "llama" and part in heads:  # the halves of each head alternate
            values = values.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).flatten(0, 2)
        if family == "gemma3" and values.ndim == 1:  # norms, stored as 1 + w
            values = values - 1
        name = ENDS.get(stem) or f"model.layers.{layer}.{(PARTS | NORMS[family])[part]}"
        tensors[f"{name}.weight"] = values.bfloat16()
    return tensors
