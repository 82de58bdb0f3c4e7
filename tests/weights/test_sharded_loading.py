"""Loading under FSDP2 with real processes: each rank reads its own shard of every parameter, and no other byte."""

import os

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from ligermodels import hub
from ligermodels.weights.loading import load_weights

# Only the hidden size divides evenly: 97 rows of the embedding, 5 experts of width 7, 4 query and 2 key-value heads.
MIXTURE = {
    "model_type": "qwen3_moe", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64,
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 7, "norm_topk_prob": True,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
MESHES = {"2": [0, 1], "3": [0, 1, 2], "2 x 2": [[0, 1], [2, 3]]}
# By name: the sharded dimension of a parameter, and its dtype. The stored dtype is bf16.
LAYOUTS = {
    "rows": (lambda parameter: Shard(0), torch.bfloat16),
    "columns": (lambda parameter: Shard(1 if parameter.dim() == 2 else 0), torch.float32),
    "inside experts": (
        lambda parameter: Shard(2 if parameter.shape[-1] == 24 and parameter.dim() == 3 else 0),
        torch.float32,
    ),
}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_every_rank_of_every_mesh_reads_its_own_shards(tmp_path):
    """All cases share one start of four processes. They are forked, because importing torch again takes much longer."""
    model = hub.create(MIXTURE, dtype=torch.bfloat16)
    hub.export(model, tmp_path / "stored")
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    torch.multiprocessing.start_processes(rank_loads, (tmp_path, whole), nprocs=4, start_method="fork")


def rank_loads(rank, tmp_path, whole):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=4)
    for mesh_name, ranks in MESHES.items():
        names = ("replicate", "shard")[-torch.tensor(ranks).dim() :]
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        if mesh.get_coordinate() is None:
            continue
        for layout, (placement, dtype) in LAYOUTS.items():
            check_shards(f"{layout} on {mesh_name}", mesh, placement, dtype, tmp_path, whole)
    distributed.barrier()
    distributed.destroy_process_group()


def check_shards(case, mesh, placement, dtype, tmp_path, whole):
    model = hub.create(MIXTURE, dtype=dtype, device="meta")
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=placement)
    model.to_empty(device="cpu")
    read = bytes_read_by(lambda: load_weights(model, tmp_path / "stored"))
    shards, index = mesh["shard"].size(), mesh["shard"].get_local_rank()
    for name, parameter in model.named_parameters():
        local, dim = parameter.to_local(), placement(parameter).dim
        parts = whole[name].to(dtype).chunk(shards, dim)
        expected = parts[index] if index < len(parts) else whole[name].narrow(dim, 0, 0)
        assert torch.equal(local, expected), f"{case}: {name}"
        assert torch.equal(parameter.full_tensor(), whole[name].to(dtype)), f"{case}: {name}"
    assert read == 2 * sum(parameter.to_local().numel() for parameter in model.parameters()), case
    fresh = dict(hub.create(MIXTURE).named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, fresh[name]), f"{case}: {name}"


def bytes_read_by(action):
    counts, preadv = [], os.preadv

    def counted(*arguments):
        counts.append(preadv(*arguments))
        return counts[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        action()
    return sum(counts)
