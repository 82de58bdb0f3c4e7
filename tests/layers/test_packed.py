"""Parts of packed linears: what reads, hooks or replaces a part gets the part's numbers, and nothing else changes."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ligermodels
from ligermodels.errors import InputError
from ligermodels.layers.packed import PackedLinear, PackedPart, put_together
from tests.cases import CASES, LLAMA
from tests.conftest import DEVICE

BIASED = LLAMA | {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2}
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
HIDDEN, Q, KV = 48, 48, 16


def model_and_layer(raw=BIASED, **options):
    model = ligermodels.create(raw, device=DEVICE, **options)
    return model, model.model.layers[0]


def packed_linears(model):
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def loss(model):
    ids = torch.randint(3, 99, (2, 4), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return model(ids, ids).loss


def hub_gradients(model):
    """Gradients by the Hub's names: packed ones are split."""
    found = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if isinstance(module, PackedLinear):
                for part, rows in module.rows.items():
                    found[name.replace(prefix.rpartition(".")[2], part)] = parameter.grad[rows]
            else:
                found[name] = parameter.grad
    return found


def assert_equal_training(model, expected):
    """One backward pass of both: equal losses and gradients."""
    losses = loss(model), loss(expected)
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    for value in losses:
        value.backward()
    torch.testing.assert_close(hub_gradients(model), hub_gradients(expected), rtol=1e-5, atol=1e-6)


def test_parts_own_nothing_and_looking_at_them_changes_nothing():
    model, layer = model_and_layer()
    names = {name for name, module in layer.named_modules() if isinstance(module, PackedPart)}
    assert names == set(PARTS)
    assert {name for name, module in layer.named_modules() if isinstance(module, nn.Linear)} == {
        *PARTS, "self_attn.o_proj", "mlp.down_proj",
    }  # fmt: skip
    assert not any(
        any(part in name for part in PARTS) for name in (*model.state_dict(), *dict(model.named_parameters()))
    )
    assert "k_proj): PackedPart(in_features=48, out_features=16, rows=slice(48, 64" in repr(model)
    assert layer.self_attn.k_proj.out_features == KV
    model.train().eval().float().requires_grad_(True)
    assert all(module.is_whole for module in packed_linears(model))


def test_the_hubs_packing_decides_which_linears_have_parts():
    phi3, glm = (ligermodels.create(CASES[name]).model.layers[0] for name in ("phi3", "glm"))
    assert type(phi3.self_attn.qkv_proj) is nn.Linear and type(phi3.mlp.gate_up_proj) is nn.Linear
    assert type(glm.self_attn.qkv_proj) is PackedLinear and type(glm.mlp.gate_up_proj) is nn.Linear


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("part", PARTS)
def test_hooks_of_a_part_run_and_change_its_output(part):
    model, layer = model_and_layer()
    seen = []
    handle = layer.get_submodule(part).register_forward_hook(lambda _, inputs, output: seen.append(output.clone()))
    assert_equal_training(model, model_and_layer()[0])
    assert [x.shape[-1] for x in seen] == [layer.get_submodule(part).out_features]
    handle.remove()
    assert all(module.is_whole for module in packed_linears(model))
    layer.get_submodule(part).register_forward_hook(lambda _, inputs, output: output * 2)
    assert (loss(model) - loss(model_and_layer()[0])).abs() > 1e-4


@pytest.mark.usefixtures("kernels")
def test_a_model_whose_linears_are_apart_trains_as_before():
    model, _ = model_and_layer()
    for module in packed_linears(model):
        module.take_apart()
    assert "model.layers.0.self_attn.k_proj.bias" in dict(model.named_parameters())
    assert not any("qkv" in name or "gate_up" in name for name, _ in model.named_parameters())
    assert_equal_training(model, model_and_layer()[0])


@pytest.mark.parametrize("replace", [setattr, lambda parent, name, module: parent._modules.update({name: module})])
def test_a_replaced_part_is_used_and_trained(replace):
    model, layer = model_and_layer(LLAMA)
    before = loss(model)
    replace(layer.self_attn, "k_proj", nn.Linear(HIDDEN, KV, bias=False, device=DEVICE))
    after = loss(model)
    after.backward()
    assert (after - before).abs() > 1e-4 and layer.self_attn.k_proj.weight.grad.any()
    assert (layer.self_attn.qkv_proj.weight is None) is (replace is setattr)  # an optimizer has no stale weight


