"""The public functions of the kernels are complete, documented and have the usual defaults; wrappers compute right."""

import inspect
import re
import typing

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ligermodels import ops
from ligermodels.kernels import dispatch
from tests.conftest import DEVICE
from tests.kernels.ops.calls import calls

TUPLES = {
    *(
        "CacheSlots",
        "CrossEntropyOutput",
        "DivergenceOutput",
        "GroupedLowRank",
        "LogProbs",
        "LogProbsLoss",
        "LowRank",
        "QuantisedWeight",
    )
}


@pytest.fixture(params=["kernels", "reference"])
def path(request):
    """Runs a test on the Triton kernels and, on a CPU, on the reference implementations too."""
    if request.param == "kernels":
        request.getfixturevalue("kernels")
    elif DEVICE != "cpu":
        pytest.skip("references run on CPU tensors")


def draw(*shape, requires_grad=False):
    return torch.randn(shape, device=DEVICE).requires_grad_(requires_grad)


def agree(ours, theirs, *leaves):
    """Values and gradients agree under one random upstream gradient.

    Both sides sum in fp32 in different orders: a few units of 2^-24 for each of up to a hundred terms.
    """
    expected, got = theirs(), ours()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, leaves, upstream)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, upstream), expected_gradients, rtol=1e-4, atol=2e-5)


def test_all_lists_every_public_name():
    public = {
        name
        for name, value in vars(ops).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("ligermodels")
    }
    assert public - set(vars(dispatch)) == set(ops.__all__)


@pytest.mark.parametrize("name", ops.__all__)
def test_every_op_is_an_annotated_function_with_a_docstring_and_a_line_in_the_module_docstring(name):
    op = getattr(ops, name)
    assert op.__doc__
    if name in TUPLES:
        return
    assert f"`{name}`" in ops.__doc__
    assert inspect.isfunction(op)
    parameters = set(inspect.signature(op).parameters)
    assert set(typing.get_type_hints(op)) == {*parameters, "return"}


def test_defaults_are_those_of_the_field():
    def defaults(op):
        return {
            name: parameter.default
            for name, parameter in inspect.signature(op).parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }

    norm = {"eps": 1e-6, "offset": 0.0}
    assert defaults(ops.rms_norm) == {"weight": None, **norm}
    assert defaults(ops.add_rms_norm) == {"weight": None, **norm}
    assert defaults(ops.qk_norm_rope) == norm | {"gated": False}
    assert defaults(ops.norm_linear) == {"bias": None, **norm, "low_rank": None}
    assert defaults(ops.layer_norm_linear) == {"bias": None, "eps": 1e-5, "low_rank": None}
    assert defaults(ops.layer_norm) == {"bias": None, "eps": 1e-5}
    multipliers = {"gate_multiplier": 1.0, "down_multiplier": 1.0}
    gated = {"activation": "silu", **multipliers, "inplace": False}
    assert defaults(ops.gated_activation) == {"up": None, **gated}
    assert defaults(ops.gated_linear) == {"bias": None, "low_rank": None, **gated}
    assert defaults(ops.route) == {"normalize": True}
    assert defaults(ops.experts)["activation"] == "silu"
    assert defaults(ops.cross_entropy)["ignore_index"] == -100
    assert defaults(ops.linear_cross_entropy)["reduction"] == "mean"
    assert defaults(ops.linear_divergence)["kind"] == "forward_kl"


def replaced(call, name, place, change):
    """The call with one tensor changed, which may be a field of a tuple."""
    value = call[name]
    if place is None:
        return {**call, name: change(value)}
    fields = [change(x) if i == place else x for i, x in enumerate(value)]
    return {**call, name: type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)}


def tensors_of(call):
    """(argument, place in its tuple or None, tensor); the bytes of a quantised weight are no argument."""
    for name, value in call.items():
        if isinstance(value, torch.Tensor):
            yield name, None, value
        elif isinstance(value, tuple) and not isinstance(value, ops.QuantisedWeight):
            yield from ((name, place, x) for place, x in enumerate(value) if isinstance(x, torch.Tensor))


def of_another_dtype(x):
    return x.float() if not x.is_floating_point() else x.long()


def wider(x):
    return torch.cat((x, x[..., :1]), -1) if x.ndim else x.expand(3)


def without_shape(x):
    return x.flatten()[0] if x.ndim else x.expand(2, 1)


