"""A trained model in NF4: as far from its weights in bf16 as bitsandbytes' format is, and near what that computes."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import ligermodels
from tests.kernels.error_budget import relative_error
from tests.real.conftest import DEVICES, tokenizer_of
from tests.real.texts import texts

TOKENS = 64


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_nf4_has_the_values_and_the_error_of_bitsandbytes(device, shallow):
    ids = torch.tensor([tokenizer_of(shallow).encode(texts()["prose"])[:TOKENS]], device=device)
    exact = AutoModelForCausalLM.from_pretrained(shallow, dtype=torch.float32, device_map=device)(ids).logits.double()
    options = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_pretrained(
        shallow, dtype=torch.float32, quantization_config=options, device_map=device
    )
    expected = theirs(ids).logits
    found = ligermodels.load(shallow, dtype=torch.float32, device=device, quantize="nf4")(ids).logits
    error, own_error = (relative_error(logits, exact) for logits in (found, expected))
    assert 0.02 < own_error < 0.3
    assert error <= 1.05 * own_error and relative_error(found, expected.double()) < 0.05 * own_error
