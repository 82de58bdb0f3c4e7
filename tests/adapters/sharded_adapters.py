"""LoRA in a model sharded over two ranks. Usage: sharded_adapters BASE FOLDER, on each rank."""

import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ligermodels
from ligermodels.errors import CheckpointError
from ligermodels.layers.lora import initialize_lora, lora_modules
from ligermodels.weights.loading import load_weights


def sharded(base, lora=True):
    """A model as in training: built on the meta device, LoRA added, sharded, then loaded."""
    model = ligermodels.create(base, device="meta")
    if lora:
        ligermodels.add_lora(model, rank=4, alpha=6.0)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    load_weights(model, base)
    model.source = base
    initialize_lora(model, torch.Generator().manual_seed(1))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


def main(base, folder):
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    ligermodels.export(sharded(base, lora=False), folder / "base-2")
    assert (folder / "base-2" / "config.json").exists()  # on every rank
    model = sharded(base)
    ligermodels.export_adapter(model, folder / "new")
    ligermodels.load_adapter(model, folder / "adapter")
    assert all(isinstance(layer.lora_B, DTensor) for layer in lora_modules(model))
    ligermodels.export_adapter(model, folder / "adapter-2")
    ligermodels.export(model, folder / "merged-2", dtype=torch.bfloat16, max_shard_size="20KB")
    for wrong, settings in {
        folder / "adapter": {},  # in use
        folder / "file" / "below-a-file": {},
        folder / "too-large": {"dtype": torch.float16},
    }.items():
        if settings:
            torch.nn.init.constant_(model.model.norm.weight, 1e6)  # the last parameter: the head is tied
        try:
            ligermodels.export(model, wrong, **settings)
        except CheckpointError as error:
            (folder / f"{rank}-{wrong.name}").write_text(str(error))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
