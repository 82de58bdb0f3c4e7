"""Without a GPU, Triton kernels are built for the interpreter: this must run before anything imports triton."""

import fcntl
import functools
import gc
import json
import os
import re
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # test tensors are too small for threads, and test processes share the cores

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from torch._dynamo import config as dynamo_config
from torch._dynamo import guards
from xdist.plugin import pytest_xdist_auto_num_workers as usual_num_workers

from ligermodels.kernels import launch
from ligermodels.kernels.losses import rescale
from ligermodels.kernels.moe import grouped_gemm
from tests import interpreter
from tests.forking import ScriptServer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TENS_OF_GIB = pytest.mark.usefixtures("turn")


def pytest_configure(config):
    """A file that is named runs with its slow tests, unless -m says otherwise."""
    named = not hasattr(config, "workerinput") and config.args_source == config.ArgsSource.ARGS
    if named and not any(argument.startswith("-m") for argument in config.invocation_params.args):
        config.option.markexpr = ""
    launch.interpreting = False  # CPU tensors take the reference, as for users; the fixture `kernels` turns kernels on
    if DEVICE == "cpu":
        gc.set_threshold(10_000, 10, 20)  # on a GPU what waits in cycles of references could be GiB
        shorten_compilation()
        interpreter.speed_up_interpreter()
        # The GPU's span would take 32 steps for every row, however short.
        rescale.IN_PLACE_TILE = rescale.SpanTile(block=512, span=2048, warps=8)
        # A step takes the interpreter as long however large its blocks are.
        tiles = grouped_gemm.GEMM_TILES
        tiles[4] = tiles[4]._replace(block_n=128, block_k=64)


def shorten_compilation():
    """Without what takes torch 60 ms a graph, to no effect here: it collects garbage, and measures its guards."""
    dynamo_config.run_gc_after_compile = False
    guards.profile_guard_manager = lambda *_: 0.0  # microseconds, which it logs


# Files whose tests start processes, compile, train, or try what other tests notice. Single tests are marked `slow`, and
# those that start runs are: their server imports all of training, which takes each worker ten seconds.
SLOW = (
    *("board/test_browser", "board/test_form", "board/test_processes", "images/test_sabotage"),
    *("adapters/test_adapters", "test_bench", "test_bench_real_models", "test_bench_train_curve", "test_docs"),
    *("test_recipes", "test_sabotage", "test_verify", "tokenizer/test_template_process", "vision/test_sabotage"),
    *("gguf/test_families", "gguf/test_training", "kernels/test_compiled_kernels", "kernels/test_row_sharding"),
    *("real/test_conversion", "real/test_generation", "real/test_logits", "real/test_quantised"),
    *("real/test_tokenizers", "real/test_training"),
    *("integrations/test_transformers", "interop/test_accelerate", "interop/test_distributed_tools"),
    *("interop/test_exports", "interop/test_generation", "interop/test_lightning", "interop/test_torch_tools"),
    *("interop/test_trainer", "interop/test_trl", "interop/test_trl_steps", "test_examples", "test_notebooks"),
    *("layers/checkpointing/test_activation_checkpointing", "layers/test_compile", "losses/test_sabotage"),
    *("training/test_against_transformers", "training/test_proof"),
    *("training/objectives/grpo/test_grpo_steps", "training/objectives/test_ranks", "training/objectives/test_runs"),
    *("stress/test_stress", "training/test_train", "training/test_train_stopped", "training/checkpoints/test_killing"),
    *("training/reporting/test_curves", "training/parallel/test_compilation", "training/parallel/test_fsdp"),
    "training/parallel/test_lost_ranks",
)
QUICK = "not slow"  # what pyproject.toml selects
SLOW_WORDS = re.compile(r"slow|launcher|\bquick\(" + ("|DTYPES" if DEVICE == "cuda" else ""))
ROOT = Path(__file__).parent


def pytest_xdist_auto_num_workers(config):
    """Of slow tests one more than the usual number: one that waits for its processes leaves a core idle."""
    return usual_num_workers(config) + (config.option.markexpr != QUICK)


def is_slow(path):
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).with_suffix("").as_posix() in SLOW


@functools.cache
def may_have_slow_tests(path):
    """Whether a file is slow or has the words by which single tests are."""
    return is_slow(path) or SLOW_WORDS.search(path.read_text(encoding="utf-8")) is not None


def pytest_ignore_collect(collection_path, config):
    """The quick suite does not import slow files, whose libraries take each worker half a minute, nor do the slow tests
    import the other files, which are three of four."""
    unwanted = config.option.markexpr == QUICK and is_slow(collection_path)
    if config.option.markexpr == "slow" and collection_path.match("test_*.py"):
        unwanted = not may_have_slow_tests(collection_path)
    return unwanted or None


def pytest_collection_modifyitems(items):
    for item in items:
        if is_slow(item.path) or "launch_server" in item.fixturenames:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") and not may_have_slow_tests(item.path):
            raise pytest.UsageError(f"{item.nodeid} is slow, but `-m slow` would not find it: name `slow` in its file")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Imports make no garbage to look for."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def short_garbage_collections():
    """What is there before a file's tests stays; the garbage collections that they cause pass over it.

    Trainer and TRL ask for several in every run, which took most of the time of their tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def turn():
    """Tests that need tens of GiB take turns, in whichever process they run."""
    with (Path(tempfile.gettempdir()) / f"ligermodels-tests-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True)
def free_gpu_memory(request):
    """Processes share the GPU: one that is done with a test leaves the others what the test took."""
    if "turn" in request.fixturenames:
        request.getfixturevalue("turn")  # set up first, so that it ends last
    yield
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def seeded():
    if DEVICE == "cuda":
        torch.manual_seed(0)
    else:  # which would note the stack of its caller for each kind of device that is not there: 2 ms a test
        torch.default_generator.manual_seed(0)


@pytest.fixture
def kernels(monkeypatch):
    """Runs the Triton kernels: compiled on a GPU, under the interpreter on a CPU."""
    monkeypatch.setattr(launch, "interpreting", DEVICE == "cpu")


@pytest.fixture
def poisoned():
    """Fills every torch.empty with NaN, so that a test notices an element that no kernel wrote."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def script_server():
    """Runs scripts as their readers would."""
    with ScriptServer() as started:
        yield started


@pytest.fixture(scope="session")
def launch_server(tmp_path_factory):
    """Has imported all that a run imports, once for all tests of a process."""
    from tests.training.launching import Launcher  # most files need neither it nor the stories, nor all of training

    with Launcher(tmp_path_factory.mktemp("launcher")) as started:
        yield started


@pytest.fixture(scope="module")
def launcher(launch_server, tmp_path_factory):
    """Starts runs of train.py, or of a module, in a folder of the file's own, with stories and conversations in it."""
    from ligermodels.training.data.embedded_stories import conversations, stories

    folder = tmp_path_factory.mktemp("runs")
    (folder / "own.txt").write_text("\n".join(text for text, _ in stories(3, 100)))
    (folder / "more").mkdir()
    with (folder / "more/chats.jsonl").open("w") as file:
        file.writelines(json.dumps({"messages": messages}) + "\n" for messages in conversations(3, 60))
    return launch_server.within(folder)
