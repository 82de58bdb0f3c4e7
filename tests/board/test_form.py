"""The form of a run: every flag, plans of what train would do, refusals of the same, and nothing from outside."""

import json
from pathlib import Path
from typing import get_args

import pytest

from ligermodels.aliases import flag_of
from ligermodels.board.form import NOT_IN_FORM, REFUSALS, form_fields, given_settings
from ligermodels.cli.train import flag_options
from ligermodels.errors import InputError
from ligermodels.training import TrainConfig, plan
from ligermodels.training.settings.config import FIELDS, type_of
from ligermodels.training.settings.fields import Named
from tests.board.serving import serving, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    for name in ("runs", "data", "outside"):
        (folder / name).mkdir()
    for name in ("data/own.jsonl", "outside/own.jsonl"):
        lines = [f'{{"text": "the number {number} and {number * 7}"}}\n' for number in range(200)]
        (folder / name).write_text("".join(lines))
    (folder / "data/linked.jsonl").symlink_to(folder / "outside/own.jsonl")
    (folder / "data/mixed").mkdir()
    (folder / "data/mixed/a.jsonl").symlink_to(folder / "outside/own.jsonl")
    (folder / "outside/model").mkdir()
    (folder / "outside/model/config.json").write_text('{"model_type": "qwen2"}')
    (folder / "data/adapter").mkdir()
    config = {"base_model_name_or_path": str(folder / "outside/model"), "peft_type": "LORA", "r": 4}
    config |= {"target_modules": ["q_proj"], "lora_alpha": 8}
    (folder / "data/adapter/adapter_config.json").write_text(repr(config).replace("'", '"'))
    (folder / "outside/rewards.py").write_text("def one(**_): return []\n")
    (folder / "data/a.py").mkdir()
    (folder / "data/linked").mkdir()
    (folder / "data/linked/config.json").write_text('{"model_type": "qwen2"}')
    (folder / "outside/model/model.safetensors").write_bytes(bytes(100))
    (folder / "data/linked/other.safetensors").write_bytes(bytes(100))
    (folder / "data/linked/model.safetensors").symlink_to(folder / "outside/model/model.safetensors")
    (folder / "outside/x.gguf").write_bytes(b"GGUF")
    for number, made in enumerate((Path.touch, lambda path: path.symlink_to(folder / "outside/x.gguf")), 1):
        made(folder / f"data/x-0000{number}-of-00002.gguf")
    (folder / "data/rewards.py").symlink_to(folder / "outside/rewards.py")
    return folder


@pytest.fixture(scope="module")
def board(folder):
    with serving(folder / "runs", folder / "data") as board:
        yield board


def test_the_form_has_every_flag_with_its_help(board):
    fields = board.get("/api/form")["fields"]
    assert [field["name"] for field in fields] == [name for name in FIELDS if name not in NOT_IN_FORM]
    for field in fields:
        options = flag_options(FIELDS[field["name"]])
        assert field["flag"] == flag_of(field["name"]) and field["help"] == options["help"].replace("%%", "%")
    by_name = {field["name"]: field for field in form_fields()}
    assert by_name["packing"]["kind"] == "switch" and by_name["steps"]["kind"] == "number"
    assert by_name["schedule"]["choices"] == ("cosine", "linear", "wsd") and by_name["data"]["several"]


def test_values_are_read_as_flags_are():
    values = {
        "model": "qwen2",
        "steps": "7",
        "learning_rate": "1e-3",
        "packing": "off",
        "data": ["a", "b=0.5"],
        "size": "",
    }
    assert given_settings(values) == {
        "model": "qwen2", "steps": 7, "learning_rate": 1e-3, "packing": False, "data": ("a", "b=0.5"),
    }  # fmt: skip


