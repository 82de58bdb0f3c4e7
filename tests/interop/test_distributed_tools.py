"""DDP, FSDP1, FSDP2 and distributed checkpoints, used as on any other model, give the steps of a plain loop."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from tests.interop.tiny import MODELS, TIED, batch, build

every_model = pytest.mark.parametrize("name", MODELS)
FULL = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@pytest.fixture(scope="module", autouse=True)
def group():
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(model, parameters, ranks=None):
    """Two steps; each rank has its own batch. ranks: the batches of these ranks one after the other, averaged."""
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    own = [dist.get_rank()] if ranks is None else ranks
    for _ in range(2):
        optimizer.zero_grad()
        for rank in own:
            ids = batch(seed=10 + rank)
            (model(ids, labels=ids).loss / len(own)).backward()
        optimizer.step()


@functools.cache
def plain(name, ranks=1):
    """The parameters after training without any tool."""
    model = build(name)
    train(model, model.parameters(), list(range(ranks)))
    return {key: value.detach() for key, value in model.named_parameters()}


def assert_trained(state, name, ranks=1):
    for key, value in plain(name, ranks).items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5, msg=key)


OPTIONS = "find_unused_parameters", "static_graph", "gradient_as_bucket_view"


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in MODELS), *(("qwen3_moe", {option: True}) for option in OPTIONS)]
)
def test_ddp(name, options):
    model = build(name)
    model.gradient_checkpointing_enable()
    train(DistributedDataParallel(model, **options), model.parameters())
    assert_trained(dict(model.named_parameters()), name)


def shard_blocks(model):
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)


def shard_head_and_embedding(model):
    """The tied pair is one unit; otherwise the head is a unit of its own, which reads its weight for the loss."""
    if model.config.tie_word_embeddings:
        fully_shard([model.model.embed_tokens, model.lm_head])
    else:
        fully_shard(model.lm_head)
    shard_blocks(model)


def shard_every_module(model):
    for module in list(model.modules()):
        if (isinstance(module, nn.Linear) and module is not model.lm_head) or type(module).__name__ == "RMSNorm":
            fully_shard(module)
    shard_blocks(model)


def check_fsdp2(name, shard, ranks=1):
    model = build(name)
    shard(model)
    train(model, model.parameters())
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        assert_trained(state, name, ranks)
    other, ids = build(name, seed=7), batch()
    set_model_state_dict(model, other.state_dict(), options=FULL)
    torch.testing.assert_close(model(ids).logits, other(ids).logits)
    set_model_state_dict(model, get_model_state_dict(model))


@every_model
@pytest.mark.parametrize("shard", [fully_shard, shard_blocks, shard_head_and_embedding, shard_every_module])
def test_fsdp2(name, shard):
    check_fsdp2(name, shard)


def check_fsdp1(name, use_orig_params, by_block, ranks=1):
    model = build(name)
    policy = ModuleWrapPolicy({type(model.model.layers[0])}) if by_block else None
    sharded = FullyShardedDataParallel(
        model, use_orig_params=use_orig_params, auto_wrap_policy=policy, device_id=torch.device("cpu")
    )
    train(sharded, sharded.parameters())
    state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        assert_trained(state, name, ranks)


@every_model
@pytest.mark.parametrize(("use_orig_params", "by_block"), [(False, True), (True, False)])
@pytest.mark.filterwarnings("ignore")
def test_fsdp1(name, use_orig_params, by_block):
    check_fsdp1(name, use_orig_params, by_block)


@every_model
def test_a_distributed_checkpoint_of_model_and_optimizer(name, tmp_path):
    states = []
    for seed in (0, 3):
        model = build(name, seed)
        shard_blocks(model)
        optimizer = torch.optim.AdamW(model.parameters())
        ids = batch()
        if seed == 0:
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            model_state, optimizer_state = get_state_dict(model, optimizer)
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
        else:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            dcp.load(state, checkpoint_id=tmp_path)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        states.append(model(ids).logits)
    assert torch.equal(*states)


@every_model
def test_a_distributed_checkpoint_of_a_plain_model(name, tmp_path):
    model, other, ids = build(name), build(name, seed=5), batch()
    dcp.save(get_model_state_dict(other), checkpoint_id=tmp_path)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(model, state)
    assert torch.equal(model(ids).logits, other(ids).logits)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name in TIED)


def test_two_ranks(launcher):
    launcher.succeed(ranks=2, module="tests.interop.test_distributed_tools")


def main():
    dist.init_process_group("gloo")
    for name in ("gemma2", "qwen3_moe"):
        model = build(name)
        train(DistributedDataParallel(model), model.parameters())
        assert_trained(dict(model.named_parameters()), name, 2)
        check_fsdp2(name, shard_blocks, 2)
        check_fsdp2(name, shard_head_and_embedding, 2)
        check_fsdp1(name, True, True, 2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
