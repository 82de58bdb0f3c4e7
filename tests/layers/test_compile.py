"""torch.compile of a whole training step."""

import pytest
import torch

import ligermodels
from tests.cases import CASES
from tests.conftest import DEVICE

LAYERS_WITH_STATES = {  # one layer each: the interpreter is slow
    "gated delta rule": CASES["qwen3_5_text"] | {"num_hidden_layers": 1, "layer_types": ["linear_attention"]},
    "short convolution": CASES["lfm2"] | {"num_hidden_layers": 1, "full_attn_idxs": []},
    "Mamba-2": CASES["granitemoehybrid-dense"] | {"num_hidden_layers": 1, "layer_types": ["mamba"]},
}
MODELS = {
    name: CASES[name] for name in ("llama", "qwen2-sliding", "gemma3_text", "olmo2", "granite", "qwen2_moe")
} | LAYERS_WITH_STATES


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_compiles_to_one_graph_with_equal_gradients(name):
    model = ligermodels.create(MODELS[name], device=DEVICE)
    ids = torch.randint(3, 99, (1, 8), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def loss(ids):
        return model(ids, ids).loss

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    parameters = list(model.parameters())
    with torch._dynamo.config.patch(recompile_limit=len(MODELS)):  # every test compiles the same function
        expected, got = (torch.autograd.grad(f(ids), parameters) for f in (loss, compiled))
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
