"""What the flags of other tools are called here: the hints of errors, and that the table fits our flags."""

import itertools

import pytest

from ligermodels import cli
from ligermodels.aliases import GENERATE_ALIASES, TRAIN_ALIASES
from ligermodels.errors import InputError
from ligermodels.training.settings.settings import config_from_file

COMMANDS = {"train": TRAIN_ALIASES, "generate": GENERATE_ALIASES}


def flags_of(command):
    parser = cli.build_parser([command]).parse_command([command, *(["m"] if command == "generate" else [])]).parser
    options = [option for action in parser._actions for option in action.option_strings]
    return {option.removeprefix("--").replace("-", "_") for option in options if option.startswith("--")}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_the_table_exists_and_no_alias_is_one(command):
    flags = flags_of(command)
    assert {alias.flag for alias in COMMANDS[command] if alias.flag} <= flags
    names = list(itertools.chain.from_iterable(alias.names.split() for alias in COMMANDS[command]))
    assert len(names) == len(set(names)) and not {*names} & flags
    assert all(name == name.lower() and "-" not in name for name in names)
    assert all(alias.flag or alias.note for alias in COMMANDS[command])


def error_of(arguments):
    with pytest.raises(InputError) as error:
        cli.build_parser(arguments[:1]).parse_command(arguments)
    return str(error.value)


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ("--lr 1e-4", "--learning-rate 1e-4"),
        ("--learning_rate=1e-4", "--learning-rate"),
        ("--bf16 --steps 5", "--dtype bfloat16"),
        ("--bf16 False", "--dtype float32"),
        ("--fp16", "--dtype bfloat16; training in float16 is not supported"),
        ("--torch-dtype bf16", "--dtype bfloat16; one of float32, tf32, bfloat16"),
        ("--optim paged_adamw_8bit", "--optimizer adamw8bit; one of adamw, adamw8bit, muon"),
        ("--optim adafactor", "--optimizer; one of adamw, adamw8bit, muon"),
        ("--lr-scheduler-type linear", "--schedule linear; one of cosine, linear, wsd"),
        ("--cutoff_len 4096", "--sequence-length 4096"),
        ("--save-steps 500", "--checkpoint-every 500"),
        ("--save_total_limit 3", "--keep-checkpoints 3"),
        ("--gradient-checkpointing", "--activation-checkpointing auto"),
        ("--gradient-checkpointing false", "--activation-checkpointing none"),
        ("--report-to wandb tensorboard --steps 5", "--log-to wandb tensorboard; leave it out for none"),
        ("--report_to none", "--log-to; leave it out for none"),
        ("--warmup-ratio 0.03", "--warmup; it is a number of steps: the ratio x --steps"),
        ("--dataset_name trl-lib/Capybara", "--data hub:trl-lib/Capybara"),
        ("--dataset chats.jsonl", "--data chats.jsonl"),
        ("--dataset /data/chats", "--data /data/chats"),
        ("--train_file a.json b.json", "--data a.json b.json"),
        ("--val_set_size 0.1", "--validation-fraction 0.1"),
        ("--val_set_size 100", "--validation-fraction"),
        ("--base_model Qwen/Qwen3-8B", "--model Qwen/Qwen3-8B"),
        ("--lora_target_modules q_proj v_proj", "--lora-targets q_proj v_proj"),
        ("--lora_target all", "--lora-targets all-linear"),
        ("--run-name first", "--output runs/first; loggers name a run by its folder"),
        ("--sample_packing true", "--packing on"),
        ("--rl grpo", "--objective grpo"),
        ("--rl simpo", "--objective simpo"),
        ("--per_device_train_batch_size 2", "--micro-batch-size 2; --batch-size is the global batch: "),
        ("--max_new_tokens 64 --objective distill", "--max-completion-length 64"),
        ("--use_adaptive_entropy", "--entropy-target; the entropy that --entropy-coef is adapted to hold"),
        ("--generation_batch_size 64", "--prompts; a step samples --prompts x --generations completions"),
        ("--gradient-accumulation-steps 8", "--micro-batch-size; accumulation steps are --batch-size / GPUs / "),
    ],
)
def test_the_error_says_what_a_flag_of_another_tool_is_called_here(flags, hint):
    name = flags.split()[0].partition("=")[0]
    begin = f"{name}: no such flag; here it is {hint}"
    message = error_of(["train", "--model", "m", *flags.split()])
    assert message.startswith(begin) if hint.endswith(" ") else message == begin


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--load-in-8bit", "--quantize nf4 with --lora-rank takes less memory"),
        ("--deepspeed", "torchrun --nproc-per-node"),
        ("--nproc", "torchrun --nproc-per-node"),
        ("--use_liger_kernel", "always fused; leave it out"),
        ("--attn_implementation", "attention without a mask"),
        ("--assistant-only-loss", "only the answers are trained on"),
        ("--logging-strategy", "every step is a line of metrics.jsonl"),
    ],
)
def test_the_error_says_what_to_do_where_there_is_no_such_flag(flag, words):
    message = error_of(["train", flag])
    assert message.startswith(f"{flag}: no such flag; ") and words in message


def test_flags_of_other_generators_are_known_too():
    assert error_of(["generate", "m", "--max-tokens", "5"]).endswith("here it is --max-new-tokens 5")
    assert error_of(["generate", "--temp=0.5", "m"]).endswith("here it is --temperature 0.5")
    assert error_of(["generate", "--top_p", "0.5", "m"]).endswith("here it is --top-p")
    assert error_of(["generate", "m", "--num-beams", "4"]).endswith("samples with --temperature, --top-k and --top-p")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("base_model: a/b", "base_model: no such flag; here it is model, with the value a/b"),
        ("bf16: auto", "bf16: no such flag; here it is dtype, with the value bfloat16"),
        ("gradient_checkpointing: false", "here it is activation_checkpointing, with the value none"),
        ("datasets: [{path: a/b, type: alpaca}]", "datasets: no such flag; here it is data"),
        ("load_in_4bit: true", "load_in_4bit: no such flag; here it is quantize, with the value nf4; goes with"),
        ("wandb_project:", "wandb_project: no such flag; here it is log_to, with the value wandb; its settings are"),
        ("config: other.yml", "config: no such flag; "),
    ],
)
def test_keys_of_a_settings_file_get_the_same_hints(line, message, tmp_path):
    file = tmp_path / "axolotl.yml"
    file.write_text(line)
    with pytest.raises(InputError) as error:
        config_from_file(file)
    assert str(error.value).startswith(f"{file}: ") and message in str(error.value)
