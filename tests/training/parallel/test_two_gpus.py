"""Two GPUs that share rows or experts train as one does: NCCL, and the kernels that GPUs have."""

import pytest
import torch

from tests.training.parallel.test_context_parallel import BALANCED, OFFSETS
from tests.training.parallel.test_fsdp import config, under_torchrun

TWO = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256, "intermediate_size": 512}  # heads of 64
WINDOW = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
ONE_STEP_OF_BF16 = 2**-8
RUNS = {  # name: (settings of all runs, those of two GPUs, those of one)
    "rows": ({"model": config("qwen2", False) | TWO | WINDOW, "offsets": OFFSETS}, {"context": 2}, {}),
    "rows, checkpointed": (
        {"model": config("llama", False) | TWO, "offsets": OFFSETS},
        {"context": 2, "checkpointed_blocks": 2}, {},
    ),
    "experts": (
        {"model": config("mixtral", False) | TWO | BALANCED},
        {"experts": 2, "batch_size": 2}, {"accumulate": 2, "batch_size": 2},
    ),
    "rows and experts": (
        {"model": config("mixtral", False) | TWO | BALANCED, "offsets": OFFSETS}, {"context": 2, "experts": 2}, {},
    ),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("dtype", "steps", "loss", "norm"), [("float32", 2, 1e-5, 1e-4), ("bfloat16", 1, ONE_STEP_OF_BF16, 0.05)]
)
def test_two_gpus_train_like_one(dtype, steps, loss, norm, tmp_path):
    common = {"steps": steps, "dtype": dtype}
    shared = under_torchrun(2, tmp_path, [common | each | two for each, two, _ in RUNS.values()])
    alone = under_torchrun(1, tmp_path, [common | each | one for each, _, one in RUNS.values()])
    for name, got, expected in zip(RUNS, shared, alone, strict=True):
        assert got["losses"] == pytest.approx(expected["losses"], rel=loss), name
        assert got["norms"] == pytest.approx(expected["norms"], rel=norm), name
