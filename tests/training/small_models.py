"""A tiny model in a folder, with a tokenizer: as a Hub checkpoint that runs begin with."""

import torch

import ligermodels
from ligermodels.training.data.run_tokenizer import save_tokenizer, train_tokenizer

RAW = {
    "model_type": "qwen2", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip


def save_model(folder, texts, seed=0, dtype=torch.float32, **fields):
    """Writes random weights and a tokenizer that was trained on `texts`; returns the folder."""
    tokenizer = train_tokenizer(texts, vocab_size=RAW["vocab_size"])
    model = ligermodels.create(RAW | fields, dtype=dtype, seed=seed)
    ligermodels.export(model, folder, also=lambda path: save_tokenizer(tokenizer, path))
    return folder


def validations(result):
    """The validations of a run, by step."""
    return {record["step"]: record for record in result.metrics if "validation_loss" in record}