def test_reading_a_weight_or_training_a_part_gives_it_parameters_in_the_same_memory():
    for use in (lambda part: part.weight, lambda part: part.bias, lambda part: part.requires_grad_(True)):
        model, layer = model_and_layer()
        model.requires_grad_(False)
        attention, packed = layer.self_attn, layer.self_attn.qkv_proj.weight
        use(attention.k_proj)
        assert type(attention.k_proj) is type(attention.q_proj) is nn.Linear
        assert attention.k_proj.weight.data_ptr() == packed[Q].data_ptr() and attention.qkv_proj.weight is None
        assert type(layer.mlp.up_proj) is PackedPart  # of another packed linear
        trained = {name for name, parameter in attention.named_parameters() if parameter.requires_grad}
        assert trained in (set(), {"k_proj.weight", "k_proj.bias"})


def test_gradients_are_kept_when_a_packed_linear_is_taken_apart():
    model, layer = model_and_layer()
    loss(model).backward()
    gradient = layer.mlp.gate_up_proj.weight.grad
    assert torch.equal(layer.mlp.up_proj.weight.grad, gradient[80:]) and gradient.any()


def test_what_was_taken_apart_is_put_together_unless_the_parts_differ():
    model, layer = model_and_layer()
    weight, bias = layer.self_attn.qkv_proj.weight, layer.self_attn.qkv_proj.bias
    for part in (layer.self_attn.v_proj, layer.mlp.up_proj):
        assert part.weight is not None
    layer.mlp.up_proj.half()
    put_together(model)
    assert torch.equal(layer.self_attn.qkv_proj.weight, weight) and torch.equal(layer.self_attn.qkv_proj.bias, bias)
    assert layer.self_attn.qkv_proj.is_whole and type(layer.self_attn.v_proj) is PackedPart
    assert not layer.mlp.gate_up_proj.is_whole and type(layer.mlp.gate_proj) is nn.Linear


@pytest.mark.parametrize("apart", [False, True])
def test_copies_and_pickles_are_independent_of_the_model(apart):
    model, layer = model_and_layer()
    if apart:
        layer.self_attn.qkv_proj.take_apart()
    expected = loss(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert torch.equal(loss(other), expected)
        with torch.no_grad():
            other.model.layers[0].self_attn.q_proj.weight.zero_()
        assert (loss(other) - expected).abs() > 1e-4 and torch.equal(loss(model), expected)
    assert layer.self_attn.qkv_proj.is_whole is not apart


def test_a_part_copied_alone_is_a_linear_of_its_own():
    _, layer = model_and_layer()
    attention = layer.self_attn
    alone = copy.deepcopy(attention.v_proj)
    assert type(alone) is nn.Linear and attention.qkv_proj.is_whole
    assert torch.equal(alone.weight, attention.qkv_proj.weight[Q + KV :])
    assert torch.equal(alone.bias, attention.qkv_proj.bias[Q + KV :])
    assert alone.weight.data_ptr() != attention.qkv_proj.weight[Q + KV :].data_ptr()


def test_a_state_dict_with_the_hubs_names_is_loaded_apart_and_whole():
    model, _ = model_and_layer()
    for module in packed_linears(model):
        module.take_apart()
    other, _ = model_and_layer(seed=1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(loss(other), loss(model)) and all(module.is_whole for module in packed_linears(other))


def test_a_model_that_was_taken_apart_is_exported_as_before(tmp_path):
    model, layer = model_and_layer()
    assert layer.mlp.gate_proj.weight is not None
    ligermodels.export(model, tmp_path / "apart")
    read = ligermodels.load(tmp_path / "apart", device=DEVICE)
    assert torch.equal(loss(read.train()), loss(model_and_layer()[0]))


def test_lora_is_added_to_what_was_taken_apart():
    model, layer = model_and_layer()
    assert layer.self_attn.q_proj.weight is not None
    ligermodels.add_lora(model, targets=("q_proj", "up_proj"), rank=2)
    names = {name.removesuffix(".lora_A") for name, _ in layer.named_parameters() if name.endswith("lora_A")}
    assert names == {"self_attn.q_proj", "mlp.gate_up_proj"}


def test_a_part_of_a_replaced_or_sharded_packed_linear_is_refused(tmp_path):
    model, layer = model_and_layer()
    layer.mlp.gate_up_proj = layer.mlp.gate_up_proj.as_linear()
    assert torch.equal(loss(model), loss(model_and_layer()[0]))
    with pytest.raises(InputError, match="gate_proj, up_proj: the linear that packs them was replaced"):
        layer.mlp.up_proj = nn.Linear(HIDDEN, 80)
    layer = ligermodels.create(BIASED).model.layers[0]
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
        with pytest.raises(InputError, match="q_proj, k_proj, v_proj: the linear that packs them is sharded"):
            layer.self_attn.q_proj.requires_grad_(True)
    finally:
        dist.destroy_process_group()
