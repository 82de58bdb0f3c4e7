"""The flags of `ligermodels train`, the settings they make, and the files these are read from and written to."""

import dataclasses
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from ligermodels import cli
from ligermodels.cli import main
from ligermodels.cli import train as command
from ligermodels.cli.console import Console
from ligermodels.errors import InputError
from ligermodels.training import TrainConfig
from ligermodels.training.optimizers import OPTIMIZERS
from ligermodels.training.optimizers.schedules import SCHEDULES
from ligermodels.training.planning.contradictions import refuse_contradictions
from ligermodels.training.reporting.loggers import LOGGERS, check_logger_packages
from ligermodels.training.settings.config import FIELDS, type_of
from ligermodels.training.settings.fields import choices_of
from ligermodels.training.settings.settings import (
    config_from_file,
    differences,
    read_settings,
    settings,
    write_settings,
)

# Flags are a promise: scripts and the train.toml of old runs name them.
FLAGS = {
    "text_field": None, "prompt_field": None, "completion_field": None,
    "model": None, "size": "tiny", "revision": None, "data": None, "validation_data": None,
    "validation_fraction": None, "sequence_length": None, "packing": True, "chat_template": None,
    "image_tokens": None, "allow_bad_lines": 0, "epochs": None,
    "steps": None, "batch_size": None, "micro_batch_size": None, "optimizer": None, "optimizer_state_dtype": None,
    "learning_rate": None, "train_parts": None, "vision_learning_rate": None, "projector_learning_rate": None,
    "schedule": "cosine", "warmup": None, "weight_decay": 0.1, "max_grad_norm": 1.0,
    "dtype": None, "param_dtype": None, "param_rounding": "exact", "float8": False,
    "optimizer_in_backward": None, "low_memory_loss": False, "offload": None,
    "activation_checkpointing": None, "compile": False, "seed": 0,
    "deterministic": False, "lora_rank": None, "lora_alpha": None, "lora_dropout": 0.0,
    "lora_targets": ("all-linear",), "modules_to_save": (), "adapter": None, "quantize": None, "lora_export": None,
    "output": None, "resume": None, "allow_changes": False, "checkpoint_every": None,
    "checkpoint_minutes": 30.0, "keep_checkpoints": 2, "best_checkpoint": False, "early_stopping": None,
    "no_export": False, "push_to_hub": None, "on_nan": "stop", "context_parallel": 1,
    "expert_parallel": 1, "dp_replicate": 1,
    "eval_every": None, "log_every": 1, "log_to": (), "profile": None, "objective": "sft",
    **dict.fromkeys(("pairs", "examples", "max_prompt_length", "loss", "beta", "label_smoothing", "f_divergence")),
    **dict.fromkeys(("ld_alpha", "discopop_tau", "gamma", "alpha", "nll_weight", "desirable_weight")),
    **dict.fromkeys(("undesirable_weight", "reference", "center_rewards", "teacher", "temperature", "prompts")),
    **dict.fromkeys(("reward", "scale_rewards", "epsilon", "epsilon_high", "delta", "importance_sampling_level")),
    **dict.fromkeys(("sampler_correction", "sampler_clip_min", "off_policy_threshold", "entropy_target", "pass_at")),
    "max_length": 1024, "too_long": "drop", "share_prompts": True, "wpo": False, "divergence": "forward_kl",
    "ce_weight": 0.0, "generations": 8, "max_completion_length": None, "stop": (), "reward_timeout": 300.0,
    "reward_aggregation": "sum_then_normalize", "steps_per_generation": 1, "iterations": 1, "kl_correction": True,
    "sampler_clip": 3.0, "top_entropy": 1.0, "entropy_coef": 0.0, "mask_truncated": False, "keep_zero_spread": False,
    "completions_every": 1, "mean_logits": False, "on_policy": 0.0, "sampler": "own", "teacher_states": None,
}  # fmt: skip
OF_THE_COMMAND = ("config", "dry_run", "for_gpu", "json", "quiet")


def parse_arguments(argv):
    config = command.config_from_flags(cli.build_parser().parse_command(["train", *argv]))
    refuse_contradictions(config)
    check_logger_packages(config.log_to)
    return config


