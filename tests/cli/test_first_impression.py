"""Commands that load no model answer without waiting for torch, which takes seconds to import."""

import os
import subprocess
import sys

import pytest

import ligermodels
from tests.suites import slow

MOST_SECONDS = 1.5  # of CPU; about 0.15 on an idle core, more where processes share one
# Runs a command, then prints what it imported and the CPU time of the whole process.
SCRIPT = """
import resource, sys
from ligermodels.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as stopped:
    status = stopped.code or 0
used = resource.getrusage(resource.RUSAGE_SELF)
heavy = sorted({"torch", "triton", "numpy", "huggingface_hub"} & set(sys.modules))
print("\\n", status, used.ru_utime + used.ru_stime, *heavy)
"""


def ran(script, *arguments):
    """Standard output and standard error of a script in a process of its own."""
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "answer"),
    [
        ("--help", 0, "train"),
        ("--version", 0, "ligermodels"),
        ("list", 0, "qwen2"),
        ("train --help", 0, "--learning-rate"),
        ("train --model list", 0, "qwen2"),
        ("generate --help", 0, "--temperature"),
        ("trian", 2, "invalid choice: 'trian'"),
        ("train --modle qwen2", 2, "did you mean '--model'?"),
        ("train", 2, "--model is missing"),
        ("train --model qwem2", 2, "did you mean 'qwen2'?"),
        ("train --model qwen2 --steps 3 --epochs 2", 2, "both set the length of the run"),
        ("train --resume missing", 2, "there is no run to resume"),
        ("generate qwem2 --prompt x", 2, "did you mean 'qwen2'?"),
        ("generate x --prompt y --device tpu", 2, "must be cpu, cuda or cuda:NUMBER"),
        ("info qwem2", 2, "did you mean 'qwen2'?"),
        ("export Lama-3.1-8B out", 2, "did you mean 'meta-llama/Llama-3.1-8B'?"),
        ("export x out --max-shard-size 5", 2, "must be a number of bytes above zero"),
        ("verify qwem2", 2, "did you mean 'qwen2'?"),
        ("completion bash", 0, "complete -o bashdefault"),
        ("board --port x", 2, "must be a port"),
    ],
)
def test_a_command_without_a_model_does_not_import_torch(arguments, status, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output, errors = ran(SCRIPT, *arguments.split())
    found, seconds, *heavy = output.splitlines()[-1].split()
    assert answer in (errors if status else output)
    assert (int(found), heavy) == (status, [])
    assert float(seconds) < MOST_SECONDS


def test_importing_the_package_does_not_import_torch():
    packages = "ligermodels, ligermodels.hub, ligermodels.generation, ligermodels.tokenizer, ligermodels.training"
    output, _ = ran(f"import sys, {packages}; print('torch' in sys.modules, len(dir(ligermodels.hub)) > 10)")
    assert output == "False True\n"


@slow
def test_dir_of_the_package_shows_the_public_names_alone():
    output, _ = ran("import ligermodels; ligermodels.create; print(*dir(ligermodels))")
    assert set(output.split()) == {*ligermodels.__all__, "losses", "nn", "ops", "training"}


def test_ranks_of_torchrun_report_an_error_of_usage_once():
    script = "import sys; from ligermodels.cli import main; sys.exit(main(['train']))"
    told = {}
    for rank in ("0", "1"):
        environment = os.environ | {"RANK": rank}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
        told[rank] = (done.returncode, done.stderr.count("--model is missing"))
    assert told == {"0": (2, 1), "1": (2, 0)}


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7", "KMP_BLOCKTIME": "0"}),
        ({"OMP_WAIT_POLICY": "active"}, {}),
    ],
)
def test_threads_wait_without_spinning_unless_the_environment_says_how(given, left):
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    script = "import os; from ligermodels.cli import main; main(['list']); print({n: os.environ.get(n) for n in %r})"
    done = subprocess.run([sys.executable, "-c", script % (names,)], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == str(dict.fromkeys(names) | given | left)
