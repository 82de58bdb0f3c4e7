"""Lightning's Trainer and Fabric give the losses of a plain loop, and their checkpoints the same model."""

import pytest
import torch
from torch.utils.data import DataLoader

from tests.interop.tiny import MODELS, batch, build

lightning = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import EMAWeightAveraging  # noqa: E402

every_model = pytest.mark.parametrize("name", MODELS)


class Module(lightning.LightningModule):
    def __init__(self, name):
        super().__init__()
        self.model, self.losses = build(name), []

    def training_step(self, ids, index):
        loss = self.model(ids, labels=ids).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader():
    return DataLoader(batch(8), batch_size=2)


def plain_losses(name):
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for ids in loader():
        optimizer.zero_grad()
        loss = model(ids, ids).loss
        loss.backward()
        optimizer.step()
        yield loss.item()


def trainer(folder, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=folder, **quiet, **options)


@every_model
def test_the_trainer_gives_the_losses_of_a_plain_loop_and_its_checkpoint_the_same_model(name, tmp_path):
    module, run = Module(name), trainer(tmp_path)
    run.fit(module, loader())
    assert module.losses == pytest.approx(list(plain_losses(name)), rel=1e-5)
    run.save_checkpoint(tmp_path / "last.ckpt")
    loaded = Module.load_from_checkpoint(tmp_path / "last.ckpt", name=name, weights_only=False)
    ids = batch()
    assert torch.equal(loaded.model.eval()(ids).logits, module.model.eval()(ids).logits)


@every_model
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions_with_accumulation_clipping_and_a_moving_average(name, precision, tmp_path):
    module = Module(name)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "callbacks": [EMAWeightAveraging(decay=0.5)]}
    trainer(tmp_path, precision=precision, enable_checkpointing=False, **options).fit(module, loader())
    assert module.losses[0] == pytest.approx(next(plain_losses(name)), rel=2e-2)


@every_model
def test_fabric_gives_the_losses_of_a_plain_loop_and_its_checkpoint_the_same_model(name, tmp_path):
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = build(name)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for ids in loader():
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(list(plain_losses(name)), rel=1e-5)
    fabric.save(tmp_path / "state.ckpt", {"model": model})
    other = fabric.setup(build(name, seed=4))
    fabric.load(tmp_path / "state.ckpt", {"model": other})
    assert torch.equal(other(ids).logits, model(ids).logits)
