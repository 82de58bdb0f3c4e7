"""train.py as its users run it: what a run leaves, and that what does not change the result does not."""

import gzip
import json
import math
import os
import re
import runpy
import shlex
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ligermodels
from ligermodels import load_tokenizer
from ligermodels.cli import main
from ligermodels.training import TrainConfig, plan, train
from ligermodels.training.data.embedded_stories import stories
from ligermodels.training.optimizers.schedules import learning_rate
from tests.training.launching import TRAIN, losses, records, weights

SHORT = ["--steps", "4", "--batch-size", "4", "--sequence-length", "64", "--eval-every", "4", "--warmup", "2"]
SHORT += ["--optimizer", "adamw"]  # Muon makes rounding larger where a gradient has singular values near zero
SMALL = [*SHORT, "--checkpoint-every", "0"]
LLAMA = ["--model", "llama", "--data", "own.txt", *SMALL]
LORA = ["--lora-rank", "4", "--learning-rate", "1e-3"]
LEFT = {"train.toml", "run.json", "metrics.jsonl", "curves.png", "lock", "model", "checkpoints"}


@pytest.fixture(scope="module")
def base(launcher):
    """A run of a tiny Llama, and its folder."""
    run = ["--model", "llama", "--data", "own.txt", *SHORT, "--eval-every", "3", "--output", "base"]
    return launcher.succeed(*run, picture=True), launcher.folder / "base"


def test_a_run_logs_every_step_exports_a_model_and_prints_the_next_commands(base, launcher):
    done, folder = base
    assert {path.name for path in folder.iterdir()} == LEFT
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000004"]
    assert [record["step"] for record in records(folder) if "loss" in record] == [1, 2, 3, 4]
    validations = {record["step"]: record for record in records(folder) if "validation_loss" in record}
    assert list(validations) == [3, 4]
    last = validations[4]
    assert last["validation_perplexity"] == pytest.approx(math.exp(last["validation_loss"]))
    assert f"step 4: validation loss {last['validation_loss']:.3f} nats/token, perplexity" in done.stdout
    samples = {record["step"]: record["sample"] for record in records(folder) if "sample" in record}
    assert list(samples) == [3, 4] and f"step 4: {samples[4]}\n" in done.stdout
    begun, _, told = samples[4].partition(" | ")
    assert begun in (launcher.folder / "own.txt").read_text() and len(told) > 9
    assert losses(folder)[-1] < losses(folder)[0] == pytest.approx(math.log(1024), rel=0.05)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert done.last_lines == [
        "Saved base/model. To generate with it:",
        '  ligermodels generate base/model --prompt "Once upon a time"',
        done.last_lines[2],
    ]
    assert re.fullmatch(r"4 steps, [\d,]+ tokens in 0:\d\d, [\d,]+ tokens/s", done.last_lines[2])
    assert done.stderr == ""
    ids = {"bos_token_id": 0, "eos_token_id": [0, 2], "pad_token_id": None}  # those of its new tokenizer
    assert ids.items() <= json.loads((folder / "model/config.json").read_text()).items()


def test_train_toml_reproduces_the_weights_and_the_export_can_be_trained_further(base, launcher):
    _, folder = base
    again = launcher.succeed("--config", "base/train.toml")
    assert weights(launcher.folder / "runs/llama") == weights(folder)
    assert losses(launcher.folder / "runs/llama") == losses(folder)
    on = launcher.succeed("--model", "runs/llama/model", "--data", "own.txt", *SMALL)
    assert "Saved runs/llama-2/model" in on.stdout and "Saved runs/llama/model" in again.stdout
    written = [launcher.folder / "runs" / name / "model/tokenizer.json" for name in ("llama", "llama-2")]
    assert written[0].read_bytes() == written[1].read_bytes()
    assert [peak_rate(launcher.folder / f"runs/{name}") for name in ("llama", "llama-2")] == [4.5e-3, 2e-5]
    first = next(record for record in records(launcher.folder / "runs/llama-2") if "validation_loss" in record)
    last = next(record for record in reversed(records(folder)) if "validation_loss" in record)
    assert first["step"] == 0 and first["validation_loss"] == pytest.approx(last["validation_loss"], rel=1e-6)


