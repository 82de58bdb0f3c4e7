"""Runs of train.py that are stopped, killed or fail: what is left of them, and how they go on."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.training import TrainConfig, train
from ligermodels.training.data.embedded_stories import stories
from ligermodels.training.objectives.sft import SFT
from ligermodels.training.settings.settings import config_of_run
from tests.training.launching import ROOT, TRAIN, losses, records, weights

RUN = ["--data", "own.txt", "--steps", "16", "--batch-size", "2", "--sequence-length", "64", "--warmup", "2"]
RUN += ["--eval-every", "8", "--optimizer", "adamw"]
LLAMA = ["--model", "llama", *RUN]


@pytest.fixture(scope="module")
def straight(launcher):
    """A run that is not interrupted."""
    launcher.succeed(*LLAMA, "--output", "straight")
    return launcher.folder / "straight"


LORA = ["--model", "straight/model", *RUN, "--lora-rank", "4", "--lora-dropout", "0.3", "--checkpoint-every", "3"]
LORA += ["--modules-to-save", "norm"]


@pytest.fixture(scope="module")
def undisturbed(straight, launcher):
    """A LoRA run over its model, which is not interrupted either."""
    launcher.succeed(*LORA, "--output", "undisturbed")
    return launcher.folder / "undisturbed"


@pytest.fixture(scope="module")
def stopped(launcher):
    """The same run, told to stop after a few steps."""
    run = launcher.start(*LLAMA, "--output", "stopped")
    run.read_until("step 4/")
    run.kill(signal.SIGSTOP)  # or it could end before it is told
    other = launcher.run("--resume", "stopped")
    assert other.status == 2 and re.match(
        rf"ligermodels: stopped: in use by process {run.processes[0]} on", other.stderr
    )
    run.kill(signal.SIGTERM).kill(signal.SIGCONT).wait()
    return run, launcher.folder / "stopped"


def copied(folder, name):
    return shutil.copytree(folder, folder.with_name(name))


def steps_of(folder):
    return [record["step"] for record in records(folder) if "loss" in record]


def test_a_run_stopped_by_a_signal_saves_and_resumes_bit_exactly(stopped, straight, launcher):
    run, folder = stopped
    assert run.status == 143 and "SIGTERM: stopping after this step" in run.stderr
    reached = steps_of(folder)[-1]
    assert 4 <= reached < 16
    assert run.last_lines[:2] == [f"Stopped after step {reached}. To resume:", f"  python {TRAIN} --resume stopped"]
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {f"step-{reached:06d}"}

    copy = copied(folder, "interrupted")
    again = launcher.start("--resume", copy.name)
    assert again.read_until(copy.name) == f"interrupted: resumes after step {reached}\n"
    again.read_until(f"step {reached + 2}/")
    again.kill(signal.SIGINT).wait()
    assert (
        again.status == 130 and "SIGINT: stopping after this step; press Ctrl-C again to exit at once" in again.stderr
    )
    launcher.succeed("--resume", copy.name)
    assert weights(copy) == weights(straight)
    assert losses(copy) == losses(straight) and steps_of(copy) == list(range(1, 17))


@pytest.mark.parametrize("sharing", ["1", "2"])
def test_a_run_resumes_with_the_same_data_on_another_number_of_ranks(sharing, stopped, straight, launcher):
    """From one to two, of which the second alone is told to stop, and back to one."""
    copy = copied(stopped[1], f"shared-{sharing}")
    reached = steps_of(copy)[-1]
    pair = launcher.start("--resume", copy.name, "--context-parallel", sharing, ranks=2)
    pair.read_until(f"step {reached + 2}/")
    pair.kill(signal.SIGTERM, rank=1).wait()
    assert pair.statuses == [143, 143] and f"Stopped after step {steps_of(copy)[-1]}." in pair.stdout
    done = launcher.succeed("--resume", copy.name, "--context-parallel", "1")
    for run, ranks in ((pair, 2), (done, 1)):
        assert f"weights, optimizer state and data order are exact on {ranks} x cpu" in run.stdout
    torch.testing.assert_close(losses(copy), losses(straight), rtol=2e-6, atol=0)
    for a, b in zip(*(ligermodels.load(folder / "model").parameters() for folder in (copy, straight)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_weights_keep_their_dtype_on_another_number_of_ranks(launcher):
    """What a run without --param-dtype stores them in depends on how many ranks began it."""
    half = [*LLAMA, "--dtype", "bfloat16", "--steps", "3", "--checkpoint-every", "2", "--output", "half"]
    launcher.succeed(*half, ranks=2)
    folder = launcher.folder / "half"
    before = losses(folder)
    shutil.rmtree(folder / "model")
    launcher.succeed("--resume", "half")
    torch.testing.assert_close(losses(folder), before, rtol=2e-3, atol=0)


def test_changed_settings_are_listed_and_refused_without_allow_changes(stopped, launcher):
    copy = copied(stopped[1], "changed")
    change = ["--resume", copy.name, "--learning-rate", "1e-3", "--micro-batch-size", "1"]
    refused = launcher.run(*change)
    assert refused.status == 2
    assert refused.stderr == (
        "ligermodels: --resume changed: learning_rate: 0.001, was 0.0045: keep the setting, or add --allow-changes\n"
    )
    unfit = launcher.run(*change, "--param-dtype", "bfloat16", "--optimizer", "muon", "--allow-changes")
    other = "optimizer: muon, was adamw; param_dtype: bfloat16, was float32"
    told = (
        f"ligermodels: --resume changed: {other}: its checkpoints do not fit; keep the setting, or start another run\n"
    )
    assert (unfit.status, unfit.stderr) == (2, told)
    own = launcher.folder / "own.txt"
    text = own.read_text()
    own.write_text(text.replace("Monday", "Sunday"))
    other_data = launcher.run("--resume", copy.name)
    own.write_text(text)
    assert other_data.status == 2 and "changed: the data have changed" in other_data.stderr
    done = launcher.succeed(*change, "--allow-changes", "--no-export")
    assert "resumes after step" in done.stdout
    assert "learning_rate = 0.001\n" in (copy / "train.toml").read_text()
    assert max(path.name for path in (copy / "checkpoints").iterdir()) == "step-000016"


def test_an_edited_train_toml_is_compared_with_the_checkpoint(stopped, launcher):
    file = copied(stopped[1], "edited") / "train.toml"
    file.write_text(file.read_text().replace("seed = 0", "seed = 7").replace("= 0.0045", "= 0.5"))
    refused = launcher.run("--resume", "edited")
    assert refused.stderr == (
        "ligermodels: --resume edited: learning_rate: 0.5, was 0.0045; seed: 7, was 0: keep the setting, or add "
        "--allow-changes\n"
    )
    assert launcher.succeed("--resume", "edited", "--allow-changes", "--no-export").status == 0


def test_a_killed_run_resumes_bit_exactly_from_its_last_checkpoint(undisturbed, launcher):
    killed = launcher.start(*LORA, "--output", "killed")
    killed.read_until("step 8/")
    killed.kill(signal.SIGKILL).wait()
    assert killed.status == -signal.SIGKILL
    done = launcher.succeed("--resume", "killed", "--keep-checkpoints", "3")
    assert int(re.search(r"resumes after step (\d+)", done.stdout)[1]) in (3, 6, 9)
    one = launcher.folder / "killed"
    assert weights(one) == weights(undisturbed)
    assert losses(one) == losses(undisturbed) and steps_of(one) == list(range(1, 17))
    kept = [path.name for path in sorted((one / "checkpoints").iterdir())]
    assert kept == ["step-000012", "step-000015", "step-000016"]


def test_a_run_that_was_killed_before_its_first_step_starts_by_either_command(straight, launcher):
    """It has its lock and its settings, and has loaded no weights."""
    for name, command in (("same", [*LLAMA, "--output", "same"]), ("resumed", ["--resume", "resumed"])):
        folder = launcher.folder / name
        folder.mkdir()
        for file in ("lock", "train.toml"):
            shutil.copy(straight / file, folder)
        launcher.succeed(*command)
        assert weights(folder) == weights(straight) and losses(folder) == losses(straight)


SEPARATED = ["--data", "separated.jsonl", "--steps", "6", "--eval-every", "2", "--checkpoint-every", "3"]
SEPARATED += ["--model", "llama", "--batch-size", "2", "--sequence-length", "64", "--keep-checkpoints", "9"]


@pytest.fixture(scope="module")
def separated(launcher):
    """A run on texts with Unicode's own line ends, which are in its samples too."""
    lines = [{"text": "\u2028".join(text.split()[:40])} for text, _ in stories(5, 100)]
    (launcher.folder / "separated.jsonl").write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    launcher.succeed(*SEPARATED, "--output", "separated")
    return launcher.folder / "separated"


