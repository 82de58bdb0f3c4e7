"""The settings of a run from flags, with the defaults of a tiny model for those that are not given."""

from ligermodels.training.planning.defaults import TINY, TINY_STEPS, TINY_WARMUP, Choice, completed, with_choices
from ligermodels.training.settings.config import RunConfig
from tests.cli.test_train import parse_arguments


def run_config(*argv: str) -> RunConfig:
    values = {**TINY, "steps": TINY_STEPS, "warmup": TINY_WARMUP, "learning_rate": 4.5e-3, "param_dtype": "float32"}
    values |= {"optimizer": "adamw", "optimizer_in_backward": False, "offload": ()}
    config, _ = with_choices(
        parse_arguments(["--data", "my.jsonl", *argv]), {name: Choice(value) for name, value in values.items()}
    )
    return completed(config)
