"""torch.compile of a whole training step."""

from functools import partial

import pytest
import torch

import ligermodels
from ligermodels.training.parallel.compilation import compile_blocks
from tests.cases import CASES
from tests.conftest import DEVICE

FULL = "full_attention"
# One layer each, because tracing and the interpreter are slow. Of gemma3 a window, then none, with angles of their own;
# of gemma4 the second reads the keys of the first. That of llama is in test_autocast.py.
MODELS = {
    "olmo2": CASES["olmo2"] | {"num_hidden_layers": 1},
    "gemma3_text": CASES["gemma3_text"] | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", FULL]},
    "latent attention": CASES["deepseek_v3"] | {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "gpt_oss": CASES["gpt_oss"] | {"num_hidden_layers": 1},
    "gemma4": CASES["gemma4_text"] | {"num_hidden_layers": 2, "layer_types": [FULL] * 2, "num_kv_shared_layers": 1},
    "gated delta rule": CASES["qwen3_5_text"] | {"num_hidden_layers": 1, "layer_types": ["linear_attention"]},
    "short convolution": CASES["lfm2"] | {"num_hidden_layers": 1, "full_attn_idxs": []},
    "Mamba-2": CASES["granitemoehybrid-dense"] | {"num_hidden_layers": 1, "layer_types": ["mamba"]},
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_compiles_to_one_graph_with_equal_gradients(name):
    torch._dynamo.reset()  # else what differs from the model before becomes dynamic, for which all is traced twice
    model = ligermodels.create(MODELS[name], device=DEVICE)
    ids = torch.randint(3, 99, (1, 8), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def loss(ids):
        return model(ids, ids).loss

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    parameters = list(model.parameters())
    expected, got = (torch.autograd.grad(f(ids), parameters) for f in (loss, compiled))
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_blocks_with_inputs_of_their_own_share_compiled_code(monkeypatch):
    """A first block, later ones, and those that read keys: there are fewer graphs than layers."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    raw = CASES["gemma4_text"] | {"num_hidden_layers": 9, "layer_types": [FULL] * 9, "num_kv_shared_layers": 4}
    model = ligermodels.create(raw)
    torch._dynamo.reset()
    compile_blocks(model, torch.device("cpu"))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    model(torch.arange(8)[None])
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 4