def test_a_plan_is_that_of_train_dry_run(board, folder):
    settings = {"model": "llama", "data": [str(folder / "data/own.jsonl")], "steps": "30", "batch_size": "2"}
    status, made = board.post("/api/plan", {"settings": settings})
    expected = plan(TrainConfig(model="llama", data=settings["data"], steps=30, batch_size=2))
    assert status == 200 and made["table"] == [list(row) for row in expected.table()]
    assert made["parts"] == {part: size for part, size in expected.memory.parts.items() if size}
    assert made["peaks"] == dict(expected.phases)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "--model is missing"), ({"model": "qwen2", "steps": "0"}, "--steps is '0'; must be a whole number above"),
        ({"model": "qwen2", "steps": "3", "epochs": "1"}, "both set the length"),
        ({"steps": [1]}, "--steps: must be text"),
        ({"model": "qwen2", "schedule": "x"}, "--schedule is 'x'; must be one of cosine"),
        ({"model": "qwen2", "beta": "1"}, "--beta"),
        ({"model": "qwen2", "output": "/tmp/x"}, "'output': is no setting"),
        ({"model": "qwen2", "resume": "/tmp"}, "'resume': is no setting"),
        ({"model": "qwen2", "push_to_hub": "me/mine"}, "'push_to_hub': is no setting"),
        ({"model": "x" * 5000}, "must be text"),
        ({"model": "qwen2", "data": ["data/none.jsonl"]}, "outside of the folders"),
        ({"model": "qwen2:nosuch"}, "nosuch"),
        ({"model": "some/where", "data": ["stories"]}, "some/where"),
        ({"model": "qwen2", "data": ["own.txt"]}, "outside"),
    ],
)  # fmt: skip
def test_what_train_would_refuse_is_refused(board, settings, words):
    for path, body in (("/api/plan", {}), ("/api/start", {"name": "new"})):
        assert words in board.refused(path, {"settings": settings, **body})
    assert not board.actions.processes.started


@pytest.mark.parametrize(
    "name", ["", "..", ".", "a/b", "/tmp/x", ".hidden", "-x", "a\0", "x" * 101, None, 3, "a\n", "é"]
)
def test_a_run_has_a_plain_name(board, name):
    assert "name: must be letters" in board.refused("/api/start", {"name": name, "settings": {"model": "qwen2"}})


@pytest.mark.parametrize(
    "settings",
    [
        {"data": ["outside/own.jsonl"]}, {"data": ["data/linked.jsonl"]}, {"data": ["data/mixed"]},
        {"data": ["data/../outside/*.jsonl=0.5"]}, {"data": ["data/*/a.jsonl"]}, {"validation_data": ["/etc/passwd"]},
        {"model": "outside/model"}, {"model": "data/../outside/model", "lora_rank": "2"},
        {"adapter": "data/adapter", "model": "", "data": ["stories"]}, {"chat_template": "outside/own.jsonl"},
        {"objective": "distill", "teacher": "outside/model", "data": ["stories"]},
        {"objective": "dpo", "reference": "model:outside/model"},
        {"objective": "grpo", "reward": ["outside/rewards.py:one=1.0"]}, {"model": "../x/y"}, {"model": "/nowhere"},
        {"model": "/"}, {"model": "."}, {"model": ".."},
        {"objective": "grpo", "reward": ["exact", "data/a.py/../../outside/rewards.py:one"]},
        {"objective": "grpo", "reward": ["data/rewards.py:one"]},
        {"objective": "grpo", "reward": ["model:outside/model"]},
        {"objective": "grpo", "reward": ["~/../data/rewards.py:one"]},
        {"objective": "distill", "teacher": "some/model", "teacher_states": "outside/states"},
        {"objective": "distill", "teacher": "some/model", "teacher_states": "data/../../states"},
        {"adapter": "outside/model"}, {"model": "data/x-00001-of-00002.gguf"},
    ],
)  # fmt: skip
def test_nothing_outside_the_folders_is_named(board, folder, monkeypatch, settings):
    monkeypatch.chdir(folder)
    words = board.refused("/api/plan", {"settings": {"model": "qwen2", **settings}})
    assert "outside of the folders" in words or "neither a folder that exists nor a name" in words


def test_weights_that_are_linked_from_outside_are_refused(board, folder):
    linked = str(folder / "data/linked")
    for settings in ({"model": linked}, {"model": "qwen2", "objective": "distill", "teacher": linked}):
        assert "has links that lead outside" in board.refused("/api/plan", {"settings": settings})
    model = next(model["id"] for model in board.get("/api/models") if model["name"] == "linked")
    status, answer = board.post("/api/chat", {"model": model, "slot": 0, "prompt": "x", "max_new_tokens": 1})
    assert status == 400 and "has links that lead outside" in answer["error"]


def test_a_reward_file_outside_is_not_run(board, folder, monkeypatch):
    monkeypatch.chdir(folder)
    for number, path in enumerate(("outside/evil.py", "data/a.py/../../outside/evil.py")):
        (folder / "outside/evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\ndef one(**_): return []\n")
        settings = {"model": "qwen2", "data": ["sums"], "objective": "grpo", "reward": [f"{path}:one"]}
        assert "outside of the folders" in board.refused("/api/plan", {"settings": settings})
        assert "outside of the folders" in board.refused("/api/start", {"name": "evil", "settings": settings})
        written = f'model = "qwen2"\ndata = ["sums"]\nobjective = "grpo"\nreward = ["{path}:one"]\n'
        write_run(folder / f"runs/evil-{number}", settings=written)
        board.summary(f"0:evil-{number}")
        assert "outside of the folders" in board.refused("/api/resume", {"run": f"0:evil-{number}"})
    assert not (folder / "ran").exists()