def parse(*argv):
    return parse_arguments(["--model", "qwen2", *argv])


def refusal(*argv):
    with pytest.raises(InputError) as error:
        parse_arguments(argv)
    return str(error.value)


def test_the_flags_and_their_defaults_are_frozen():
    assert dataclasses.asdict(TrainConfig()) == FLAGS
    assert dataclasses.asdict(parse()) == FLAGS | {"model": "qwen2"}


def test_the_choices_of_the_settings_are_the_registered_names():
    choices = {name: choices_of(type_of(name)[0]) for name in FIELDS}
    assert choices["optimizer"] == OPTIMIZERS and choices["schedule"] == tuple(SCHEDULES)
    assert set(choices["log_to"]) == set(LOGGERS)


def test_every_flag_is_in_the_help_which_shows_defaults_and_examples(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and "examples: ligermodels train --model qwen2 " in out
    assert all(f" --{name.replace('_', '-')} " in out for name in (*FLAGS, *OF_THE_COMMAND))
    assert "(default: 1.0)" in out and "(default: on)" in out and "(default: all-linear)" in out.replace("- ", "-")
    assert "None" not in out and "False" not in out


def test_model_list_prints_what_ligermodels_list_prints(capsys):
    assert cli.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert cli.main(["train", "--model", "list"]) == 0
    assert capsys.readouterr().out == listed


def test_a_tiny_model_samples_shorter_completions_because_it_has_few_positions():
    configs = [TrainConfig(model="qwen2"), TrainConfig(model="qwen2:7b"), TrainConfig(model="some/model")]
    assert [config.longest_completion for config in configs] == [64, 512, 512]
    assert TrainConfig(model="qwen2", max_completion_length=9).longest_completion == 9


def test_a_family_may_name_its_size_as_info_takes_it():
    args = parse_arguments(["--model", "llama:8b"])
    assert (args.model, args.size) == ("llama", "8b")
    assert parse_arguments(["--model", "C:folder", "--data", "my.jsonl"]).model == "C:folder"


@pytest.mark.parametrize("given", [["q_proj,v_proj"], ["q_proj", "v_proj"], ["q_proj,", "v_proj"]])
def test_lora_targets_and_modules_to_save_are_separated_by_commas_or_spaces(given, tmp_path):
    assert parse("--lora-rank", "8", "--lora-targets", *given).lora_targets == ("q_proj", "v_proj")
    (tmp_path / "my.toml").write_text(f"lora_targets = {given}")
    args = parse("--lora-rank", "8", "--config", str(tmp_path / "my.toml"))
    assert args.lora_targets == ("q_proj", "v_proj")
    assert parse("--lora-rank", "8", "--modules-to-save", *given).modules_to_save == ("q_proj", "v_proj")


def test_a_list_without_a_value_replaces_that_of_a_file(tmp_path):
    (tmp_path / "my.toml").write_text("offload = ['optimizer']")
    assert parse("--config", str(tmp_path / "my.toml")).offload == ("optimizer",)
    assert parse("--config", str(tmp_path / "my.toml"), "--offload").offload == ()
    assert parse("--config", str(tmp_path / "my.toml"), "--offload", "none").offload == ()
    (tmp_path / "my.toml").write_text("offload = []")
    assert parse("--config", str(tmp_path / "my.toml")).offload == ()


def test_the_help_says_which_weights_are_quantised_without_a_flag(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    (described,) = re.findall(r"--quantize .*?\(default: (.*?)\)", " ".join(capsys.readouterr().out.split()))
    assert described == "that of --dtype; NF4 as it is stored"


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], ["--model is missing", "--model list"]),
        (["--learnig-rate", "1"], ["--learnig-rate: no such flag", "did you mean '--learning-rate'"]),
        (["--learnig-rate=1"], ["--learnig-rate: no such flag", "did you mean '--learning-rate'"]),
        (["--xyz", "1"], ["--xyz: no such flag; --help lists them all"]),
        (["extra.jsonl"], ["extra.jsonl: belongs to no flag"]),
        (["--steps", "-3"], ["--steps: is '-3'; must be a whole number above zero"]),
        (["--steps", "1.5"], ["--steps: is '1.5'"]),
        (
            ["--model", "qwen2", "--offload"],
            ["--offload: is given without a value; give none or optimizer or act"],
        ),
        (["--offload", "none", "optimizer"], ["--offload none optimizer: none goes without another"]),
        (["--steps"], ["--steps: expected one argument"]),
        (["--steps", "9" * 5000], ["--steps: is '999", "must be a whole number above zero"]),
        (["--warmup", "x"], ["--warmup: is 'x'; must be a whole number, 0 or more"]),
        (
            ["--sequence-length", "1000000000000"],
            ["--sequence-length: is '1000000000000'; must be a whole number above"],
        ),
        (["--sequence-length", "1"], ["--sequence-length: is '1'; must be a whole number above 1"]),
        (["--learning-rate", "0"], ["--learning-rate: is '0'; must be a number above 0"]),
        (["--reward-timeout", "1e-9"], ["--reward-timeout: is '1e-9'; must be a number of at least 0.001"]),
        (["--learning-rate", "nan"], ["--learning-rate: is 'nan'"]),
        (["--learning-rate", "inf"], ["--learning-rate: is 'inf'; must be a number above 0"]),
        (["--max-grad-norm", "0"], ["--max-grad-norm: is '0'; must be a number above 0, or inf for none"]),
        (["--weight-decay", "inf"], ["--weight-decay: is 'inf'; must be a number, 0 or more"]),
        (["--validation-fraction", "1"], ["must be a number between 0 and 1"]),
        (["--lora-dropout", "1"], ["--lora-dropout: is '1'; must be a number from 0 to below 1"]),
        (["--data", "a", "b", "--data=c"], ["--data is given 2 times; give all its values behind one"]),
        (["--model", "qwen2", "--allow-changes"], ["--allow-changes goes with --resume"]),
        (["--seed", str(2**62)], ["must be a whole number, 0 or more and below 2^62"]),
        (["--packing", "perhaps"], ["--packing: is 'perhaps'; must be on or off"]),
        (["--optimizer", "adamv"], ["one of adamw, adamw8bit, muon; did you mean 'adamw'"]),
        (["--log-to", "tensorbord"], ["--log-to: is 'tensorbord'", "did you mean 'tensorboard'"]),
        (["--model", "qwen2", "--lora-alpha", "8"], ["--lora-alpha goes with --lora-rank"]),
        (["--model", "qwen2", "--modules-to-save", "norm"], ["--modules-to-save goes with --lora-rank"]),
        (["--model", "qwen2", "--adapter", "a"], ["--adapter a: qwen2 is a family with new weights"]),
        (["--model", "qwen2", "--float8"], ["--float8", "add --compile"]),
        (["--checkpoint-minutes", "0"], ["--checkpoint-minutes: is '0'; must be a number above 0"]),
        (
            ["--model", "qwen2", "--checkpoint-minutes", "5", "--checkpoint-every", "0"],
            ["--checkpoint-minutes 5 and --checkpoint-every 0 are two ways to say when: leave one out"],
        ),
        (
            ["--model", "qwen2", "--best-checkpoint", "--checkpoint-every", "0"],
            ["--checkpoint-every 0 keeps no checkpoint that --best-checkpoint could export: leave one out"],
        ),
        (
            ["--model", "qwen2", "--best-checkpoint", "--no-export"],
            ["--no-export leaves nothing for --best-checkpoint: leave one out"],
        ),
        (["--model", "qwen2", "--push-to-hub", "x", "--no-export"], ["--no-export leaves nothing for --push-to-hub"]),
        (
            ["--model", "qwen2", "--prompt-field", "q"],
            ["--prompt-field goes with --completion-field, which"],
        ),
        (
            ["--model", "qwen2", "--completion-field", "a"],
            ["--completion-field goes with --prompt-field, which"],
        ),
        (
            ["--model", "qwen2", "--text-field", "a", "--prompt-field", "b", "--completion-field", "c"],
            ["--text-field and --prompt-field name two formats", "leave one out"],
        ),
        (
            ["--model", "qwen2", "--validation-data", "v.txt", "--validation-fraction", "0.1"],
            ["--validation-fraction is a part of --data", "leave one out"],
        ),
        (["--model", "qwen2", "--validation-fraction", "0.1"], ["random have validation data of their own"]),
        (
            ["--model", "qwen2", "--data", "random", "--chat-template", "chatml"],
            ["--chat-template chatml: --data random has no text"],
        ),
        (
            ["--model", "qwen2", "--data", "stories=0.5", "chats=0.5", "--validation-fraction", "0.1"],
            ["--validation-fraction is a part of files in --data", "leave it out"],
        ),
        (
            ["--model", "qwen2", "--param-rounding", "stochastic", "--param-dtype", "float32"],
            ["--param-rounding stochastic: is for parameters in bfloat16", "add --param-dtype bfloat16"],
        ),
        (
            ["--model", "qwen2", "--param-rounding", "stochastic", "--optimizer", "muon", "--param-dtype", "bfloat16"],
            ["--param-rounding stochastic: --optimizer muon does not have it"],
        ),
        (
            ["--model", "qwen2", "--optimizer-in-backward", "--on-nan", "skip"],
            ["--on-nan skip: --optimizer-in-backward has updated some parameters"],
        ),
        (
            ["--model", "qwen2", "--optimizer", "adamw8bit", "--optimizer-state-dtype", "bfloat16"],
            ["--optimizer-state-dtype bfloat16", "8 bits"],
        ),
        (["--model", "some/model", "--size", "8b"], ["--size 8b goes with a family, which some/model is not"]),
        (["--model", "qwen2", "--revision", "main"], ["--revision main goes with a Hub id"]),
        (["--model", "some/model"], ["--data is missing: a file, a folder or hub:NAME that some/model is trained on"]),
        (
            ["--model", "qwen2", "--steps", "5", "--epochs", "1"],
            ["--epochs 1 and --steps 5 both set the length of the"],
        ),
        (["--model", "qwen2", "--epochs", "0"], ["--epochs: is '0'; must be a number above 0"]),
        (["--model", "qwen2", "--steps", "5", "--profile", "6"], ["--profile 6: the run has 5 steps"]),
        (["--resume", "run", "--config", "x.toml"], ["leave out --config and --output"]),
        (["--resume", "run", "--output", "other"], ["leave out --config and --output"]),
        (["--resume", "no-run"], ["no-run/train.toml: is missing: there is no run to resume; start one with --output"]),
    ],
)
def test_an_invalid_flag_is_refused_with_its_name_value_and_rule(argv, words):
    message = refusal(*argv)
    assert all(word in message for word in words), message