def validations(folder):
    return [record for record in records(folder) if "validation_loss" in record]


def killed_after(step, folder, name):
    """A copy of a finished run, as if it had been killed after a step and its checkpoint, within the validation."""
    copy = copied(folder, name)
    shutil.rmtree(copy / "model")
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    lines = [json.dumps(record) for record in records(copy) if record["step"] < step or record.get("loss")]
    (copy / "metrics.jsonl").write_text("\n".join(lines) + f'\n{{"step": {step}, "validation_lo')
    return copy


@pytest.mark.parametrize("step", [3, 6])
def test_every_validation_of_a_killed_run_is_there_once_after_a_resume(step, separated, launcher):
    assert [record["step"] for record in validations(separated)] == [2, 4, 6]
    assert any("\u2028" in record["sample"] for record in validations(separated))
    killed = killed_after(step, separated, f"separated-{step}")
    launcher.succeed("--resume", killed.name)
    assert validations(killed) == validations(separated) and losses(killed) == losses(separated)
    assert steps_of(killed) == [1, 2, 3, 4, 5, 6] and weights(killed) == weights(separated)


def test_a_last_validation_is_made_up_for_without_an_export_and_then_the_run_is_finished(separated, launcher):
    killed = killed_after(6, separated, "unvalidated")
    launcher.succeed("--resume", killed.name, "--no-export")
    assert validations(killed) == validations(separated)
    again = launcher.run("--resume", killed.name, "--no-export")
    words = "finished, after 6 steps; to lengthen it, give more --epochs or --steps, or --no-export off to export it"
    assert again.status == 2 and words in again.stderr


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_signal_during_a_validation_stops_the_run_there_and_the_validation_is_repeated(
    separated, launcher, tmp_path, monkeypatch
):
    """Of the first and of the last one: a run that would go on could never make up for it."""
    monkeypatch.chdir(launcher.folder)
    validate, folder = SFT.validate, tmp_path / "signalled"

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return validate(*arguments)

    flags = dict(zip(SEPARATED[::2], SEPARATED[1::2], strict=True))
    given = {flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items()}
    config = TrainConfig(**{name: int(value) if value.isdecimal() else value for name, value in given.items()})
    config = dataclasses.replace(config, output=folder)
    for step, calls in ((2, [interrupted]), (4, [validate, interrupted]), (6, [validate, interrupted])):
        queue = iter(calls)  # a resumed run begins with the validation that was interrupted
        monkeypatch.setattr(SFT, "validate", lambda *arguments, queue=queue: next(queue)(*arguments))
        result = train(config)
        assert result.exported is None and [r["step"] for r in result.metrics if "loss" in r] == [*range(1, step + 1)]
        config = config_of_run(folder)
    monkeypatch.setattr(SFT, "validate", validate)
    train(config)
    assert validations(folder) == validations(separated) and losses(folder) == losses(separated)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_stopped_before_its_first_step_resumes(straight, launcher, tmp_path, monkeypatch):
    monkeypatch.chdir(launcher.folder)
    validate = SFT.validate

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return validate(*arguments)

    config = TrainConfig(
        model="straight/model", data=("own.txt",), steps=1, batch_size=2, sequence_length=64, output=tmp_path / "zero"
    )
    with monkeypatch.context() as patch:
        patch.setattr(SFT, "validate", interrupted)
        stopped = train(config)
    assert (stopped.step, stopped.signal, steps_of(tmp_path / "zero")) == (0, signal.SIGTERM, [])
    resumed = train(config_of_run(tmp_path / "zero"))
    assert (resumed.step, resumed.signal) == (1, 0) and resumed.exported is not None


