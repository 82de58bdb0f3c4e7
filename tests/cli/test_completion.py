"""`ligermodels completion`: the scripts complete commands, flags and values, as the shell calls them."""

import subprocess
import sys

import pytest

from ligermodels import cli

ASK = """
COMP_WORDS=("${@:2}"); COMP_CWORD=$(( $# - 2 )); source "$1"; _shtab_ligermodels; echo "${COMPREPLY[*]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        with pytest.MonkeyPatch.context() as patch, (folder / shell).open("w") as file:
            patch.setattr(sys, "stdout", file)
            assert cli.main(["completion", shell]) == 0
    return folder


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("tr", "train"),
        ("completion ", "bash zsh fish"),
        ("train --learn", "--learning-rate"),
        ("train --data a.jsonl --learn", "--learning-rate"),  # behind a flag that takes several values
        ("train --optimizer ", "adamw adamw8bit muon"),
        ("train --packing ", "on off"),
        ("generate x --dtype bf", "bfloat16"),
        ("train --data ", ""),  # bash itself completes file names
    ],
)
def test_bash_completes(words, completed, scripts):
    asked = ["bash", "-c", ASK, "bash", scripts / "bash", "ligermodels", *words.split(" ")]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == f"{completed}\n"


def test_every_shell_completes_values_and_files(scripts):
    last = (scripts / "bash").read_text().splitlines()[-1]
    assert last == "complete -o bashdefault -o default -F _shtab_ligermodels ligermodels"
    zsh, fish = ((scripts / shell).read_text() for shell in ("zsh", "fish"))
    assert "]:on|off:(on off)" in zsh and "]:SPEC:_files" in zsh
    assert '-l packing -xka "on off"' in fish and '-l data -xka "(__fish_complete_path' in fish


def test_without_shtab_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "fish"]) == 2
    assert capsys.readouterr().err.startswith("ligermodels: completion: needs shtab, but cannot import it: ")