def test_a_missing_logger_package_is_named_with_the_command_that_installs_it(monkeypatch, tmp_path):
    """Also where a folder called like it lies beside the script, which Python takes for a package."""
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        message = refusal("--model", "qwen2", "--log-to", name)
        assert re.fullmatch(rf"--log-to {name}: needs {name}, but cannot import it: .*; pip install {name}", message)
    (tmp_path / "nobody_has_this").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"needs nobody_has_this, .* the folder .*; pip install nobody_has_this"):
        check_logger_packages(["nobody_has_this"])


def test_a_validation_fraction_applies_to_files_mixed_with_built_in_data():
    args = parse("--data", "stories=0.5", "my.jsonl=0.5", "--validation-fraction", "0.1")
    assert args.validation_fraction == 0.1


def test_a_settings_file_holds_any_flag_and_the_command_line_overrides_it(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text(
        '\ufeffmodel = "llama:8b"\nsteps = 50\nlearning_rate = 1\ncompile = true\npacking = false\nno_export = true\n'
        'data = ["a.jsonl=0.5", "b"]\nvalidation_data = "v.txt"\noutput = "runs/x"\n'
    )
    args = parse_arguments(["--config", str(file), "--steps", "7", "--compile", "off", "--data", "c"])
    assert (args.model, args.size, args.steps, args.learning_rate) == ("llama", "8b", 7, 1.0)
    assert (args.compile, args.packing, args.no_export) == (False, False, True)
    assert (args.data, args.validation_data, str(args.output)) == (("c",), ("v.txt",), "runs/x")


@pytest.mark.parametrize(
    "text, words",
    [
        ("stepps = 3", ["stepps: no such flag", "did you mean 'steps'"]),
        ("learning-rate = 3", ["learning-rate: no such flag; here it is learning_rate"]),
        ("model = true", ["model is on or off, but must be text; put it into quotes"]),
        ("steps = -3", ["steps is '-3'; must be a whole number above zero"]),
        ("steps = true", ["steps is 'true'; must be a whole number"]),
        ("steps = [1, 2]", ["steps is a list; must be one value"]),
        ("data = []", ["data is empty"]),
        ("compile = 3", ["compile is '3'; must be on or off"]),
        ("data = {a = 1}", ["data is {'a': 1}; must be text, a number, true or false"]),
        ('config = "b.toml"', ["config: no such flag"]),
        ("steps 3", ["is not TOML", "line 1"]),
        ("steps = 3\nepochs = 1", ["--epochs 1 and --steps 3 both set the length of the run: leave one out"]),
        ('model = "qwne2"', ["qwne2: is neither an architecture, nor a folder", "did you mean 'qwen2'?"]),
    ],
)
def test_an_invalid_settings_file_is_refused_with_the_file_and_the_key(text, words, tmp_path, capsys):
    file = tmp_path / "my.toml"
    file.write_text(text)
    given = [] if "model" in text else ["--model", "qwen2"]
    assert cli.main(["train", *given, "--config", str(file)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"ligermodels: {file}: ") and all(word in message for word in words), message


def test_a_folder_or_a_pipe_in_place_of_a_file_is_refused(tmp_path):
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    for path in (tmp_path, pipe):
        assert refusal("--config", str(path)) == f"{path}: is not a regular file; replace it by one"


def test_settings_of_a_file_that_contradict_each_other_name_the_file(tmp_path, capsys):
    file = tmp_path / "my.toml"
    file.write_text('model = "qwen2"\nsteps = 3\nepochs = 1\n')
    assert main(["train", "--config", str(file)]) == 2
    told = f"ligermodels: {file}: --epochs 1 and --steps 3 both set the length of the run: leave one out\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b'model = "\xff"', "is not TOML: 'utf-8' codec can't decode byte 0xff"),
        (b"learning_rate = 1e400", "learning_rate is 'inf'; must be a number above 0"),
        (b"steps = 1e400", "steps is 'inf'; must be a whole number above zero"),
        (b"steps = " + b"9" * 5000, "is not TOML: "),
        (b"data = " + b"[" * 10_000 + b"]" * 10_000, "is not TOML: maximum recursion depth exceeded"),
        (b"a." * 20_000 + b"b = 1", "has more than 40,000 bytes; settings are a few lines"),
        (b"\0" * 100, "is not TOML: "),
    ],
)
def test_a_damaged_train_toml_is_refused_with_its_name(content, fault, tmp_path):
    (tmp_path / "train.toml").write_bytes(content)
    assert refusal("--resume", str(tmp_path)).startswith(f"{tmp_path}/train.toml: {fault}")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_train_toml_that_is_no_file_is_refused_without_waiting_for_a_pipe(make, tmp_path):
    make(tmp_path / "train.toml")
    assert refusal("--resume", str(tmp_path)) == f"{tmp_path}/train.toml: is not a regular file; replace it by the file"


