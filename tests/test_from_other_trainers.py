"""docs/from-other-trainers.md is complete: every flag of ours, and every option of the installed TRL, is on the page.

The options are read from TRL's and transformers' source files, which takes no import. Those of axolotl and Unsloth,
which are not installed, were compared by hand with the versions that the page names.
"""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from ligermodels.training.settings.config import FIELDS
from tests.pages import ROOT

TEXT = (ROOT / "docs/from-other-trainers.md").read_text(encoding="utf-8")
TABLES = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", TEXT, re.M)]
CODE = " ".join(re.findall(r"`([^`]+)`", TEXT))
OF_THE_COMMAND = {"--config", "--dry-run", "--adapter", "--dtype", "--max-shard-size", "--chat"}
OPTIONS = {
    ("trl", "trainer/sft_config.py"): "SFTConfig",
    ("trl", "trainer/model_config.py"): "ModelConfig",
    ("trl", "scripts/utils.py"): "ScriptArguments",
    ("transformers", "training_args.py"): "TrainingArguments",
}


def flags():
    return {f"--{name.replace('_', '-')}" for name in FIELDS}


def fields_of(package, file, name):
    """The annotated names in the body of a class: the fields of a dataclass."""
    (folder,) = importlib.util.find_spec(package).submodule_search_locations
    tree = ast.parse(Path(folder, file).read_text(encoding="utf-8"))
    (definition,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return [node.target.id for node in definition.body if isinstance(node, ast.AnnAssign)]


def test_the_first_column_has_every_flag_and_no_other():
    first_cells = [line.split("|")[1] for table in TABLES for line in table]
    named = {flag for cell in first_cells for flag in re.findall(r"--[a-z]+[a-z0-9-]*", cell)}
    assert flags() <= named
    assert named <= flags() | OF_THE_COMMAND


@pytest.mark.parametrize(("place", "name"), OPTIONS.items(), ids=OPTIONS.values())
def test_every_option_of_the_installed_trl_is_on_the_page(place, name):
    options = fields_of(*place, name)
    assert len(options) > 4
    words = set(re.findall(r"\w+", CODE))
    assert [option for option in options if option not in words and not option.startswith("_")] == []


def test_every_row_of_a_table_has_as_many_cells_as_its_head():
    for head, *rows in TABLES:
        assert {row.count("|") for row in rows} == {head.count("|")}, head