class NothingRuns(TorchDispatchMode):
    """Fails where an op computes, or allocates, before it has refused its arguments."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.is_view, func
        return func(*args, **(kwargs or {}))


# What has no wrong width of its own: the last axis of these is any number.
ANY_WIDTH = {
    ("plain_activation", "x"), ("route", "logits"), ("attention", "v"), ("decode_attention", "block_table"),
    ("gather_keys", "x"), ("gather_keys", "places"), ("sample", "logits"), ("attention", "cu_seqlens"),
}  # fmt: skip
RAISED_BY = {  # ops that are another one, whose errors they raise
    "swiglu": "gated_activation", "geglu": "gated_activation", "apply_rotary_pos_emb": "apply_rope",
}  # fmt: skip


CALLED = sorted(set(ops.__all__) - TUPLES - {"cross_entropy_with_metrics", "linear_cross_entropy_with_metrics"})


def test_there_is_a_valid_call_of_every_op():
    assert sorted(calls()) == CALLED
    for name, call in calls().items():
        with torch.no_grad():
            getattr(ops, name)(**call)


@pytest.mark.parametrize("change", [of_another_dtype, wider, without_shape])
@pytest.mark.parametrize("name", CALLED)
def test_every_op_refuses_wrong_dtypes_and_shapes_by_name_before_it_computes(name, change, path):
    call = calls()[name]
    for argument, place, x in tensors_of(call):
        if change is wider and (name, argument) in ANY_WIDTH:
            continue
        wrong = replaced(call, argument, place, lambda _, x=x: change(x))
        with torch.no_grad(), pytest.raises(ValueError) as caught, NothingRuns():
            getattr(ops, name)(**wrong)
        message = str(caught.value)
        assert message.startswith((f"{name}: ", f"{RAISED_BY.get(name)}: ")), message
        # A wrong shape of one is a wrong shape of what is compared with it.
        possible = [argument] if change is of_another_dtype else list(call)
        assert any(re.search(rf"\b{word}\b", message) for word in possible), message


def test_norms_agree_with_torch(path):
    x, residual, weight, bias = (draw(*shape, requires_grad=True) for shape in ((3, 5, 33), (3, 5, 33), (33,), (33,)))
    agree(lambda: ops.rms_norm(x, weight), lambda: F.rms_norm(x, (33,), weight, 1e-6), x, weight)
    agree(lambda: ops.layer_norm(x, weight), lambda: F.layer_norm(x, (33,), weight), x, weight)
    agree(lambda: ops.layer_norm(x, weight, bias), lambda: F.layer_norm(x, (33,), weight, bias), x, weight, bias)
    agree(
        lambda: torch.cat(ops.add_rms_norm(x, residual, weight)),
        lambda: torch.cat((F.rms_norm(x + residual, (33,), weight, 1e-6), x + residual)),
        *(x, residual, weight),
    )


def test_linears_agree_with_torch(path):
    x, norm_weight, weight, down = (
        draw(*shape, requires_grad=True) for shape in ((3, 5, 32), (32,), (24, 32), (7, 12))
    )
    agree(
        lambda: ops.norm_linear(x, None, norm_weight, weight)[0],
        lambda: F.linear(F.rms_norm(x, (32,), norm_weight, 1e-6), weight),
        *(x, norm_weight, weight),
    )
    agree(
        lambda: ops.layer_norm_linear(x, None, norm_weight, None, weight)[0],
        lambda: F.linear(F.layer_norm(x, (32,), norm_weight), weight),
        *(x, norm_weight, weight),
    )
    gate_up = draw(3, 5, 24, requires_grad=True)
    agree(
        lambda: ops.gated_linear(gate_up, down),
        lambda: F.linear(F.silu(gate_up[..., :12]) * gate_up[..., 12:], down),
        *(gate_up, down),
    )


def test_attention_scales_by_the_square_root_of_the_head_size_by_default():
    q, k, v = draw(2, 6, 4, 16), draw(2, 6, 2, 16), draw(2, 6, 2, 16)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(ops.attention(q, k, v), expected)


def test_a_router_and_experts_agree_with_a_loop_over_tokens(path):
    x, logits, gate_up, down = draw(7, 12), draw(7, 4), draw(4, 20, 12), draw(4, 12, 10)
    weight, index = ops.route(logits, 2)
    torch.testing.assert_close(weight.sum(-1), torch.ones(7, device=DEVICE))
    expected = torch.zeros_like(x)
    for token in range(7):
        for expert, share in zip(index[token], weight[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected[token] += share * (down[expert] @ (F.silu(gate) * up))
    torch.testing.assert_close(ops.experts(x, index, weight, gate_up, down), expected, rtol=1e-5, atol=1e-4)


def test_expert_indices_may_be_int32_and_nothing_narrower(path):
    x, logits, gate_up, down = draw(7, 12), draw(7, 4), draw(4, 20, 12), draw(4, 12, 10)
    weight, index = ops.route(logits, 2)
    expected = ops.experts(x, index, weight, gate_up, down)
    assert_equal(ops.experts(x, index.int(), weight, gate_up, down), expected)
    with pytest.raises(ValueError, match=r"expert_index is torch\.uint8"):
        ops.experts(x, index.byte(), weight, gate_up, down)


def angles(*shape):
    phases = 100 * torch.rand(shape, device=DEVICE)
    return phases.cos(), phases.sin()


def rotate_by_hugging_face(q, k, cos, sin):
    """cos, sin [B, T, D/2]."""
    doubled = (torch.cat((table, table), -1) for table in (cos, sin))
    rotated = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *doubled)
    return tuple(x.transpose(1, 2) for x in rotated)


@pytest.mark.parametrize("heads", [(4, 2), (5, 1), (1, 33)])
def test_apply_rope_agrees_with_hugging_face(heads, path):
    q, k = (draw(2, 3, h, 20, requires_grad=True) for h in heads)
    cos, sin = angles(2, 3, 10)
    agree(
        lambda: torch.cat(ops.apply_rope(q, k, cos, sin), 2),
        lambda: torch.cat(rotate_by_hugging_face(q, k, cos, sin), 2),
        *(q, k),
    )


@pytest.mark.parametrize("unsqueeze_dim", [1, 2], ids=["heads first", "length first"])
@pytest.mark.parametrize("batch_of_tables", [1, 2])
def test_apply_rotary_pos_emb_replaces_that_of_hugging_face(unsqueeze_dim, batch_of_tables, path):
    q, k = (draw(2, *((h, 3) if unsqueeze_dim == 1 else (3, h)), 20, requires_grad=True) for h in (4, 2))
    cos, sin = (torch.cat((table, table), -1) for table in angles(batch_of_tables, 3, 10))

    def rotated(function):
        return lambda: torch.cat([x.flatten() for x in function(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)])

    agree(rotated(ops.apply_rotary_pos_emb), rotated(apply_rotary_pos_emb), q, k)


def test_apply_rotary_pos_emb_rotates_part_of_a_head_if_the_tables_are_narrower(path):
    q, k, (cos, sin) = draw(2, 4, 3, 20), draw(2, 2, 3, 20), angles(1, 3, 5)  # 10 of 20 dimensions
    tables = [torch.cat((table, table), -1) for table in (cos, sin)]
    expected = apply_rotary_pos_emb(q[..., :10], k[..., :10], *tables)
    got = ops.apply_rotary_pos_emb(q, k, *tables)
    torch.testing.assert_close(tuple(x[..., :10] for x in got), expected, rtol=1e-5, atol=1e-5)
    assert_equal([x[..., 10:] for x in got], [x[..., 10:] for x in (q, k)])


def test_apply_rotary_pos_emb_refuses_what_it_cannot_rotate(path):
    q, k = draw(2, 4, 3, 8), draw(2, 2, 3, 8)
    with pytest.raises(ValueError, match="unsqueeze_dim is 0"):
        ops.apply_rotary_pos_emb(q, k, *angles(1, 3, 8), unsqueeze_dim=0)
    for columns in (7, 16):
        with pytest.raises(ValueError, match=f"cos has {columns} columns"):
            ops.apply_rotary_pos_emb(q, k, *angles(1, 3, columns))
    with pytest.raises(ValueError, match="B, T, R"):
        ops.apply_rotary_pos_emb(q, k, *angles(3, 2, 3, 8))  # three axes, as Qwen2-VL has


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half-split"])
def test_apply_rope_agrees_with_the_packed_op_on_part_of_a_head(interleaved, path):
    cos, sin = angles(3, 6)
    q, k = draw(2, 3, 4, 20), draw(2, 3, 2, 20)
    packed = torch.cat((q, k, torch.zeros_like(k)), 2).flatten(2)
    expected = ops.rope_(packed, cos, sin, 4, 2, interleaved)[:2]
    torch.testing.assert_close(ops.apply_rope(q, k, cos, sin, interleaved), expected, rtol=0, atol=0)


def test_apply_rope_takes_angles_of_the_batch_and_of_each_token(path):
    q, k = draw(2, 3, 4, 8), draw(2, 3, 2, 8)
    cos, sin = angles(3, 4)
    expected = ops.apply_rope(q, k, cos, sin)
    of_each_token = (table.expand(2, 3, 4) for table in (cos, sin))
    assert_equal(ops.apply_rope(q, k, *of_each_token), expected)
    assert_equal(ops.apply_rope(q, k, cos.repeat(2, 1), sin.repeat(2, 1)), expected)


def assert_equal(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_apply_rope_leaves_its_inputs_alone_and_takes_any_strides(path):
    q, k = draw(2, 4, 3, 8).transpose(1, 2), draw(2, 3, 2, 16)[..., :8]
    before = q.clone(), k.clone()
    rotated = ops.apply_rope(q, k, *angles(3, 4))
    assert_equal((q, k), before)
    assert [x.stride() for x in rotated] == [x.contiguous().stride() for x in (q, k)]


def test_apply_rope_does_not_disturb_what_autograd_saved_of_its_inputs(path):
    q, k = draw(1, 2, 1, 4, requires_grad=True), draw(1, 2, 1, 4)
    projected = q * 1
    loss = projected.square().sum()  # saves projected
    rotated, _ = ops.apply_rope(projected, k, *angles(2, 2))
    (loss + rotated.sum()).backward()
    assert q.grad is not None


@pytest.mark.parametrize(
    "shapes",
    [((2, 3, 4, 8), (2, 4, 2, 8)), ((2, 3, 4, 8), (2, 3, 2, 16)), ((2, 3, 32), (2, 3, 16))],
    ids=["lengths", "head sizes", "packed heads"],
)
def test_apply_rope_refuses_queries_and_keys_that_do_not_fit_each_other(shapes, path):
    with pytest.raises(ValueError, match=r"apply_rope: (k|q) has shape .*; needed \["):
        ops.apply_rope(*(draw(*shape) for shape in shapes), *angles(3, 4))


@pytest.mark.parametrize("shape", [(3, 8), (5, 4)], ids=["as wide as a head", "of another length"])
def test_apply_rope_refuses_angles_that_do_not_fit(shape, path):
    remedy = "apply_rotary_pos_emb" if shape[1] == 8 else "pairs"
    with pytest.raises(ValueError, match=f"cos.*{remedy}"):
        ops.apply_rope(draw(2, 3, 4, 8), draw(2, 3, 2, 8), *angles(*shape))


def test_unknown_activations_and_reductions_are_refused(path):
    with pytest.raises(ValueError, match="relu"):
        ops.gated_linear(draw(2, 8), draw(3, 4), activation="relu")
    with pytest.raises(ValueError, match="relu"):
        ops.experts(draw(2, 8), *ops.route(draw(2, 4), 2)[::-1], draw(4, 6, 8), draw(4, 8, 3), "relu")
    with pytest.raises(ValueError, match="median"):
        ops.cross_entropy(draw(2, 8), torch.tensor([0, 1], device=DEVICE), reduction="median")


def test_a_second_derivative_through_a_kernel_is_refused(kernels):
    x = draw(2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(ops.rms_norm(x, draw(8)).sum(), x, create_graph=True)


@pytest.mark.gpu
def test_apply_rope_compiles_without_graph_breaks():
    q, k = draw(2, 16, 4, 64, requires_grad=True), draw(2, 16, 2, 64, requires_grad=True)
    cos, sin = angles(16, 32)

    def rotate():
        return torch.cat(ops.apply_rope(q, k, cos, sin), 2)

    agree(torch.compile(rotate, fullgraph=True), rotate, q, k)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_apply_rope_in_half_precision_rounds_once(dtype):
    q, k = (draw(2, 64, heads, 128).to(dtype) for heads in (32, 8))
    cos, sin = angles(64, 64)
    expected = ops.apply_rope(q.float(), k.float(), cos, sin)
    torch.testing.assert_close(ops.apply_rope(q, k, cos, sin), tuple(x.to(dtype) for x in expected))
