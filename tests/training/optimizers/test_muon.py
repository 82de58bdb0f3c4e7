"""Muon compared with torch.optim.Muon, matrix by matrix, and sharded compared with a single process."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ligermodels
from ligermodels.architectures import ARCHITECTURES
from ligermodels.errors import InputError
from ligermodels.layers.lora import GroupedUpdate
from ligermodels.training.optimizers.muon import Muon, matrix_views, newton_schulz, orthogonal_update, split_by_rows
from ligermodels.weights.mapping import plan_pieces
from tests.conftest import DEVICE
from tests.kernels.error_budget import FACTOR, relative_error
from tests.layers.adapters import RANK, adapt

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def draw(shape, seed, device=DEVICE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def torchs(params):
    return torch.optim.Muon(params, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")


@pytest.mark.parametrize("rows", [(12,), (20,), (12, 4, 4), (8, 8)])
def test_each_packed_matrix_is_updated_as_torchs_muon_updates_it_alone(rows):
    whole = nn.Parameter(draw((sum(rows), 16), 0))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().split(rows)]
    ours, theirs = Muon([whole], {whole: split_by_rows(rows)}, **OPTIONS), torchs(parts)
    for seed in range(1, 5):
        whole.grad = draw(whole.shape, seed)
        for part, gradient in zip(parts, whole.grad.split(rows), strict=True):
            part.grad = gradient.clone()
        ours.step()
        theirs.step()
    buffers = torch.cat([theirs.state[part]["momentum_buffer"] for part in parts])
    assert torch.equal(ours.state[whole]["momentum_buffer"], buffers)
    # On a GPU a part may use another matmul kernel, on a CPU ours are fp32: some bf16 roundings in an update of 2e-3.
    torch.testing.assert_close(whole, torch.cat(parts), rtol=0, atol=5e-4)


def orthogonal(matrix):
    """The result of torch's iteration in float64."""
    x = matrix.double()
    x = (x.T if x.shape[0] > x.shape[1] else x) / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def test_each_expert_is_orthogonalised_separately_with_the_rms_of_adamws_update():
    update = draw((3, 16, 24), 0).bfloat16()
    exact = torch.stack([torch.cat([orthogonal(x) for x in expert.split((8, 8))]) for expert in update])
    alone = torch.stack([orthogonal_update(expert, split_by_rows([8, 8])) for expert in update])
    size = 0.2 * 24**0.5
    error = relative_error(orthogonal_update(update, split_by_rows([8, 8])), size * exact)
    assert error <= FACTOR * relative_error(alone, size * exact) and error < 0.05
    assert orthogonal_update(update, split_by_rows([8, 8])).square().mean().sqrt().item() == pytest.approx(
        0.2, rel=0.15
    )


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU the products are in bf16")
def test_on_a_cpu_whose_bf16_products_are_slow_the_products_are_in_fp32():
    matrix = draw((12, 20), 0).bfloat16()
    torch.testing.assert_close(newton_schulz(matrix), orthogonal(matrix).float(), rtol=0, atol=1e-5)


def test_with_a_zero_gradient_only_weight_decay_changes_weights():
    p = nn.Parameter(draw((4, 8), 0))
    before = p.detach().clone()
    optimizer = Muon([p], {p: split_by_rows([4])}, **OPTIONS)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(p.detach(), before * (1 - 1e-2 * 0.1))


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if ARCHITECTURES[name].SIZES])
def test_muon_updates_all_matrices_of_the_blocks_except_routers_and_splits_packed_ones(architecture):
    model = ligermodels.create(architecture, size="tiny", device="meta")
    matrices = matrix_views(model)
    rows_of_in_proj = {"qwen3_next": 2, "qwen3_5_text": 4, "qwen3_5_moe_text": 4, "granitemoehybrid": 3}
    others = ("bias", ".gate.weight", "expert_gate.weight", ".conv.weight", ".conv1d.weight")
    for name, parameter in model.named_parameters():
        in_block = name.startswith(("model.layers.", "visual.blocks.", "visual.global_blocks.")) and parameter.ndim > 1
        assert (parameter in matrices) == (in_block and not name.endswith(others)), name
        if parameter in matrices:
            views = matrices[parameter](parameter)
            packed = {
                "qkv_proj": 3,
                "kv_proj": 2,
                "gate_up_proj": 2,
                "qkv_a_proj": 2,
                "in_proj": rows_of_in_proj.get(architecture, 1),
            }
            assert len(views) == packed.get(name.removesuffix(".weight").rpartition(".")[2], 1)
            assert sum(view.numel() for view in views) == parameter.numel()