EVERYTHING = [
    *(
        "--data",
        'a "b".jsonl=0.5',
        "ü\\",
        "--learning-rate",
        "1e-5",
        "--compile",
        "--packing",
        "off",
        "--max-grad-norm",
        "inf",
    ),
    *("--lora-rank", "8", "--lora-targets", "q_proj", "v_proj", "--micro-batch-size", "2", "--param-dtype", "float32"),
]


def test_train_toml_alone_starts_the_same_run_again(tmp_path):
    config = dataclasses.replace(parse(*EVERYTHING, "--output", "runs/x"), allow_changes=True)
    write_settings(config, tmp_path / "train.toml")
    again = parse_arguments(["--config", str(tmp_path / "train.toml")])
    assert (
        again
        == dataclasses.replace(config, output=None, allow_changes=False)
        == config_from_file(tmp_path / "train.toml")
    )
    assert read_settings(tmp_path / "train.toml") == settings(config) == settings(again)
    apart = {"output", "allow_changes"}  # they tell a process what to do; the same run again has a folder of its own
    given = {name for name, value in dataclasses.asdict(config).items() if value is not None}
    assert set(settings(config)) == {n for n in given if "sft" in FIELDS[n].metadata["objectives"]} - apart


def test_a_resumed_run_takes_its_own_settings_and_folder(tmp_path):
    write_settings(parse(*EVERYTHING), tmp_path / "train.toml")
    args = parse_arguments(["--resume", str(tmp_path), "--steps", "9", "--eval-every", "3"])
    assert args.output == args.resume == tmp_path
    assert (args.model, args.learning_rate, args.steps, args.lora_rank) == ("qwen2", 1e-5, 9, 8)
    assert differences(read_settings(tmp_path / "train.toml"), args) == []  # the length is compared with what was done


