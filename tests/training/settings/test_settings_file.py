"""Settings in YAML: the same as in TOML, and what a hostile or mistaken file gets."""

import pytest

from ligermodels.errors import InputError
from ligermodels.training import TrainConfig
from ligermodels.training.settings.settings import config_from_file, read_settings

YAML = """\
# the settings of a run
model: llama:8b
data:
  - a.jsonl=0.5
  - b
learning_rate: 1e-4
steps: 50
packing: off
compile: True
revision: 010
size:
optimizer: "adamw"
"""


def test_yaml_holds_the_same_settings_as_toml(tmp_path):
    for name in ("my.yaml", "my.YML"):
        (tmp_path / name).write_text(f"\ufeff{YAML}")
        config = config_from_file(tmp_path / name, steps=7)
        assert (config.model, config.size, config.data) == ("llama", "8b", ("a.jsonl=0.5", "b"))
        assert (config.learning_rate, config.steps, config.optimizer) == (1e-4, 7, "adamw")
        assert (config.packing, config.compile, config.revision) == (False, True, "010")  # YAML takes 010 for 8
    (tmp_path / "empty.yml").write_text("# nothing")
    assert read_settings(tmp_path / "empty.yml") == {}


NESTED = [f"{n}: &{n} [*{p}, *{p}]" for p, n in zip("abcdefghij", "bcdefghijk", strict=True)]
BOMB = "\n".join(["a: &a [x, x]", *NESTED])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("model: m\nsteps: 5\nmodel: n", "line 3: is not YAML for settings: 'model' is given twice"),
        (BOMB, "line 2: is not YAML for settings: references (*name) are not supported; write the value"),
        ("model: m\n  steps: 5", "line 2: is not YAML for settings: mapping values are not allowed here"),
        ("model: [m", "line 1: is not YAML for settings: expected ',' or ']', but got '<stream end>'"),
        ("model: !!python/object/apply:os.system [ls]", "line 1: is not YAML for settings: could not determine a con"),
        ("model: m\n---\nmodel: n", "line 2: is not YAML for settings: but found another document"),
        ("? [a, b]\n: 3", "line 1: is not YAML for settings: a key is not a text"),
        ("seed: !!timestamp x", "line 1: is not YAML for settings: 'timestamp' is a tag that does not fit its value"),
        ('seed: !!int ""', "line 1: is not YAML for settings: 'int' is a tag that does not fit its value"),
        ("seed: !!bool x", "line 1: is not YAML for settings: 'bool' is a tag that does not fit its value"),
        ("data: !!map [a]", "line 1: is not YAML for settings: expected a mapping node, but found sequence"),
        ("- model", "is not YAML: it has no `key: value` lines"),
        ("model: \0", "is not YAML: unacceptable character #x0000"),
        ("data: " + "{a: " * 5_000, "is not YAML: maximum recursion depth exceeded"),
        ("x: " + "y" * 40_000, "has more than 40,000 bytes; settings are a few lines"),
        ("steps: 1:30", "steps is '1:30'; must be a whole number above zero"),
        ("steps: 1_000", "steps is '1_000'; must be a whole number above zero"),
        ("model: on", "model is on or off, but must be text; put it into quotes"),
        ("model: {a: 1}", "model is {'a': '1'}; must be text, a number, true or false"),
        ("stepps: 3", "stepps: no such flag; did you mean 'steps'?"),
    ],
)
def test_an_invalid_file_is_refused_with_its_name_and_the_line(text, fault, tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        config_from_file(file)
    assert str(error.value).startswith(f"{file}: {fault}")


@pytest.mark.parametrize(("name", "exponent", "bits"), [("steps", 5000, "16,610"), ("learning_rate", 400, "1,329")])
def test_a_number_that_python_does_not_print_is_refused(name, exponent, bits):
    with pytest.raises(InputError, match=f"^{name} is a number of {bits} bits; must have at most 64$"):
        TrainConfig(model="qwen2", **{name: 10**exponent})
