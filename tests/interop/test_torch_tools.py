"""torch's own tools and torchao over our models: transforms, compilers, copies, parametrizations, hooks."""

import copy
import io
import pickle

import pytest
import torch
from safetensors.torch import load_model, save_file, save_model
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize, prune, stateless
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ligermodels
from tests.interop.tiny import MODELS, TIED, assert_same_step, batch, build, step
from tests.layers.adapters import adapt
from tests.reference_model import reference_model

every_model = pytest.mark.parametrize("name", MODELS)


def is_tied(model):
    return model.lm_head.weight is model.model.embed_tokens.weight


# Transforms and compilers


def loss_of(model, parameters, ids):
    return functional_call(model, parameters, (ids,), {"labels": ids}).loss


def detached(model):
    return {name: p.detach() for name, p in model.named_parameters()}


@every_model
def test_functional_call_reads_the_given_parameters(name):
    model, ids = build(name), batch()
    parameters = {key: 1.5 * value for key, value in detached(model).items()}
    with torch.no_grad():
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.mul_(1.5)
    expected = other(ids, ids).loss
    torch.testing.assert_close(loss_of(model, parameters, ids), expected)
    torch.testing.assert_close(stateless.functional_call(model, parameters, (ids,), {"labels": ids}).loss, expected)


@every_model
def test_torch_func_computes_gradients_per_sample_and_directional_derivatives(name):
    model, ids = build(name), batch()
    parameters = detached(model)
    torch.testing.assert_close(
        torch.func.grad(lambda p: loss_of(model, p, ids))(parameters), step(model)[1], rtol=1e-4, atol=1e-6
    )
    per_sample = torch.func.vmap(torch.func.grad(lambda p, row: loss_of(model, p, row[None])), (None, 0))
    gradients = per_sample(parameters, ids)
    for row in range(2):
        expected = step(model, ids[row : row + 1])[1]
        torch.testing.assert_close({k: g[row] for k, g in gradients.items()}, expected, rtol=1e-4, atol=1e-6)
    tangent = {key: torch.randn_like(value) for key, value in parameters.items()}
    with sdpa_kernel(SDPBackend.MATH):  # the only implementation with forward-mode derivatives
        _, derivative = torch.func.jvp(lambda p: loss_of(model, p, ids), (parameters,), (tangent,))
    expected = sum((gradient * tangent[key]).sum() for key, gradient in step(model)[1].items())
    torch.testing.assert_close(derivative, expected, rtol=1e-3, atol=1e-4, check_dtype=False)


def test_a_compiled_model_takes_masks_and_any_length_without_compiling_again():
    model, graphs = ligermodels.create(MODELS["llama"] | {"num_hidden_layers": 1}), []
    plain = copy.deepcopy(model)
    model.compile(backend=lambda graph, inputs: graphs.append(graph) or graph, dynamic=True)
    counts = []
    for length in (7, 9, 12):
        ids, mask = batch(3, length), torch.ones(3, length, dtype=torch.int64)
        mask[0, : length - 4] = 0
        loss, expected = (each(ids, ids, attention_mask=mask).loss for each in (model, plain))
        torch.testing.assert_close(loss, expected)
        counts.append(len(graphs))
    assert counts[0] > 0 and counts[1] == counts[2]


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 2), ("qwen3_moe", 1)])  # of gemma2 one has a window
def test_an_exported_program_runs_at_any_length(name, layers):
    model = build(name).eval()
    del model.model.layers[layers:]
    sizes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=128)}
    program = torch.export.export(model, (batch(),), dynamic_shapes={"input_ids": sizes}, strict=False)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    run = torch.export.load(file).module()
    for ids in (batch(3, 5), batch(1, 23)):  # shorter and longer than the window
        torch.testing.assert_close(run(ids).logits, model(ids).logits)