def test_only_settings_that_change_the_result_are_differences():
    saved = settings(parse("--lora-rank", "8", "--data", "a"))
    args = parse(
        *("--data", "a", "b", "--learning-rate", "0.001", "--packing", "off"),
        *(
            "--micro-batch-size",
            "1",
            "--activation-checkpointing",
            "full",
            "--compile",
            "--dp-replicate",
            "2",
            "--context-parallel",
            "2",
            "--log-to",
            "tensorboard",
        ),
        *("--checkpoint-every", "5", "--eval-every", "5", "--on-nan", "skip", "--no-export", "--profile", "3"),
        *("--early-stopping", "2"),
    )
    assert sorted(differences(saved, args)) == [
        "data: a b, was a",
        "learning_rate: 0.001, was not set",
        "lora_rank: not set, was 8",
        "packing: off, was on",
    ]
    assert differences(settings(args), args) == []


def test_train_toml_holds_every_character_that_utf_8_has_and_refuses_others(tmp_path):
    names = ("".join(map(chr, [*range(1, 0x2100), 0xFFFF, 0x10FFFF])), "b")
    config = dataclasses.replace(parse(), data=names)
    write_settings(config, tmp_path / "train.toml")
    assert config_from_file(tmp_path / "train.toml").data == names
    with pytest.raises(InputError, match=r"^'data = \[\"\\udcff\"\]': is a name that is not UTF-8; rename the file"):
        write_settings(dataclasses.replace(config, data=("\udcff",)), tmp_path / "other.toml")
    assert not (tmp_path / "other.toml").exists()


