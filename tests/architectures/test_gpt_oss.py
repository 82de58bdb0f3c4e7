"""gpt-oss: what parity with a model of random parameters does not show."""

import torch

import ligermodels
from tests.cases import CASES


def test_new_sinks_are_normal_and_biases_zero():
    model = ligermodels.create(CASES["gpt_oss"] | {"num_attention_heads": 120, "initializer_range": 0.5}, seed=1)
    sinks = torch.cat([block.self_attn.sinks for block in model.model.layers])
    assert abs(sinks.mean()) < 0.1 and abs(sinks.std() - 0.5) < 0.1
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))


def test_packed_documents_have_the_logits_and_gradients_of_the_documents_alone():
    model = ligermodels.create(CASES["gpt_oss"], seed=1)
    lengths = [1, 2, 3, 5, 13, 20]
    documents = [torch.randint(3, 99, (1, length)) for length in lengths]
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    names = "model.layers.0.self_attn.sinks", "model.layers.1.mlp.experts.down_proj_bias"

    def results(logits):
        gradients = torch.autograd.grad(logits.sin().sum(), [model.get_parameter(name) for name in names])
        return logits.detach(), *gradients

    packed = results(model(torch.cat(documents, 1), cu_seqlens=offsets, max_seqlen=20).logits)
    alone = results(torch.cat([model(ids).logits for ids in documents], 1))
    for a, b in zip(packed, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