@pytest.mark.parametrize("fatal", range(1, 8))
def test_a_new_folder_resumes_whatever_its_first_file_operation_that_is_killed(fatal, launcher):
    """There is no folder, or --resume accepts it."""
    name = f"new-{fatal}"
    short = [*LLAMA, "--steps", "1", "--eval-every", "1", "--no-export"]
    assert launcher.run(*short, "--output", name, watched=name, fatal=fatal).status == -signal.SIGKILL
    if (launcher.folder / name).exists():
        launcher.succeed("--resume", name)
    else:
        launcher.succeed(*short, "--output", name)
    assert not [path for path in launcher.folder.iterdir() if path.name.startswith((f"{name}.tmp", f".{name}."))]


def test_two_ranks_agree_on_checkpoints_by_time_the_best_and_early_stopping(launcher):
    """At this learning rate the validation loss rises after step 3. One rank then goes on, and exports the same."""
    run = [*LLAMA, "--steps", "6", "--sequence-length", "32", "--warmup", "1", "--learning-rate", "0.05"]
    run += ["--eval-every", "1", "--best-checkpoint", "--early-stopping", "2", "--keep-checkpoints", "1"]
    run += ["--validation-fraction", "0.01"]
    done = launcher.succeed(*run, "--checkpoint-minutes", "1e-6", "--output", "agreed", ranks=2)
    folder = launcher.folder / "agreed"
    assert "early stopping: 2 validations in a row had no lower loss than step 3\n" in done.stdout
    assert steps_of(folder) == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000003", "step-000005"]
    exported = weights(folder)
    refused = launcher.run("--resume", "agreed", ranks=2)
    assert refused.statuses == [2, 2] and "give more than --early-stopping 2\n" in refused.stderr
    done = launcher.succeed("--resume", "agreed", "--early-stopping", "9")
    assert steps_of(folder) == [1, 2, 3, 4, 5, 6] and "step 3 has the lowest validation loss" in done.stdout
    assert weights(folder) == exported


