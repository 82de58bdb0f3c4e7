"""Ranks and collectives: in a single process, and on two gloo ranks."""

import json
import re
from datetime import timedelta

import pytest
import torch
import torch.multiprocessing

from ligermodels import cli, distributed
from ligermodels.errors import CheckpointError, InputError


@pytest.fixture
def alone(monkeypatch):
    """A process that torchrun did not start."""
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


def test_a_single_process_is_rank_0_of_1(alone):
    world = distributed.start()
    assert (world.rank, world.size, world.is_first) == (0, 1, True)
    assert (distributed.rank(), distributed.local_rank(), distributed.world_size()) == (0, 0, 1)
    assert distributed.is_first() and distributed.first_to_fail() and not distributed.under_torchrun()
    assert not torch.distributed.is_initialized()
    distributed.wait_for_all()
    distributed.stop()


def test_in_a_single_process_collectives_return_their_input(alone):
    x = torch.tensor([1.0, 2.0])
    result = distributed.total(x)
    assert torch.equal(result, x) and result.data_ptr() != x.data_ptr()
    assert distributed.gather_objects("value") == ["value"]
    assert distributed.from_first("value") == "value"
    assert distributed.same_on_all(max, 1, 2) == 2
    with distributed.waiting_group(timedelta(seconds=1)) as group:
        assert group is None


def test_in_a_single_process_an_error_is_raised_unchanged(alone):
    distributed.raise_on_all(None)
    error = RuntimeError("own")
    with pytest.raises(RuntimeError) as raised:
        distributed.raise_on_all(error)
    assert raised.value is error


def test_rank_and_local_rank_are_known_before_the_process_group(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert distributed.under_torchrun()
    assert (distributed.rank(), distributed.local_rank(), distributed.is_first()) == (3, 1, False)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"RANK": "5"}, "RANK: is 5, but WORLD_SIZE is 2; ranks count from 0"),
        ({"RANK": "-1"}, "RANK: is '-1'; must be a whole number, 0 or more"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE: is 'x'; must be a whole number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT: is 99999; must be at most 65535"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR: is missing"),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR: is missing"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE: is 0; must be at least 1"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK: is 'x'; must be a whole number"),
    ],
)
def test_an_environment_in_which_ranks_would_wait_in_vain_is_refused_at_once(changed, told, monkeypatch, capsys):
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in (environment | changed).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=re.escape(told)):
        distributed.start()
    assert cli.main(["train", "--model", "qwen2", "--data", "stories"]) == 2
    assert capsys.readouterr().err.startswith(f"ligermodels: {told}")


def error_of(function, *arguments):
    """[class, text] of the exception that a call raises."""
    try:
        function(*arguments)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def run_rank(rank, folder):
    """Calls every collective, and writes the results of this rank to FOLDER/RANK.json."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    one, both = (CheckpointError("a: is broken"), None), (InputError("of rank 0"), CheckpointError("of rank 1"))
    bug = None, RuntimeError("a bug")
    x = torch.tensor([1.0 + rank, 5.0 - rank])
    results = {
        "world": [distributed.rank(), distributed.world_size(), distributed.is_first()],
        "total": distributed.total(x).tolist(),
        "unchanged": x.tolist(),
        "gather_objects": distributed.gather_objects(f"of rank {rank}"),
        "from_first": distributed.from_first(f"of rank {rank}"),
        "no error": error_of(distributed.raise_on_all, None),
        "one error": error_of(distributed.raise_on_all, one[rank]),
        "two errors": error_of(distributed.raise_on_all, both[rank]),
        "a bug": error_of(distributed.raise_on_all, bug[rank]),
        "same": distributed.same_on_all(lambda: ["the same", 1]),
        "different": error_of(distributed.same_on_all, lambda: f"result {rank}"),
        "raised by one": error_of(distributed.same_on_all, raise_if, one[rank]),
    }
    with distributed.waiting_group(timedelta(seconds=30)) as group:
        results["waiting_group"] = distributed.gather_objects(rank, group)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    distributed.wait_for_all()
    distributed.stop()


def raise_if(error):
    if error is not None:
        raise error


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of both ranks. The processes are forked, because importing torch again takes longer."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.start_processes(run_rank, (folder,), nprocs=2, start_method="fork")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@forks
def test_every_rank_knows_its_place(results):
    assert [result["world"] for result in results] == [[0, 2, True], [1, 2, False]]


@forks
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("total", [3.0, 9.0]),
        ("gather_objects", ["of rank 0", "of rank 1"]),
        ("from_first", "of rank 0"),
        ("no error", None),
        ("same", ["the same", 1]),
        ("waiting_group", [0, 1]),
    ],
)
def test_collectives_give_every_rank_the_same_result(results, name, expected):
    assert [result[name] for result in results] == [expected, expected]


@forks
def test_total_and_smallest_do_not_change_their_input(results):
    assert [result["unchanged"] for result in results] == [[1.0, 5.0], [2.0, 4.0]]


@forks
@pytest.mark.parametrize("name", ["one error", "raised by one"])
def test_an_error_of_one_rank_is_raised_on_all_with_its_class_and_text(results, name):
    assert [result[name] for result in results] == 2 * [["CheckpointError", "a: is broken"]]


@forks
def test_a_rank_with_its_own_error_raises_that(results):
    assert [result["two errors"] for result in results] == [
        ["InputError", "of rank 0"],
        ["CheckpointError", "of rank 1"],
    ]


@forks
def test_an_error_of_another_class_is_an_input_error_on_the_other_ranks(results):
    assert [result["a bug"] for result in results] == [["InputError", "a bug"], ["RuntimeError", "a bug"]]


@forks
def test_different_results_are_an_error_on_all_ranks(results):
    text = "ranks have different results, on rank 0 result 0; choose a folder that all hosts share"
    assert [result["different"] for result in results] == 2 * [["InputError", text]]