def test_train_toml_says_how_to_use_it(tmp_path):
    write_settings(parse(), tmp_path / "train.toml")
    first, *rest = (tmp_path / "train.toml").read_text().splitlines()
    assert first.startswith("# ") and "--config train.toml" in first
    assert all(re.fullmatch(r"\w+ = .+", line) for line in rest)


def test_every_example_of_the_help_is_valid():
    found = re.findall(
        r"(?:ligermodels train|train\.py) (--[^`\n]*?)(?: {3,}|`|$)",
        command.EXAMPLES.replace("\\\n", " "),
        re.MULTILINE,
    )
    assert len(found) == 5
    for flags in found:
        args = cli.build_parser().parse_command(["train", *shlex.split(flags)])
        if "resume" not in args:
            refuse_contradictions(command.config_from_flags(args))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": 0}, "steps is 0; must be a whole number above zero"),
        ({"steps": 1.5}, "steps is 1.5; must be a whole number above zero"),
        ({"steps": True}, "steps is True; must be a whole number above zero"),
        ({"learning_rate": "1e-3"}, "learning_rate is '1e-3'; must be a number above 0"),
        ({"optimizer": "adamv"}, "optimizer is 'adamv'; must be one of adamw, adamw8bit, muon; did you mean 'adamw'"),
        ({"data": []}, "data is []; must be a list of at least one value"),
        ({"data": 3}, "data is 3; must be a list"),
        ({"packing": 1}, "packing is 1; must be on or off"),
        ({"log_to": ["tensorbord"]}, "log_to is 'tensorbord'; must be one of tensorboard, wandb"),
        ({"seed": None}, "seed is None; must be a whole number, 0 or more and below 2^62"),
    ],
)
def test_a_value_that_a_setting_cannot_have_is_refused_in_python_too(values, words):
    with pytest.raises(InputError) as error:
        TrainConfig(model="qwen2", **values)
    assert words in str(error.value)


