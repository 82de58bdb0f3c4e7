"""Tensors that families compute in fp32 stay in fp32 in a model of a narrower dtype."""

import pytest
import torch

import ligermodels
from tests.cases import CASES
from tests.reference_model import labels_of, tokens

FP32 = {
    "qwen3_5": {"linear_attn.A_log", "linear_attn.norm.weight"},
    "granitemoehybrid": {"mamba.A_log", "mamba.D"},
    "glm4_moe": {"mlp.gate.e_score_correction_bias"},
}


@pytest.mark.parametrize("name", FP32)
def test_casts_of_a_model_leave_them_bit_for_bit_as_they_are(name):
    model = ligermodels.create(CASES[name], dtype=torch.bfloat16)
    tensors = model.fp32_tensors()
    assert {key.split(".", 3)[3] for key in tensors} == FP32[name]
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.copy_(torch.randn(tensor.shape))
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    for cast in (model.half, model.bfloat16, model.double, lambda: model.to(torch.bfloat16)):
        cast()
        dtypes = {key: value.dtype for key, value in model.state_dict().items()}
        wide = torch.promote_types(model.dtype, torch.float32)
        assert dtypes == {key: wide if key in before else model.dtype for key in dtypes}
        assert all(torch.equal(tensor, before[key].to(wide)) for key, tensor in model.fp32_tensors().items())


@pytest.mark.parametrize("name", ["qwen3_5", "granitemoehybrid"])
def test_their_gradients_are_in_fp32_and_stay_so(name):
    model = ligermodels.create(CASES[name], dtype=torch.bfloat16)
    ids = tokens(CASES[name])
    model(ids, labels_of(ids)).loss.backward()
    before = [parameter.grad.clone() for parameter in model.fp32_parameters()]
    assert all(gradient.dtype == torch.float32 and gradient.any() for gradient in before)
    assert any((gradient != gradient.bfloat16()).any() for gradient in before)
    model.half()
    assert all(torch.equal(p.grad, old) for p, old in zip(model.fp32_parameters(), before, strict=True))
