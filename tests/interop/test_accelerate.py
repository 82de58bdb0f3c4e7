"""accelerate: a training loop with accumulation, its checkpoints, and weights offloaded to the host or to disk."""

import pytest
import torch
from torch.utils.data import DataLoader

import ligermodels
from tests.interop.tiny import MODELS, TIED, batch, build
from tests.layers.adapters import adapt

accelerate = pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture
def accelerator():
    yield lambda **options: accelerate.Accelerator(cpu=True, **options)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@every_model
def test_a_loop_with_accumulation_and_its_checkpoint(name, accelerator, tmp_path):
    run = accelerator(gradient_accumulation_steps=2)
    model, expected = build(name), build(name)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, expected)]
    model, optimizer, loader = run.prepare(model, optimizers[0], DataLoader(batch(8), batch_size=2))
    for ids in loader:
        with run.accumulate(model):
            run.backward(model(ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
    for pair in batch(8).split(4):
        for ids in pair.split(2):
            (expected(ids, ids).loss / 2).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    torch.testing.assert_close(dict(model.named_parameters()), dict(expected.named_parameters()), rtol=1e-4, atol=1e-6)
    run.save_state(tmp_path / "state")
    run.save_model(model, tmp_path / "model", max_shard_size="50KB")
    logits = run.unwrap_model(model).eval()(ids).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    run.load_state(tmp_path / "state")
    assert torch.equal(model(ids).logits, logits)
    empty = ligermodels.create(MODELS[name], device="meta")
    loaded = accelerate.load_checkpoint_and_dispatch(empty, tmp_path / "model", device_map={"": "cpu"})
    assert torch.equal(loaded.eval()(ids).logits, logits)


@every_model
def test_bf16_mixed_precision(name, accelerator):
    model, ids = build(name), batch()
    loss = model(ids, ids).loss.detach()
    run = accelerator(mixed_precision="bf16")
    prepared = run.prepare(model)
    torch.testing.assert_close(prepared(ids, labels=ids).loss.detach(), loss, rtol=2e-2, atol=0)


def every_name(model):
    """A state dict with both names of a tied weight, as offloading looks them up."""
    return dict(model.named_parameters(remove_duplicate=False))


def on_the_host(model, folder):
    accelerate.cpu_offload(model, execution_device="cpu", state_dict=every_name(model))


def on_disk(model, folder):
    accelerate.disk_offload(model, folder, execution_device="cpu")


def in_parts(model, folder):
    parts = ["model.layers.0", "model.norm", "model.rotary_emb", "lm_head", "model.embed_tokens"]
    placed = dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk", "model.norm": "disk"}
    accelerate.dispatch_model(model, placed, main_device="cpu", offload_dir=folder, force_hooks=True)


# These two look for both names of a tied weight in the model's own state dict.
UNTIED = [(name, offload) for name in MODELS if name not in TIED for offload in (on_disk, in_parts)]


@pytest.mark.parametrize(("name", "offload"), [*((name, on_the_host) for name in MODELS), *UNTIED])
@pytest.mark.parametrize("lora", [False, True])
def test_offloaded_weights_are_loaded_where_they_are_read(name, offload, lora, tmp_path):
    model, ids = build(name).eval(), batch()
    if lora:
        adapt(model)
    expected = model(ids, ids)
    offload(model, tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters())
    out = model(ids, ids)
    torch.testing.assert_close(out.logits, expected.logits)
    torch.testing.assert_close(out.loss, expected.loss)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    assert not model(ids, attention_mask=mask).logits[0, :3].any()
    if offload is on_the_host:
        with pytest.raises(ValueError, match="no weights in memory"):
            model.generate(ids, max_new_tokens=1)