def test_what_cannot_be_traced_is_refused_in_one_line():
    model, ids = build("llama"), batch()
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script is not supported; use torch\.compile or torch\.export"):
        torch.jit.script(model)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace is not supported"):
        torch.jit.trace(model, (ids,))
    with pytest.raises(ValueError, match="attention_mask cannot be exported"):
        torch.export.export(model, (ids,), {"attention_mask": torch.ones_like(ids)}, strict=False)


# Copies and files


@every_model
def test_copies_and_files_give_the_same_model_with_its_ties(name, tmp_path):
    model = build(name)
    expected = step(model)
    model.zero_grad()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    save_model(model, tmp_path / "model.safetensors")
    save_file(model.state_dict(), tmp_path / "state.safetensors")
    loaded = build(name, seed=5)
    assert load_model(loaded, tmp_path / "model.safetensors") == (set(), [])
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False), loaded]
    for other in (*copies, model.share_memory()):
        assert is_tied(other) == (name in TIED)
        assert_same_step(other, expected)


@every_model
def test_a_moving_average_keeps_ties(name):
    model = build(name)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    before = {key: value.clone() for key, value in detached(model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    average.update_parameters(model)
    for key, value in average.module.named_parameters():
        torch.testing.assert_close(value, before[key] + 0.5)
    average.load_state_dict(copy.deepcopy(average.state_dict()))
    assert is_tied(average.module) == (name in TIED)


@every_model
def test_a_meta_model_takes_the_reference_implementations_state_dict(name):
    reference, ids = reference_model(MODELS[name]), batch()
    model = ligermodels.create(MODELS[name], device="meta")
    assert model(ids.to("meta"), labels=ids.to("meta")).loss.is_meta
    model.load_state_dict(reference.state_dict(), assign=True)
    torch.testing.assert_close(model(ids, ids).loss, reference(ids, labels=ids).loss, rtol=1e-4, atol=1e-5)


@every_model
def test_dtypes_and_memory_formats(name):
    model, ids = build(name), batch()
    expected = step(model)
    assert_same_step(model.to(memory_format=torch.channels_last), expected)
    for convert, dtype in ((nn.Module.double, torch.float64), (nn.Module.bfloat16, torch.bfloat16)):
        convert(model)
        loss, gradients = step(model)
        assert model.dtype == dtype and {g.dtype for g in gradients.values()} == {dtype}
        assert is_tied(model) == (name in TIED)
        torch.testing.assert_close(loss.float(), expected[0], rtol=2e-2, atol=0)
    torch.set_default_dtype(torch.float64)
    try:
        loss = model.eval()(ids, ids).loss
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(loss.float(), expected[0], rtol=2e-2, atol=0)


@every_model
def test_autocast_with_a_gradient_scaler(name):
    model, ids = build(name), batch()
    expected = step(model)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, ids).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    torch.testing.assert_close(loss.detach(), expected[0], rtol=2e-2, atol=0)
    torch.testing.assert_close(norm, nn.utils.get_total_norm(expected[1].values()), rtol=5e-2, atol=0)


@every_model
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_around_the_model(name, reentrant):
    model, ids = build(name), batch()
    expected = step(model)
    model.zero_grad()
    embeddings = model.get_input_embeddings()(ids)
    loss = checkpoint(lambda x: model(inputs_embeds=x, labels=ids).loss, embeddings, use_reentrant=reentrant)
    loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    torch.testing.assert_close(gradients, expected[1], rtol=1e-4, atol=1e-6)


@every_model
@pytest.mark.parametrize("part", ["lm_head", "embed_tokens", "norm.", "qkv_proj", "q_norm", "experts", "layers.1"])
def test_a_subset_of_the_parameters_is_trained_with_equal_gradients(name, part):
    model = build(name)
    expected = {key: value for key, value in step(model)[1].items() if part in key}
    model.requires_grad_(False)
    for key in expected:
        model.get_parameter(key).requires_grad_()
    if expected:
        torch.testing.assert_close(step(model)[1], expected, rtol=1e-4, atol=1e-6)


@every_model
def test_flop_counters_and_profilers_see_the_products(name):
    model, ids = build(name), batch()
    reference = reference_model(MODELS[name])
    counts = []
    for each in (model, reference):
        with FlopCounterMode(display=False) as counter:
            each(ids, labels=ids).loss.backward()
        counts.append(counter.get_total_flops())
    # Routing differs with the random weights; attention is SDPA here and eager there.
    assert counts[0] == pytest.approx(counts[1], rel=0.25)
    with torch.profiler.profile(with_modules=True) as profile:
        model(ids, ids).loss.backward()
    assert any(event.key == "aten::mm" for event in profile.key_averages())
    data_parallel = nn.DataParallel(model)
    assert torch.equal(data_parallel(ids, labels=ids).loss, model(ids, ids).loss)


# Parametrizations


class Halved(nn.Module):
    def forward(self, weight):
        return weight * 0.5


@every_model
def test_a_parametrized_weight_is_used_wherever_it_is(name):
    """Halving a weight by a parametrization gives the loss of a halved weight."""
    paths = ["model.norm", "model.layers.0.input_layernorm", "model.layers.0.self_attn.qkv_proj", "lm_head"]
    if name == "qwen3_moe":
        paths.append("model.layers.0.self_attn.q_norm")
    for path in paths:
        changed, expected = build(name), build(name)
        parametrize.register_parametrization(changed.get_submodule(path), "weight", Halved())
        module = expected.get_submodule(path)
        module.weight = nn.Parameter(module.weight.detach() * 0.5)
        torch.testing.assert_close(step(changed)[0], step(expected)[0], msg=path)
        torch.testing.assert_close(step(changed.double())[0], step(expected.double())[0], msg=path)
        changed.load_state_dict(changed.state_dict())


@every_model
@pytest.mark.parametrize("normalise", [nn.utils.weight_norm, parametrizations.weight_norm])
def test_weight_norm_changes_nothing_at_first(name, normalise):
    model = build(name)
    expected = step(model)[0]
    for module in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        assert module.weight is not None  # a part of a packed linear has its weight from now on
        normalise(module)
    torch.testing.assert_close(step(model)[0], expected)
    torch.testing.assert_close(step(model.double())[0].float(), expected)


@every_model
def test_spectral_norm_bounds_the_head(name):
    model = build(name)
    parametrizations.spectral_norm(model.lm_head, n_power_iterations=50)
    step(model)
    torch.testing.assert_close(torch.linalg.matrix_norm(model.lm_head.weight, 2), torch.tensor(1.0))
    step(model.double())


@every_model
@pytest.mark.parametrize("path", ["model.norm", "model.embed_tokens", "lm_head", "model.layers.0.self_attn.o_proj"])
def test_a_pruned_weight_acts_as_its_masked_value(name, path):
    model, expected = build(name), build(name)
    prune.random_unstructured(model.get_submodule(path), "weight", 0.5)
    module = expected.get_submodule(path)
    module.weight = nn.Parameter(module.weight.detach() * model.get_submodule(path).weight_mask)
    torch.testing.assert_close(step(model)[0], step(expected)[0])
    torch.testing.assert_close(step(model.double())[0], step(expected.double())[0])
    tied = is_tied(build(name)) and path in ("model.embed_tokens", "lm_head")
    prune.remove(model.get_submodule(path), "weight")
    assert is_tied(model) == (name in TIED)
    if not tied:  # torch writes the masked value into the parameter, which both then share
        torch.testing.assert_close(step(model)[0], step(expected)[0])


# Hooks and replaced modules


def module_paths(name):
    """One module of every kind."""
    block = "model.layers.0"
    kinds = ["", "model", "model.embed_tokens", "model.norm", "lm_head", block]
    kinds += [f"{block}.{part}" for part in ("self_attn", "self_attn.qkv_proj", "self_attn.o_proj", "mlp")]
    kinds += [f"{block}.input_layernorm", f"{block}.post_attention_layernorm"]
    if name == "qwen3_moe":
        kinds += [f"{block}.self_attn.{part}" for part in ("q_norm", "k_norm")]
    return kinds + [f"{block}.mlp.{part}" for part in (("gate", "experts") if "moe" in name else ("down_proj",))]


@every_model
def test_hooks_of_every_kind_of_module_run_once_and_change_nothing(name):
    expected = step(build(name))
    for path in module_paths(name):
        for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
            model, calls = build(name), []
            getattr(model.get_submodule(path), f"register_{kind}")(lambda *_, calls=calls: calls.append(1))
            assert_same_step(model, expected)
            assert len(calls) == 1, (path, kind)


@every_model
def test_what_a_hook_returns_is_used(name):
    expected = step(build(name))[0]
    for path in module_paths(name):
        model = build(name)
        module = model.get_submodule(path)
        if any(module.children()):
            continue
        shapes = []
        module.register_forward_hook(lambda _, inputs, out, shapes=shapes: shapes.append(out.shape) or out * 0.5)
        assert step(model)[0] != expected, path
        assert len(shapes) == 1


@every_model
def test_torch_norms_and_plain_linears_take_the_place_of_ours(name):
    model = build(name)
    expected = step(model)[0]
    for path, module in list(model.named_modules()):
        if type(module).__name__ == "RMSNorm":
            other = nn.RMSNorm(module.weight.shape[0], eps=module.eps)
            other.weight = nn.Parameter(module.weight.detach() + module.offset)
        elif isinstance(module, nn.Linear):
            other = nn.Sequential(nn.Linear(module.in_features, module.out_features, bias=False))
            other[0].weight = module.weight
        else:
            continue
        model.set_submodule(path, other)
    torch.testing.assert_close(step(model)[0], expected)
    assert (model.lm_head[0].weight is model.model.embed_tokens.weight) == (name in TIED)
    model.to("meta").to_empty(device="cpu")
    assert (model.lm_head[0].weight is model.model.embed_tokens.weight) == (name in TIED)


@every_model
def test_a_head_of_ones_own_is_not_tied_again(name):
    model = build(name)
    model.set_output_embeddings(nn.Linear(64, 256))
    assert "lm_head.bias" in step(model)[1]
    model.double()
    model.load_state_dict(model.state_dict())
    assert not is_tied(model)
    step(model)


def test_hooks_on_parts_of_expert_lora_are_refused():
    model = build("qwen3_moe")
    adapt(model, targets="experts")
    experts = model.model.layers[0].mlp.experts
    experts.base_layer.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="LoRA of experts: hooks on its parts are not supported"):
        step(model)


