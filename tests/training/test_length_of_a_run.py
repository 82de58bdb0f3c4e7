"""How a run ends and goes on: its checkpoints, the best one, early stopping, more steps, a failed or pushed export."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from ligermodels.errors import CheckpointError, HubError, InputError
from ligermodels.training import TrainConfig, train
from ligermodels.training.checkpoints import files
from ligermodels.training.data.embedded_stories import stories
from ligermodels.training.objectives.sft import SFT
from ligermodels.training.reporting.metrics import Validation
from ligermodels.training.settings.settings import config_of_run
from tests.training.launching import loop, losses, records, weights
from tests.training.run.test_publishing import replace_client

# Within the warmup the learning rate does not depend on the number of steps.
TINY = {"model": "llama", "data": "own.txt", "batch_size": 1, "sequence_length": 32, "warmup": 100, "eval_every": 1}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def own_texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.txt").write_text("\n".join(text for text, _ in stories(3, 60)))


@pytest.fixture
def scripted(monkeypatch):
    """Sets the losses of the validations after steps 1, 2, …; at None the run dies. Before the first step it is 0.5."""

    def script(*losses):
        def validate(objective, model, step, stop):
            loss = losses[step - 1] if step else 0.5
            if loss is None:
                raise Died
            return Validation(loss)

        monkeypatch.setattr(SFT, "validate", validate)

    return script


class Died(Exception):
    pass


def run(folder, **settings):
    return train(TrainConfig(**TINY | {"output": folder} | settings))


def resume(folder, **settings):
    return train(config_of_run(folder, **settings))


def refusal(folder, **settings):
    with pytest.raises(InputError) as error:
        resume(folder, **settings)
    return str(error.value).removeprefix(f"--resume {folder}: ")


def saved_steps(folder):
    return [files.checkpoint_step(path) for path in files.committed_steps(folder / "checkpoints")]


def saved_weights(folder, step):
    saved = load_file(files.step_folder(folder / "checkpoints", step) / "rank-00000.safetensors")
    return {name.removeprefix("weights."): x for name, x in saved.items() if name.startswith("weights.")}


# Checkpoints


@pytest.mark.parametrize(
    "settings, steps",
    [
        ({}, [4]),
        ({"checkpoint_minutes": 1e-9}, [1, 2, 3, 4]),
        ({"checkpoint_every": 3}, [3, 4]),
        ({"checkpoint_every": 0}, []),
    ],
)
def test_checkpoints_are_saved_by_time_or_by_steps_and_at_the_end(settings, steps, scripted, tmp_path):
    scripted(9, 8, 7, 6)
    run(tmp_path / "run", steps=4, keep_checkpoints=9, **settings)
    assert saved_steps(tmp_path / "run") == steps


def test_a_last_checkpoint_that_cannot_be_written_is_a_warning_beside_the_export(
    scripted, tmp_path, monkeypatch, capsys
):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    scripted(9, 8)
    monkeypatch.setattr(files, "write_safetensors", no_space)
    result = run(tmp_path / "run", steps=2)
    assert f"warning: {tmp_path}/run/checkpoints/step-000002: not written: No space left" in capsys.readouterr().out
    assert result.exported == tmp_path / "run/model" and saved_steps(tmp_path / "run") == []
    with pytest.raises(CheckpointError, match="step-000002: not written"):
        run(tmp_path / "without", steps=2, no_export=True)


# The best checkpoint


@pytest.fixture
def base(tmp_path, scripted):
    """A pretrained model."""
    scripted(9)
    return str(run(tmp_path / "base", steps=1, checkpoint_every=0).exported)


@pytest.mark.parametrize(
    "settings, deaths",
    [
        ({"lora_rank": 2, "lora_dropout": 0.3, "lora_export": "adapter"}, [(5, 3, None), (5, 3, 4, 3.5, None)]),
        ({"checkpoint_every": 1}, [(5, None), (5, 3, 4, None)]),  # its checkpoint is there before it is validated
    ],
)
def test_the_weights_with_the_lowest_loss_are_exported_whenever_the_run_dies(
    settings, deaths, base, scripted, tmp_path, capsys
):
    settings = {"model": base, "steps": 6, "best_checkpoint": True, "keep_checkpoints": 1, **settings}
    scripted(5, 3, 4, 3.5, 6, 3)
    straight = run(tmp_path / "straight", **settings)
    assert "step 2 has the lowest validation loss, 3.000: its weights are exported\n" in capsys.readouterr().out
    assert straight.step == 2 and saved_steps(straight.folder) == [2, 6]
    trained = {name: x for name, x in straight.model.named_parameters() if x.requires_grad}
    saved, last = (saved_weights(straight.folder, step) for step in (2, 6))
    assert trained.keys() == saved.keys() and all(torch.equal(trained[name], saved[name]) for name in saved)
    assert not any(torch.equal(saved[name], last[name]) for name in saved)

    for number, losses_until_death in enumerate(deaths):
        scripted(*losses_until_death)
        with pytest.raises(Died):
            resume(tmp_path / "killed") if number else run(tmp_path / "killed", **settings)
    scripted(5, 3, 4, 3.5, 6, 3)
    killed = resume(tmp_path / "killed")
    assert killed.step == 2 and saved_steps(killed.folder) == [2, 6]
    assert contents(killed.exported) == contents(straight.exported)
    assert losses(killed.folder) == losses(straight.folder)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_best_checkpoint_that_was_removed_is_told_and_the_next_best_exported(scripted, tmp_path, capsys):
    scripted(5, 3, 4, 3.5, None)
    with pytest.raises(Died):
        run(tmp_path / "run", steps=5, best_checkpoint=True, checkpoint_every=1)
    shutil.rmtree(tmp_path / "run/checkpoints/step-000002")
    scripted(5, 3, 4, 3.5, 3.25)
    assert resume(tmp_path / "run").step == 5
    told = "warning: step 2 has the lowest validation loss so far, 3.000, but no checkpoint\n"
    assert told in capsys.readouterr().out


def test_without_a_finite_loss_the_last_weights_are_exported(scripted, tmp_path, capsys):
    scripted(float("nan"), float("inf"))
    result = run(tmp_path / "run", steps=2, best_checkpoint=True)
    assert result.step == 2 and "no validation loss was finite: the last weights are exp" in capsys.readouterr().out


# Early stopping


def test_early_stopping_ends_a_run_which_more_patience_continues(scripted, tmp_path, capsys):
    scripted(5, 3, 3, 4, 1, 2)
    straight = run(tmp_path / "straight", steps=6, no_export=True)
    stopped = run(tmp_path / "run", steps=6, early_stopping=2)
    assert "early stopping: 2 validations in a row had no lower loss than step 2\n" in capsys.readouterr().out
    assert stopped.step == 4 and losses(stopped.folder) == losses(straight.folder)[:4]
    assert saved_steps(stopped.folder) == [4] and stopped.metrics[-1] == {"step": 4, "exported": "model"}
    finished = "the run is finished, after 4 steps; to lengthen it, give more than --early-stopping 2"
    assert refusal(stopped.folder) == refusal(stopped.folder, steps=9) == finished
    on = resume(stopped.folder, early_stopping=3)
    assert on.step == 6 and losses(on.folder) == losses(straight.folder)
    assert on.exported is not None and saved_weights(on.folder, 6).keys() == saved_weights(straight.folder, 6).keys()
    for name, value in saved_weights(straight.folder, 6).items():
        assert torch.equal(saved_weights(on.folder, 6)[name], value)


def test_early_stopping_counts_the_validations_before_a_resume(scripted, tmp_path):
    settings = {"steps": 6, "early_stopping": 2, "checkpoint_every": 1, "no_export": True}
    scripted(5, 3, 3, None)
    with pytest.raises(Died):
        run(tmp_path / "run", **settings)
    scripted(5, 3, 3, 4)
    assert resume(tmp_path / "run").step == 4  # by the validation that is made up for
    words = "the run is finished, after 4 steps; to lengthen it, give more than --early-stopping 2, or --no-export off"
    assert refusal(tmp_path / "run") == f"{words} to export it"


# More steps


def test_a_lengthened_run_is_the_long_run_and_replaces_the_export(scripted, tmp_path, monkeypatch, capsys):
    """Bit for bit where the learning rate is; an export that fails leaves the old one."""
    scripted(6, 5, 4, 3)
    straight = run(tmp_path / "straight", steps=4)
    short = run(tmp_path / "run", steps=2)
    old = weights(short.folder)
    assert refusal(short.folder) == "the run is finished, after 2 steps; to lengthen it, give more --epochs or --steps"
    assert (
        refusal(short.folder, steps=1)
        == "it has taken 2 steps, more than the 1 now given; give more --epochs or --steps"
    )

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(loop, "export", full)
        words = refusal(short.folder, steps=4)
    assert "No space left on device; the last step is saved; to export it again: ligermodels train --resume" in words
    assert weights(short.folder) == old and saved_steps(short.folder) == [2, 4]
    capsys.readouterr()
    done = resume(short.folder)
    assert f"{short.folder}: resumes after step 4\n" in capsys.readouterr().out
    assert contents(done.exported) == contents(straight.exported) != old
    assert losses(done.folder) == losses(straight.folder)
    assert [r for r in records(done.folder) if "exported" in r] == [
        {"step": step, "exported": "model"} for step in (2, 4)
    ]
    assert {path.name for path in done.folder.iterdir()} == {path.name for path in straight.folder.iterdir()}


def test_a_run_without_a_checkpoint_cannot_be_lengthened_and_one_that_was_interrupted_keeps_its_steps(
    scripted, tmp_path
):
    scripted(9, 8, None)
    run(tmp_path / "none", steps=1, checkpoint_every=0)
    words = "the run is finished, and has no checkpoint from which it could go on; start another run from its export"
    assert refusal(tmp_path / "none", steps=2) == words
    with pytest.raises(Died):
        run(tmp_path / "dead", steps=4, checkpoint_every=2)
    assert refusal(tmp_path / "dead", steps=3) == "steps: 3, was 4: keep the setting, or add --allow-changes"
    scripted(9, 8, 7)
    assert resume(tmp_path / "dead", steps=3, allow_changes=True, no_export=True).step == 3


# The Hub


@pytest.fixture
def hub(monkeypatch):
    return replace_client(monkeypatch)


def test_the_export_is_pushed_with_a_model_card(hub, scripted, tmp_path, capsys):
    scripted(6)
    result = run(tmp_path / "run", steps=1, push_to_hub="mine")
    assert "Uploaded to https://huggingface.co/me/mine\n" in capsys.readouterr().out
    _, pushed, (*uploaded, card) = hub.calls
    assert pushed == ("folder", "me/mine", result.exported) and uploaded == ["file", "me/mine", "README.md"]
    assert card.decode() == (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- ligermodels\n---\n\n# mine\n\n"
        "New weights: llama. Trained with ligermodels: 1 step of 1 sequence of 32 tokens, validation loss 6.000 nats "
        "per token.\n"
    )


def test_an_upload_that_fails_leaves_the_export_and_prints_the_command(hub, scripted, tmp_path, capsys):
    scripted(6)
    hub.errors["upload_folder"] = ConnectionError("gone")
    result = run(tmp_path / "a run", steps=1, push_to_hub="mine")
    said = capsys.readouterr().out.splitlines()
    assert said[-3].startswith("warning: --push-to-hub mine: ") and "gone" in said[-3]
    assert said[-2] == f"  hf upload mine '{result.exported}' . --private" and result.exported.is_dir()


def test_without_a_token_nothing_is_trained(scripted, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
    with pytest.raises(HubError) as error:
        run(tmp_path / "run", steps=1, push_to_hub="mine")
    assert str(error.value) == (
        "--push-to-hub mine: there is no token of the Hub; run `hf auth login`, or set HF_TOKEN"
    )
    assert not (tmp_path / "run").exists()


def test_a_run_whose_model_is_configured_otherwise_is_not_resumed(tmp_path):
    base = run(tmp_path / "base", steps=1).exported
    short = {"model": str(base), "steps": 1, "checkpoint_every": 1, "no_export": True}
    run(tmp_path / "run", **short)
    file = base / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"transformers_version": "9.9"}))
    assert resume(tmp_path / "run", steps=2).step == 2
    file.write_text(json.dumps(content | {"rope_theta": 5.0, "rope_parameters": None}))
    assert "config.json has changed since its last checkpoint" in refusal(tmp_path / "run", steps=3)
    assert resume(tmp_path / "run", steps=3, allow_changes=True).step == 3