def test_settings_in_python_take_lists_paths_and_whole_numbers(tmp_path):
    config = TrainConfig(model="llama:8b", data="a.txt", output=str(tmp_path), learning_rate=1, lora_targets=["a,b"])
    assert (config.model, config.size, config.title) == ("llama", "8b", "llama:8b")
    assert (config.data, config.output, config.learning_rate) == (("a.txt",), tmp_path, 1.0)
    assert config.lora_targets == ("a", "b")
    assert TrainConfig(resume=tmp_path).output == tmp_path
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3


class FakeResult:
    """What a run returns, as far as the command reads it."""

    folder = Path("runs/x")
    exported = Path("runs/x/model")
    step = 2
    signal = 0
    summary = "2 steps, 8 tokens in 0:01"


@pytest.mark.parametrize("flags", [[], ["--quiet"], ["--json"], ["--json", "--quiet"]], ids=" ".join)
def test_json_and_quiet_say_what_a_run_prints_and_where(flags, capsys, monkeypatch):
    def train(config, loggers):
        print("step 1/2, loss 2.500")
        print("warning: it is a tiny run")
        loggers[0].write({"step": 1, "loss": 2.5})
        loggers[0].close()
        assert config.log_every == (0 if "--quiet" in flags else 1)
        return FakeResult()

    monkeypatch.setattr("ligermodels.training.train", train)
    assert cli.main(["train", "--model", "qwen2", *flags]) == 0
    lines, warning = "step 1/2, loss 2.500\nwarning: it is a tiny run\n", "warning: it is a tiny run\n"
    summary = "runs/x/model: 2 steps, 8 tokens in 0:01\n"
    made = {"folder": "runs/x", "exported": "runs/x/model", "step": 2, "signal": 0}
    written = [{"step": 1, "loss": 2.5}, made | {"summary": FakeResult.summary}]
    out, err = capsys.readouterr()
    if "--json" in flags:
        assert [json.loads(line) for line in out.splitlines()] == written
        assert err == (warning if "--quiet" in flags else lines)
    else:
        assert (out, err) == ((summary, warning) if flags else (lines, ""))


def test_a_run_goes_on_when_the_reader_of_its_records_has_left(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        console = Console(stream, quiet=True)
        for step in (1, 2):
            console.record({"step": step})


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ({"lr": 1e-4}, "lr: no such field; here it is learning_rate, with the value 0.0001"),
        ({"report_to": ["wandb"]}, "report_to: no such field; here it is log_to, with the value wandb"),
        ({"lerning_rate": 1}, "lerning_rate: no such field; did you mean 'learning_rate'?"),
    ],
)
def test_a_field_that_does_not_exist_is_refused_with_what_it_is_called_here(field, hint):
    with pytest.raises(InputError) as error:
        TrainConfig(model="qwen2", **field)
    assert str(error.value).startswith(f"TrainConfig: {hint}")


@pytest.mark.parametrize(("model", "size"), [("llama", "8b"), ("llama:70b", "70b"), ("qwen3", "8b")])
def test_the_size_in_a_file_holds_unless_the_name_brings_another(model, size, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('model = "llama"\nsize = "8b"\ndata = ["random"]\n')
    config = config_from_file(file, model=model)
    assert (config.model, config.size) == (model.partition(":")[0], size)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("qwen2", "qwen2: size '8b' is not a preset"),
        ("a/b", "run.toml: --size 8b goes with a family, which a/b is not"),
    ],
)
def test_a_size_in_a_file_that_does_not_fit_the_model_is_refused(model, message, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('model = "llama"\nsize = "8b"\ndata = ["random"]\n')
    assert main(["train", "--config", str(file), "--model", model, "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_the_size_of_a_model_is_in_its_name_or_beside_it():
    assert TrainConfig(model="llama:8b") == TrainConfig(model="llama", size="8b")
    with pytest.raises(InputError, match="size is '1b', but model is 'llama:8b'; leave one size out"):
        TrainConfig(model="llama:8b", size="1b")
