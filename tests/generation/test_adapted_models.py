"""The engine runs models with LoRA, in PEFT's wrapper, and sharded over ranks by FSDP2, as the plain model."""

import os

import peft
import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ligermodels
from ligermodels.errors import InputError
from ligermodels.generation import Engine
from tests.cases import CASES

PROMPTS = [[5, 6, 7], list(range(3, 90)), [9]]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of the trained length; PEFT's, of tied weights
OPTIONS = [{"temperature": 0.0}, {"temperature": 1.5, "top_k": 20, "seed": 3}]


def build(adapted=False):
    model = ligermodels.create(CASES["llama"]).eval()
    if adapted:
        ligermodels.add_lora(model, rank=4, dropout=0.5)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.eval()


def completions(model):
    """The tokens that follow the prompts in one batch, greedy ones and drawn ones."""
    engine = Engine(model, max_tokens=1024, max_rows=4)
    for options in OPTIONS:
        for prompt in PROMPTS:
            engine.submit(prompt, max_new_tokens=6, stop_tokens=(), **options)
    return [sample.ids for sample in sorted(engine, key=lambda sample: sample.request)]


def test_lora_acts_in_every_step():
    model = build(adapted=True)
    adapted = completions(model)
    for prompt, ids in zip(PROMPTS, adapted[:3], strict=True):
        row = torch.tensor([[*prompt, *ids]])
        assert ids == model(row).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    assert adapted != completions(build())


def test_a_model_in_pefts_wrapper_runs():
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    wrapped = peft.get_peft_model(build(), config).eval()
    greedy = completions(wrapped)
    for prompt, ids in zip(PROMPTS, greedy[:3], strict=True):
        row = torch.tensor([[*prompt, *ids]])
        assert ids == wrapped(row).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    with wrapped.disable_adapter():
        assert completions(wrapped) == completions(build()) != greedy


def complete_on_a_rank(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, mesh = build(adapted=True), init_device_mesh("cpu", (2,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(InputError, match="sharded over 2 ranks, which must draw equal tokens; give a seed"):
        Engine(model, max_tokens=64).submit([5], max_new_tokens=1, temperature=1.0)
    torch.save(completions(model), f"{folder}/{rank}")
    dist.destroy_process_group()


def test_ranks_with_shards_of_the_weights_give_the_tokens_of_one_process(tmp_path):
    multiprocessing.start_processes(complete_on_a_rank, (tmp_path,), nprocs=2, start_method="fork")
    expected = completions(build(adapted=True))
    assert [torch.load(tmp_path / str(rank)) for rank in range(2)] == [expected] * 2