def peak_rate(folder):
    return max(record["learning_rate"] for record in records(folder) if "loss" in record)


def test_a_dry_run_prints_the_plan_and_writes_nothing(launcher):
    before = contents(launcher.folder)
    done = launcher.succeed("--model", "llama:8b", "--data", "random", "--dtype", "bfloat16", "--dry-run")
    assert "8,030,261,248" in done.stdout and "peak" in done.stdout
    assert "tiny" in launcher.succeed("--model", "list").stdout
    assert contents(launcher.folder) == before


def traced(folder):
    """How often each op ran in the steps of a run's trace."""
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") in ("cpu_op", "user_annotation"))


def blocks_run_twice(folder):
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    return traced(folder)[attention] == 2 * traced(folder)[f"{attention}_backward"] > 0


def blocks_are_compiled(folder):
    return any(name.startswith("Torch-Compiled Region") for name in traced(folder))


def a_rank_holds(rows):
    def of_the_embedding(folder):
        with safe_open(folder / "checkpoints/step-000004/rank-00000.safetensors", "pt") as file:
            return file.get_slice("weights.model.embed_tokens.weight").get_shape() == [rows, 128]

    return of_the_embedding


SAVED = ["--checkpoint-every", "4"]
SAME = {  # losses to rounding of the sums, and weights as near as Adam's first steps leave them; what shows the flags
    "accumulated, recomputed, tf32": (
        ["--micro-batch-size", "1", "--activation-checkpointing", "full", "--dtype", "tf32", "--profile", "4"],
        1, blocks_run_twice,
    ),
    "compiled": (["--compile", "--profile", "4"], 1, blocks_are_compiled),
    "two ranks": (SAVED, 2, a_rank_holds(512)),
    "rows on two ranks": (["--context-parallel", "2", *SAVED], 2, a_rank_holds(512)),
    "two copies, accumulated": (["--dp-replicate", "2", "--micro-batch-size", "1", *SAVED], 2, a_rank_holds(1024)),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_losses_do_not_depend_on_micro_batches_ranks_checkpointing_or_compilation(name, base, launcher):
    _, folder = base
    flags, ranks, seen = SAME[name]
    output = launcher.folder / name
    launcher.succeed(*LLAMA, *flags, "--output", output, ranks=ranks)
    torch.testing.assert_close(losses(output), losses(folder), rtol=2e-6, atol=0)
    assert_same_model(output / "model", folder / "model")
    assert seen(output)


def assert_same_model(one, other):
    for a, b in zip(*(ligermodels.load(folder).parameters() for folder in (one, other)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert (one / "config.json").read_bytes() == (other / "config.json").read_bytes()
    assert (one / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


OTHER = {  # flags, and how far the losses may be from those of AdamW in fp32
    "muon, states in bfloat16": (["--optimizer", "muon", "--optimizer-state-dtype", "bfloat16"], 0.1),
    "adamw8bit, bfloat16 over fp32": (
        ["--optimizer", "adamw8bit", "--dtype", "bfloat16", "--param-dtype", "float32"],
        0.02,
    ),
    "all in bfloat16": (["--dtype", "bfloat16"], 0.02),
}


@pytest.mark.parametrize("name", OTHER)
def test_every_optimizer_and_dtype_reduces_the_loss(name, base, launcher):
    _, folder = base
    flags, near = OTHER[name]
    output = launcher.folder / name
    launcher.succeed(*LLAMA, *flags, "--output", output)
    expected, got = losses(folder), losses(output)
    torch.testing.assert_close(got, expected, rtol=near, atol=0)
    assert got[-1] < got[0] and got != expected
    dtype = json.loads((output / "model/config.json").read_text())["torch_dtype"]
    assert dtype == ("bfloat16" if "--dtype" in flags else "float32")


CHATS = ["--data", "more", *SMALL, "--steps", "3"]
NEW, FINE = ["--model", "llama", *CHATS], ["--model", "base/model", *CHATS, *LORA]
CHANGING = [
    *(
        (NEW, flag)
        for flag in (
            ["--max-grad-norm", "0.5"],
            ["--weight-decay", "0"],
            ["--optimizer-state-dtype", "bfloat16"],
            ["--seed", "1"],
        )
    ),
    *((NEW, flag) for flag in (["--packing", "off"], ["--validation-fraction", "0.2"], ["--warmup", "0"])),
    *((FINE, flag) for flag in (["--lora-alpha", "4"], ["--lora-dropout", "0.5"], ["--lora-targets", "q_proj"])),
]


@pytest.fixture(scope="module")
def unchanged(base, launcher):
    """The losses of three steps, of a new model and of LoRA."""
    for name, flags in (("new", NEW), ("fine", FINE)):
        launcher.succeed(*flags, "--no-export", "--output", name)
    return {"new": losses(launcher.folder / "new"), "fine": losses(launcher.folder / "fine")}


@pytest.mark.parametrize(("run", "flag"), CHANGING, ids=lambda given: given[0].strip("-"))
def test_every_flag_that_should_change_the_losses_does(run, flag, unchanged, launcher):
    name = f"with{flag[0]}"
    launcher.succeed(*run, *flag, "--no-export", "--output", name)
    got, expected = losses(launcher.folder / name), unchanged["fine" if run is FINE else "new"]
    assert got != expected and got == pytest.approx(expected, rel=0.1)


def test_lora_is_kept_in_fp32_over_a_base_in_bfloat16(base, launcher):
    """Its updates are smaller than what bfloat16 tells apart."""
    lora = ["--model", "base/model", "--data", "own.txt", *SMALL, *LORA, "--lora-export", "adapter"]
    single, half = (launcher.folder / name for name in ("lora-float32", "lora-bfloat16"))
    launcher.succeed(*lora, "--output", single)
    launcher.succeed(*lora, "--dtype", "bfloat16", "--output", half)
    stored = load_file(half / "adapter/adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert sum(tensor.abs().sum().item() for name, tensor in stored.items() if "lora_B" in name) > 0
    torch.testing.assert_close(losses(half), losses(single), rtol=0.02, atol=0)


def test_the_learning_rate_follows_the_schedule(launcher):
    launcher.succeed(*LLAMA, "--schedule", "wsd", "--learning-rate", "1e-3", "--output", "wsd", "--no-export")
    rates = [record["learning_rate"] for record in records(launcher.folder / "wsd") if "loss" in record]
    assert rates == [learning_rate("wsd", step, 4, 2, 1e-3) for step in range(4)]
    assert not (launcher.folder / "wsd/model").exists()


@pytest.fixture(scope="module")
def experts(base, launcher):
    """A model of experts with the tokenizer of the first."""
    folder = launcher.folder / "experts"
    ligermodels.export(ligermodels.create("qwen3_moe", size="tiny", seed=1, dtype=torch.float32), folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(base[1] / "model" / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("model", "targets", "saved"),
    [("base/model", ["all-linear"], ["embed_tokens", "lm_head"]), ("experts", ["q_proj", "experts"], [])],
)
def test_an_adapter_and_the_merged_model_are_the_same(model, targets, saved, base, experts, launcher):
    lora = ["--model", model, "--data", "own.txt", *SMALL, *LORA, "--lora-targets", *targets]
    lora += ["--lora-alpha", "32", "--modules-to-save", *saved]
    name = model.replace("/", "-")
    adapter, merged = (launcher.folder / f"{name}-{kind}" for kind in ("adapter", "merged"))
    done = launcher.succeed(*lora, "--output", adapter, "--lora-export", "adapter")
    assert f"Saved {adapter / 'adapter'}, in PEFT's format. To generate with it:" in done.stdout
    assert f"  ligermodels generate {shlex.quote(str(adapter / 'adapter'))} --prompt" in done.stdout
    launcher.succeed(*lora, "--output", merged, ranks=2)
    torch.testing.assert_close(losses(merged), losses(adapter), rtol=2e-6, atol=0)
    before, after = (record["validation_loss"] for record in records(adapter) if "validation_loss" in record)
    assert after < before - 0.003

    start = ligermodels.load(launcher.folder / model)
    untrained = {name: parameter.clone() for name, parameter in start.named_parameters()}
    ligermodels.load_adapter(start, adapter / "adapter")
    ids = torch.arange(40).view(1, -1)
    whole = ligermodels.load(merged / "model")
    torch.testing.assert_close(whole(ids).logits, start(ids).logits, rtol=1e-3, atol=1e-3)
    moved = [name for name, parameter in whole.named_parameters() if not torch.equal(parameter, untrained[name])]
    assert moved and not any("norm" in name for name in moved)
    assert ("model.embed_tokens.weight" in moved) == ("lm_head.weight" in moved) == bool(saved)


def test_an_adapter_brings_the_tokenizer_that_its_base_lacks(launcher, capsys):
    bare, output = launcher.folder / "bare", launcher.folder / "brought"
    ligermodels.export(ligermodels.create("llama", size="tiny", seed=1, dtype=torch.float32), bare)
    lora = ["--model", "bare", "--data", "chats", *SMALL, *LORA, "--lora-export", "adapter", "--output", "brought"]
    done = launcher.succeed(*lora)
    adapter, merged = output / "adapter", launcher.folder / "merged"
    assert done.last_lines[1] == "  ligermodels generate brought/adapter --chat"

    assert main(["export", str(bare), str(merged), "--adapter", str(adapter)]) == 0
    ids = load_tokenizer(adapter).apply_chat_template([{"role": "user", "content": "Hello!"}])
    assert load_tokenizer(bare, adapter=adapter).encode("Hello!") == load_tokenizer(merged).encode("Hello!")
    assert load_tokenizer(merged).apply_chat_template([{"role": "user", "content": "Hello!"}]) == ids
    model = ligermodels.load(bare)
    ligermodels.load_adapter(model, adapter)
    ends = {"bos_token_id": 0, "eos_token_id": [0, 2], "pad_token_id": 0}
    assert model.generation_config == ligermodels.load(merged).generation_config == ends

    capsys.readouterr()
    said = ["--chat", "--prompt", "Hello!", "--max-new-tokens", "8", "--device", "cpu"]
    for flags in ([str(bare), "--adapter", str(adapter)], [str(adapter)], [str(merged)]):
        assert main(["generate", *flags, *said]) == 0
    one, *others = capsys.readouterr().out.splitlines()
    assert others == [one, one] and one != ""

    continued = launcher.succeed("--adapter", "brought/adapter", "--data", "more", *SMALL, "--output", "further")
    assert "brought/adapter on " in continued.stdout and "  ligermodels generate further/adapter" in continued.stdout
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (launcher.folder / "further/adapter" / file).read_bytes() == (adapter / file).read_bytes()


def test_chats_texts_and_folders_are_mixed_and_correct_answers_counted(launcher):
    mixture = ["--data", "chats=0.6", "more=0.3", "own.txt=0.1"]
    done = launcher.succeed("--model", "qwen2", *mixture, *SMALL, "--output", "chats", "--no-export")
    mixed = "qwen2: 1,050,752 parameters; the embedded chats=0.6 + more=0.3 + own.txt=0.1 "
    assert re.search(rf"{re.escape(mixed)}\(\d+ pieces of long documents without a s", done.stdout)
    (accuracy,) = [record for record in records(launcher.folder / "chats") if "questions" in record]
    assert (accuracy["step"], accuracy["correct"], accuracy["questions"]) == (4, 0, 8) and "validation_loss" in accuracy
    assert "step 4: 0 of 8 questions answered correctly" in done.stdout


def test_prompts_and_completions_train_a_model_that_has_no_chat_template(base, launcher):
    model = shutil.copytree(base[1] / "model", launcher.folder / "plain")
    described = json.loads((model / "tokenizer_config.json").read_text())
    del described["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    pairs = [{"prompt": "Once upon a", "completion": f" time there were {n} marbles."} for n in range(200)]
    (launcher.folder / "pairs.json.gz").write_bytes(gzip.compress(json.dumps(pairs).encode()))
    done = launcher.succeed("--model", "plain", "--data", "pairs.json.gz", *SMALL, "--output", "paired")
    assert done.last_lines[1] == '  ligermodels generate paired/model --prompt "Once upon a time"'
    assert losses(launcher.folder / "paired")[-1] < losses(launcher.folder / "paired")[0]


def test_rows_without_a_supervised_token_are_left_out_on_any_number_of_ranks(base, launcher):
    """Of the five rows that each prompt would take with its completion, one has something to learn."""
    prompts = [" ".join(text for text, _ in stories(seed, 5)) for seed in range(20)]
    pairs = [json.dumps({"prompt": prompt, "completion": " The end."}) for prompt in prompts]
    (launcher.folder / "long.jsonl").write_text("\n".join(pairs))
    run = ["--model", "base/model", "--data", "long.jsonl", *SMALL, "--batch-size", "2", "--packing", "off"]
    alone, shared = (launcher.folder / name for name in ("masked", "masked-two"))
    for output, ranks in ((alone, 1), (shared, 2)):
        launcher.succeed(*run, "--micro-batch-size", "1", "--no-export", "--output", output, ranks=ranks)
    assert losses(alone) == pytest.approx(losses(shared), rel=2e-6)
    norms = [record["grad_norm"] for record in records(shared) if "loss" in record]
    assert min(*losses(shared), *norms) > 0 and math.isfinite(sum(norms))


def test_a_model_of_the_hub_is_trained_by_its_name_and_revision(base, launcher):
    commit = "4e20de362430cd3b72f300e6b0f18e50e7166e08"
    cached = launcher.hub / "models--someone--tiny"
    shutil.copytree(base[1] / "model", cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs/v1").write_text(commit)
    adapter = [*LORA, "--lora-export", "adapter"]
    done = launcher.succeed("--model", "someone/tiny", "--revision", "v1", "--data", "own.txt", *SMALL, *adapter)
    assert "  ligermodels generate runs/tiny/adapter --prompt" in done.stdout
    config = json.loads((launcher.folder / "runs/tiny/adapter/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("someone/tiny", commit)
    continued = launcher.succeed("--adapter", "runs/tiny/adapter", "--data", "own.txt", *SMALL, "--dry-run")
    assert continued.stdout.startswith("runs/tiny/adapter on someone/tiny\n")
    first = next(record for record in records(launcher.folder / "runs/tiny") if "validation_loss" in record)
    last = next(record for record in reversed(records(base[1])) if "validation_loss" in record)
    assert first["step"] == 0 and first["validation_loss"] == pytest.approx(last["validation_loss"], rel=1e-6)


def test_a_run_is_logged_to_tensorboard_on_request(launcher):
    launcher.succeed(*LLAMA, "--log-to", "tensorboard", "--no-export", "--output", "logged")
    folder = launcher.folder / "logged"
    assert {path.name for path in folder.iterdir()} == LEFT - {"model", "curves.png", "checkpoints"} | {"tensorboard"}
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses(folder), rel=1e-6)


def test_an_error_of_all_ranks_is_printed_once(launcher):
    done = launcher.run(*LLAMA, "--batch-size", "3", ranks=2)
    assert done.statuses == [2, 2]
    assert done.stderr == "ligermodels: --batch-size 3 is not a multiple of 2 ranks: change one of them\n"


REFUSED = {
    "an unknown flag": (["--model", "llama", "--batchsize", "4"], "--batchsize: no such flag; did you mean"),
    "an unknown model": (["--model", "qwen3000", "--data", "own.txt"], "qwen3000: "),
    "a mistyped model": (["--model", "Qwen/Qwen3-8", "--data", "own.txt"], "did you mean 'Qwen/Qwen3-8B'?"),
    "float8 on a CPU": ([*LLAMA, "--float8", "--compile"], "float8 needs a GPU of compute capability 8.9"),
    "a plan of it": ([*LLAMA, "--float8", "--compile", "--dry-run"], "float8 needs a GPU of compute capability 8.9"),
    "a folder in use": ([*LLAMA, "--output", "base"], "base: exists already; give another --output"),
    "no data": (["--model", "llama", "--data", "none.jsonl"], "none.jsonl"),
    "bad data, before broken weights": (["--model", "broken", "--data", "bad.jsonl"], "bad.jsonl:2:"),
    "little data": ([*LLAMA, "--sequence-length", "100000"], "less than one row"),
    "copies of too few ranks": ([*LLAMA, "--dp-replicate", "2"], "torchrun --nproc-per-node 2"),
    "broken weights": (["--model", "broken", "--data", "own.txt", *SMALL], "broken/model.safetensors"),
    "a folder that cannot be": ([*LLAMA, "--output", "own.txt/x"], "own.txt/x: not written: Not a directory"),
    "an adapter alone": (
        [*LLAMA, *LORA, "--lora-export", "adapter"],
        "the new weights of llama would be lost",
    ),
    "no run": (["--resume", "nothing"], "nothing/train.toml: is missing: there is no run to resume"),
    "a finished run": (["--resume", "base"], "--resume base: the run is finished, after 4 steps; to lengthen it, give"),
    "an adapter's run": (["--resume", "adapted", "--steps", "9"], "adapted: the run is finished, and has no check"),
    "an adapter as a model": (
        ["--model", "adapted/adapter", "--data", "own.txt"],
        "adapted/adapter: contains an adapter and no model",
    ),
}


@pytest.fixture(scope="module")
def faults(base, launcher):
    _, folder = base
    (launcher.folder / "bad.jsonl").write_text('{"text": "whole"}\n{"text": "cut of\n')
    shutil.copytree(folder / "model", launcher.folder / "broken")
    os.truncate(launcher.folder / "broken/model.safetensors", 4_000_000)
    (launcher.folder / "adapted/adapter").mkdir(parents=True)
    (launcher.folder / "adapted/adapter/adapter_config.json").write_text("{}")
    shutil.copy(folder / "train.toml", launcher.folder / "adapted")
    (launcher.folder / "adapted/metrics.jsonl").write_text('{"step": 4, "exported": "adapter"}\n')


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_run_ends_with_one_line_and_status_2_and_writes_nothing(name, faults, launcher):
    arguments, complaint = REFUSED[name]
    before = contents(launcher.folder)
    done = launcher.run(*arguments)
    assert done.status == 2 and done.stdout == ""
    assert done.stderr.startswith("ligermodels: ") and done.stderr.count("\n") == 1 and complaint in done.stderr
    assert contents(launcher.folder) == before


def contents(folder):
    return sorted(path for path in folder.rglob("*") if not any(part.startswith(".") for part in path.parts))


def test_a_closed_pipe_ends_it_without_a_traceback(monkeypatch, capsys):
    """`train.py --model list | true`: nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as unread:
        monkeypatch.setattr("sys.stdout", unread)
        monkeypatch.setattr("sys.argv", ["train.py", "--model", "list"])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(TRAIN), run_name="__main__")
    assert end.value.code == 141
    assert capsys.readouterr().err == ""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_in_python_gives_back_the_model_the_metrics_and_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.txt").write_text("\n".join(text for text, _ in stories(3, 60)))
    config = TrainConfig(model="llama", data="own.txt", steps=3, batch_size=2, sequence_length=64, eval_every=3)
    assert plan(config).tokens_per_step == 128 and not (tmp_path / "runs").exists()
    result = train(config)
    assert (result.folder, result.exported) == (Path("runs/llama"), Path("runs/llama/model"))
    assert [record["step"] for record in result.metrics if "loss" in record] == [1, 2, 3]
    assert result.metrics[-1] == {"step": 3, "exported": "model"} and result.metrics == records(result.folder)
    assert result.step == 3
    for ours, stored in zip(result.model.parameters(), ligermodels.load(result.exported).parameters(), strict=True):
        assert torch.equal(ours, stored)
    assert capsys.readouterr().out.splitlines()[-1].startswith("3 steps, 384 tokens in ")