def test_all_ranks_stop_at_a_loss_that_is_not_finite_and_resume_without_that_step(straight, launcher):
    """A token's embedding, multiplied as in Granite, is infinite; one document of eight, a row each, begins with it."""
    model = shutil.copytree(straight / "model", launcher.folder / "holed")
    config = json.loads((model / "config.json").read_text())
    multipliers = {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 1.0}
    config |= {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "logits_scaling": 1.0, **multipliers}
    (model / "config.json").write_text(json.dumps(config))
    weights = load_file(model / "model.safetensors")
    (token,) = ligermodels.load_tokenizer(model).encode("~", add_special_tokens=False)
    weights["model.embed_tokens.weight"][token] = 3e38
    save_file(weights, model / "model.safetensors")
    lines = [{"text": "~" * (number == 2) + text} for number, (text, _) in enumerate(stories(5, 8))]
    (launcher.folder / "eight.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (launcher.folder / "two.txt").write_text("\n".join(text for text, _ in stories(6, 2)))
    run = ["--model", "holed", "--data", "eight.jsonl", "--validation-data", "two.txt", "--packing", "off"]
    run += ["--steps", "4", "--batch-size", "2", "--seed", "1", "--no-export"]
    skipping = launcher.succeed(*run, "--on-nan", "skip", "--output", "holed-skipped")
    assert "1 update skipped" in skipping.stdout
    skipped = [
        record.get("skipped", False) for record in records(launcher.folder / "holed-skipped") if "loss" in record
    ]
    assert len(skipped) == 4 and skipped.count(True) == 1
    step = skipped.index(True) + 1
    assert step > 1

    stopped = launcher.run(*run, "--output", "holed-stopped", ranks=2)
    assert stopped.statuses == [2, 2] and stopped.stderr.count("\n") == 1
    assert f"ligermodels: step {step}: loss nan, gradient norm nan: stopped before the update; " in stopped.stderr
    assert stopped.stderr.endswith(f"{TRAIN} --resume holed-stopped --on-nan skip\n")
    last = records(launcher.folder / "holed-stopped")[-1]
    assert last["step"] == step and "eight.jsonl:3" in last["not_finite"] and len(last["not_finite"]) == 2
    done = launcher.succeed("--resume", "holed-stopped", "--on-nan", "skip", ranks=2)
    assert f"holed-stopped: resumes after step {step - 1}\n" in done.stdout
    alone, shared = (losses(launcher.folder / f"holed-{name}") for name in ("skipped", "stopped"))
    assert alone.pop(step - 1) is shared.pop(step - 1) is None
    assert shared == pytest.approx(alone, rel=2e-6)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_one_line(straight, launcher):
    done = launcher.run(*LLAMA, "--output", "no-room", "--checkpoint-every", "4", file_size=10**6)
    assert done.status == 2 and re.fullmatch(
        r"ligermodels: .*step-000004: not written: File too large; .*\n", done.stderr
    )
    assert list((launcher.folder / "no-room/checkpoints").iterdir()) == []
    assert 4 <= steps_of(launcher.folder / "no-room")[-1] <= 8  # where the next save waits for this one


@pytest.mark.parametrize("size, where", [(300, "train.toml"), (1500, "metrics.jsonl"), (10**6, "model")])
def test_a_full_disk_ends_the_run_with_one_line(size, where, straight, launcher):  # which leaves a tokenizer behind
    name = f"full-{size}"
    done = launcher.run(*LLAMA, "--output", name, file_size=size)
    assert done.status == 2
    assert re.fullmatch(rf"ligermodels: .*{name}(/model)?: not written: File too large; make room .*\n", done.stderr)
    assert not (launcher.folder / name / where).exists() or where == "metrics.jsonl"


def unexported(launcher, name, ranks, steps):
    """The LoRA run, where there is room for all but the merged model. Returns its folder."""
    failed = launcher.run(*LORA, "--steps", steps, "--output", name, ranks=ranks, file_size=10**6)
    assert set(failed.statuses) == {2}
    told = f"the last step is saved; to export it again: .* {TRAIN} --resume {name}"
    assert re.fullmatch(rf"ligermodels: .*{name}/model: not written: File too large; .*; {told}\n", failed.stderr)
    assert max(path.name for path in (launcher.folder / name / "checkpoints").iterdir()) == f"step-{steps:06}"
    return launcher.folder / name


def test_after_a_failed_export_the_last_step_is_saved_and_resuming_only_exports(undisturbed, launcher):
    folder = unexported(launcher, "unexported", ranks=1, steps=16)
    taken = losses(folder)
    done = launcher.succeed("--resume", folder.name)
    assert f"{folder.name}: resumes after step 16\nSaved {folder.name}/model." in done.stdout
    assert losses(folder) == taken == losses(undisturbed) and weights(folder) == weights(undisturbed)


def test_all_ranks_save_the_last_step_if_the_first_rank_cannot_export(straight, launcher):
    folder = unexported(launcher, "unexported-by-two", ranks=2, steps=4)
    saved = {path.name for path in (folder / "checkpoints/step-000004").iterdir()}
    assert {"rank-00000.safetensors", "rank-00001.safetensors"} < saved


def test_torchrun_saves_and_exits_after_a_signal(launcher):
    """To itself, which it passes on. Of one rank: its imports take most of the time."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(TRAIN)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"TRITON_INTERPRET": "0", "XDG_CACHE_HOME": str(launcher.folder / ".cache")}
    process = subprocess.Popen(
        [*command, *LLAMA, "--steps", "2000", "--output", "torchrun"], cwd=launcher.folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    reached = int(re.search(r"Stopped after step (\d+)", output)[1])
    assert output.splitlines()[-2] == f"  python {TRAIN} --resume torchrun"
    record = json.loads((launcher.folder / f"torchrun/checkpoints/step-{reached:06d}/training.json").read_text())
    assert record["ranks"] == 1 and record["progress"]["rows"] == 2 * reached
