"""The documentation is true: its snippets run, its flags and files exist, and it is complete.

The ```python blocks of a page run one after the other in a process of their own, as a reader would run them. A block
that cannot run here has an HTML comment with the reason in the line above it: <!-- not run: needs the Hub -->. The
commands of docs/recipes.md run in test_recipes.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ligermodels
from ligermodels.cli import build_parser
from ligermodels.cli.train import config_from_flags
from ligermodels.training.settings.config import FIELDS
from tests.pages import ROOT, blocks, commands, ligermodels_arguments, prose, python_blocks

README, TRAINING, PYTHON_API = ROOT / "README.md", ROOT / "docs/training.md", ROOT / "docs/python-api.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README_LINES, README_WORDS = 180, 1200
WORDS = {
    "ARCHITECTURE.md": 2450,
    "docs/performance.md": 2400,
    "docs/training.md": 4000,
    "docs/clusters.md": 300,
    "docs/hardware.md": 350,
}

LANGUAGES = {"sh", "python", "text"}
LINK = re.compile(r"\]\(([^)\s]+)\)")
INLINE_FLAG = re.compile(r"`(--[a-z0-9-]+)")
OTHER_FLAGS = {"--clock-control", "--cache-control", "--provider", "--gpus", "--generate", "--dist", "--help"}
OTHER_FLAGS |= {"--max-lora-rank", "--supervised"}
OTHER_PROGRAMS = {"pip", "pytest", "ruff", "mypy", "lm_eval", "vllm", "llama-cli", "llama-quantize", "ollama"}
OTHER_PROGRAMS |= {"export", "echo", "grep", "rsync", "curl", "hf"}
OTHER_SCRIPTS = {"llama.cpp/convert_hf_to_gguf.py"}
# Settings of mypy for snippets: other libraries, which are three quarters of what it would read, are not checked.
OURS_ALONE = "[mypy]\nfollow_imports = skip\n[mypy-ligermodels.*]\nfollow_imports = silent\n"


def known_flags() -> set[str]:
    root = build_parser()
    (choices,) = (action.choices for action in root._actions if action.choices)
    return {flag for command in choices.values() for action in command._actions for flag in action.option_strings}


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def as_script(page: Path) -> str:
    """The code that runs, each line at the number that it has in the page."""
    lines = [""] * (page.read_text(encoding="utf-8").count("\n") + 1)
    for block in python_blocks(page):
        if block.reason is None:
            code = block.code.splitlines()
            lines[block.line : block.line + len(code)] = code
    return "\n".join(lines)


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


RUNNABLE = [page for page in PAGES if any(block.reason is None for block in python_blocks(page))]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Shared by the pages: the tokenised stories take seconds to make."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("page", RUNNABLE, ids=names)
def test_the_python_snippets_of_a_page_run_one_after_the_other_on_a_cpu(page, script_server, cache, tmp_path):
    script = tmp_path / "snippets.py"  # its folder is searched first for modules: no other's name
    script.write_text(as_script(page), encoding="utf-8")
    status, output = script_server.run(script, folder=tmp_path, HOME=str(tmp_path), XDG_CACHE_HOME=str(cache))
    assert status == 0, output


@pytest.mark.slow
def test_the_python_snippets_of_the_readme_pass_mypy(tmp_path):
    script = tmp_path / "snippets.py"
    more = 'TrainConfig(model="qwen2", data="x.jsonl", log_to="wandb", offload=["optimizer"], resume=result.folder)\n'
    script.write_text("\n".join(block.code for block in python_blocks(README)) + f"\n{more}", encoding="utf-8")
    (tmp_path / "mypy.ini").write_text(OURS_ALONE)
    flags = ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "mypy", *flags, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"MYPYPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_every_block_has_a_language_and_every_python_block_compiles(page):
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"^```", text, re.M)) == 2 * len(blocks(page))
    assert {block.language for block in blocks(page)} <= LANGUAGES
    for block in python_blocks(page):
        compile(block.code, str(page), "exec")
    assert all(block.language in ("python", "sh") for block in blocks(page) if block.reason)


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_the_commands_of_a_page_are_ones_that_the_command_line_takes(page):
    for words in commands(page):
        arguments = ligermodels_arguments(words)
        if arguments is not None:
            args = build_parser().parse_args(arguments)
            if arguments[0] == "train" and not (hasattr(args, "resume") or args.config):
                config_from_flags(args)
        elif words[:2] == ["python", "-m"]:
            module = ROOT.joinpath(*words[2].split("."))
            assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), words
        elif words[0] == "python":
            assert (ROOT / words[1]).exists() or words[1] in OTHER_SCRIPTS, words
        else:
            assert words[0] in OTHER_PROGRAMS, words


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=names)
def test_the_flags_that_the_text_of_a_page_names_exist(page):
    assert set(INLINE_FLAG.findall(prose(page))) <= known_flags() | OTHER_FLAGS


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_to_files_and_headings_of_the_repository(page):
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=names)
def test_readme_leads_to_every_page(page):
    assert f"]({names(page)})" in README.read_text(encoding="utf-8")


def test_the_tree_in_architecture_names_files_that_exist():
    tree = blocks(ROOT / "ARCHITECTURE.md")[0].code
    files = [ROOT / "train.py", *ROOT.glob("ligermodels/**/*.py"), *ROOT.glob("tests/**/*.py")]
    assert set(re.findall(r"\w+\.py", tree)) <= {file.name for file in files}


def test_readme_is_short():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= README_LINES
    assert len(text.split()) <= README_WORDS


@pytest.mark.parametrize("page", WORDS)
def test_a_page_is_short(page):
    assert len((ROOT / page).read_text(encoding="utf-8").split()) <= WORDS[page]


def test_the_changelog_has_a_line_a_change():
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert 0 < sum(line.startswith("- ") for line in lines) <= 60


def test_readme_has_the_commands_that_continuous_integration_runs():
    run = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("pip install")]
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(run) == 2 and set(run) <= set(lines)


def test_the_training_page_has_every_flag_of_train_with_its_default():
    """Those of fine-tuning; the pages of the other objectives name theirs."""
    pages = [TRAINING.with_name(f"{name}.md") for name in ("preferences", "distillation", "reinforcement-learning")]
    others = "".join(page.read_text(encoding="utf-8") for page in pages)
    rows = dict(re.findall(r"^\| `(--[a-z0-9-]+)` \| (.*?) \|", TRAINING.read_text(encoding="utf-8"), re.M))
    fields = {f"--{name.replace('_', '-')}": field for name, field in FIELDS.items()}
    flags = {flag: field.default for flag, field in fields.items() if "sft" in field.metadata["objectives"]}
    ours = {"--config", "--dry-run", "--for-gpu", "--json", "--quiet"}
    assert set(rows) == {*flags, *ours} - ({"--objective"} - set(rows))
    assert [flag for flag in fields if flag not in flags and flag not in others] == []
    flags = {flag: default for flag, default in flags.items() if flag in rows}
    for flag, default in flags.items():
        if isinstance(default, int | float | str) and not isinstance(default, bool):
            stated = rows[flag].strip("`").split(":")[0]
            assert type(default)(stated) == default, flag


@pytest.mark.parametrize("name", ligermodels.__all__)
def test_the_python_page_has_every_public_name(name):
    assert re.search(rf"`(ligermodels\.)?{name}`", PYTHON_API.read_text(encoding="utf-8"))