def test_a_plan_runs_no_code_of_rewards_which_a_dry_run_tries(board, folder):
    file, ran = folder / "data/own.py", folder / "ran"
    file.write_text(f"open({str(ran)!r}, 'w')\nraise KeyError('run')\n")
    settings = {"model": "qwen2", "data": ["sums"], "objective": "grpo", "reward": [f"{file}:one", r"format:\d"]}
    status, made = board.post("/api/plan", {"settings": settings})
    assert status == 200 and made["table"] and not ran.exists()
    assert "nosuch.py:one: the file does not exist" in board.refused(
        "/api/plan", {"settings": settings | {"reward": [f"{folder}/data/nosuch.py:one"]}}
    )
    config = TrainConfig(model="qwen2", data=("sums",), objective="grpo", reward=(f"{file}:one",))
    with pytest.raises(InputError, match=r"own.py:one: the file does not run: KeyError: 'run'"):
        plan(config)
    assert ran.exists()


@pytest.mark.parametrize("written", ['push_to_hub = "me/mine"', 'output = "/outside"', 'teacher_states = "/outside"'])
def test_a_run_is_not_resumed_into_what_is_outside(board, folder, written):
    name = written.partition(" ")[0]
    write_run(folder / "runs" / name, settings=f'model = "qwen2"\n{written}\n')
    board.summary(f"0:{name}")
    words = "the board uploads nothing" if name == "push_to_hub" else "outside of the folders"
    assert words in board.refused("/api/resume", {"run": f"0:{name}"})
    assert not board.actions.processes.started


@pytest.mark.parametrize("name", ["hub:json", "hub:/outside", "hub:../x/y", "hub:outside/model", "hub:a/b:x]/../../y"])
def test_data_of_the_hub_is_not_read_from_this_machine(board, folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    words = board.refused("/api/plan", {"settings": {"model": "qwen2", "data": [name]}})
    assert "must be hub:OWNER/NAME" in words


def test_the_export_of_a_run_has_no_links_that_lead_out(board, folder, tmp_path):
    (folder / "data/run/model").mkdir(parents=True)
    (folder / "data/run/train.toml").touch()
    (tmp_path / "secret").touch()
    (folder / "data/run/model/config.json").symlink_to(tmp_path / "secret")
    settings = {"model": str(folder / "data/run"), "data": ["stories"]}
    assert "data/run/model: has links that lead outside" in board.refused("/api/plan", {"settings": settings})


def test_adapters_that_name_each_other_are_refused(board, folder):
    for name, base in (("one", "two"), ("two", "one")):
        (folder / "data" / name).mkdir()
        config = {"base_model_name_or_path": str(folder / "data" / base), "peft_type": "LORA", "r": 4}
        config |= {"target_modules": ["q_proj"], "lora_alpha": 8}
        (folder / "data" / name / "adapter_config.json").write_text(json.dumps(config))
    settings = {"adapter": str(folder / "data/one"), "data": ["stories"]}
    assert "there is no model, which has a config.json" in board.refused("/api/plan", {"settings": settings})


def test_a_setting_that_names_files_models_or_code_declares_it():
    """A new setting of text either names nothing outside of the settings, or says what, and the board checks that."""
    undeclared = {
        name for name, field in FIELDS.items()
        if field.metadata["names"] is None and type_of(name)[0] in (str, Path)
    }  # fmt: skip
    assert undeclared == {
        *("size", "revision", "text_field", "prompt_field", "completion_field", "image_tokens", "loss", "stop"),
        *("f_divergence", "divergence", "lora_targets", "modules_to_save"),
    }
    assert {field.metadata["names"] for field in FIELDS.values()} == {None, *REFUSALS} == {None, *get_args(Named)}


def test_what_lies_inside_is_planned(board, folder, monkeypatch):
    monkeypatch.chdir(folder)
    settings = {"model": "qwen2", "data": [str(folder / "data/own.jsonl")], "steps": "2", "batch_size": "1"}
    status, made = board.post("/api/plan", {"settings": settings})
    assert status == 200 and "table" in made, made
    assert "own.jsonl" in dict(made["table"])["data"]