# torchao


@every_model
@pytest.mark.parametrize(
    "config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"]
)
def test_torchao_quantised_weights(name, config):
    quantization = pytest.importorskip("torchao.quantization")
    model, ids = build(name).eval(), batch()
    exact = model(ids, ids)
    quantization.quantize_(model, getattr(quantization, config)())
    out = model(ids, ids)
    assert type(model.lm_head.weight) is not nn.Parameter
    assert 0 < (out.logits - exact.logits).norm() / exact.logits.norm() < 0.1
    torch.testing.assert_close(out.loss, exact.loss, rtol=1e-2, atol=0)
    assert model.generate(ids[:, :3], max_new_tokens=2).shape == (2, 5)


@every_model
def test_torchao_quantisation_aware_training(name):
    quantization = pytest.importorskip("torchao.quantization")
    qat = pytest.importorskip("torchao.quantization.qat")
    model = build(name)
    expected = step(model)[0]
    fake = qat.IntxFakeQuantizeConfig(torch.int4, group_size=32)
    quantization.quantize_(model, qat.QATConfig(weight_config=fake, step="prepare"))
    loss, gradients = step(model)
    assert 0 < abs(loss - expected) < 0.1
    assert "model.layers.0.self_attn.q_proj.weight" in gradients  # quantised by itself, as on the Hub's model
    quantization.quantize_(model, qat.QATConfig(step="convert"))
    torch.testing.assert_close(step(model)[0], expected)