@pytest.mark.parametrize("architecture", ["llama", "qwen2_moe", "deepseek_v3", "qwen3_5_text", "qwen3_next"])
def test_packed_matrices_are_split_into_the_tensors_of_the_hub(architecture):
    model = ligermodels.create(architecture, size="tiny", device="meta")
    for name, parameter in model.named_parameters():
        if parameter in matrix_views(model):
            views = matrix_views(model)[parameter](parameter)
            pieces = plan_pieces({name: parameter.shape}, model.weight_rules())[: len(views)]
            assert [view.shape[-2:] for view in views] == [piece.shape for piece in pieces], name


def test_both_lora_factors_of_each_packed_projection_are_matrices():
    model = ligermodels.create("llama", size="tiny", device="meta")
    with torch.device("meta"):
        adapt(model, targets=["q_proj", "v_proj", "down_proj"])
    matrices, hidden, key = matrix_views(model), model.config.hidden_size, model.config.key_value_size

    def shapes(parameter):
        return [tuple(view.shape) for view in matrices[parameter](parameter)]

    attention = model.model.layers[0].self_attn.qkv_proj
    assert shapes(attention.lora_A) == [(RANK, hidden), (RANK, hidden)]
    assert shapes(attention.lora_B) == [(model.config.query_size, RANK), (key, RANK)]
    assert shapes(model.model.layers[0].mlp.down_proj.lora_B) == [(hidden, RANK)]


def test_both_lora_factors_of_each_expert_are_matrices():
    module = GroupedUpdate(torch.empty(3, 10, 6), rank=2, alpha=1.0, dtype=None).to(DEVICE)
    matrices = matrix_views(module)
    for parameter in matrices:
        nn.init.normal_(parameter)
    factors = module.low_rank(torch.float32)  # [E, r, K] and [E, N, r], in the layout of the kernels
    for parameter, factor in ((module.lora_A, factors.a), (module.lora_B, factors.b)):
        (view,) = matrices[parameter](parameter)
        assert torch.equal(view, factor)


SHAPES = {
    (10, 6): (6, 4),
    (12, 8): (12,),
    (9, 4): (9,),
    (5, 7): (5,),
    (3, 6): (1, 1, 1),
    (5, 4, 6): (2, 2),
    (11,): None,
}


def trained(place=lambda x: x):
    """Returns weights and optimizer state, unsharded, after three steps on a CPU with one parameter per shape."""
    params = [nn.Parameter(place(draw(shape, 0, "cpu"))) for shape in SHAPES]
    matrices = {p: split_by_rows(rows) for p, rows in zip(params, SHAPES.values(), strict=True) if rows}
    optimizer = Muon(params, matrices, **OPTIONS)
    for seed in range(1, 4):
        for p in params:
            p.grad = place(draw(p.shape, seed, "cpu"))
        optimizer.step()
    tensors = [x for p in params for x in (p.detach(), *optimizer.state[p].values())]
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in tensors]


def train_on_a_rank(rank, dp_replicate, dp_shard, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=dp_replicate * dp_shard)
    mesh = init_device_mesh("cpu", (dp_replicate, dp_shard), mesh_dim_names=("dp_replicate", "dp_shard"))
    results = trained(lambda x: distribute_tensor(x, mesh, [Replicate(), Shard(0)], src_data_rank=None))
    torch.save(results, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.mark.parametrize("dp_replicate, dp_shard", [(1, 3), (2, 2)])
def test_updates_of_shards_are_bit_identical_to_those_of_one_process(dp_replicate, dp_shard, tmp_path):
    """With rows that divide unevenly, a rank without rows, and more matrices than ranks."""
    processes.start_processes(
        train_on_a_rank, (dp_replicate, dp_shard, tmp_path), nprocs=dp_replicate * dp_shard, start_method="fork"
    )
    alone = trained()
    for rank in range(dp_replicate * dp_shard):
        for got, expected in zip(torch.load(tmp_path / str(rank)), alone, strict=True):
            # On a CPU, AdamW differs in the last bit between full SIMD vectors and the remainder of an array.
            torch.testing.assert_close(got, expected, rtol=2e-7 if expected.ndim == 1 else 0, atol=0)


def test_matrices_sharded_by_columns_are_rejected(rank_of_four):
    mesh = rank_of_four(0)
    p = nn.Parameter(DTensor.from_local(torch.zeros(4, 2, device=DEVICE), mesh, [Shard(1)], run_check=False))
    with pytest.raises(InputError, match=r"sharded by rows; one of shape \[4, 8\] is .*Shard\(dim=1\)"):
        Muon([p], {p: split_by_rows([4])}, **OPTIONS)
