"""How many files of the package a record goes through on its way to the loss, and a hidden state through a block.

A file counts if one of its functions is called. Whoever reads the code to learn what happens to a record opens as many.
"""

import inspect
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

import ligermodels
from ligermodels.distributed import World
from ligermodels.training import TrainConfig
from ligermodels.training.checkpoints import Progress
from ligermodels.training.objectives.objective import RunSetup
from ligermodels.training.preparing import prepare
from tests.training.small_models import save_model

PACKAGE = Path(ligermodels.__file__).parent
DATA_SIDE = ("training", "tokenizer", "images", "losses")
# At most so many files, of which so many are of the data's side: training, tokenizer, images and losses.
CHAT, CHAT_DATA_SIDE = 45, 17
PAIR, PAIR_DATA_SIDE = 56, 26
BLOCK = 12
DATA_ROOM = 30  # files of training/data and its rooms


@contextmanager
def files_entered():
    """Yields a set, to which the files are added whose functions are called in the context, as paths in the package."""
    found = set()

    def note(frame, event, _):
        code = frame.f_code  # of a function, or of a module or class that is being defined
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(f"{PACKAGE}/"):
            found.add(Path(code.co_filename).relative_to(PACKAGE).as_posix())

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def walk(objective, records, tmp_path, monkeypatch, **settings):
    """The files that the records of a run are in, from its file to the loss of a micro-batch."""
    data = tmp_path / "records.jsonl"
    data.write_text("\n".join(map(json.dumps, records)))
    folder = save_model(tmp_path / "model", map(str, records), model_type="llama")
    config = TrainConfig(model=str(folder), objective=objective, data=(str(data),), steps=1, **settings)
    run = prepare(config, World(torch.device("cpu")))  # what is imported or made once does not count
    model = run.model.to_empty(device="cpu")
    model.initialize(0)
    run.objective.prepare(model, RunSetup(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    with files_entered() as files:
        run.objective.open(folder, model, None)
        work = run.objective.work(model, Progress())
        share = run.objective.loss(model, work.batches[0], work)
    assert share.loss > 0
    return files


def of_data_side(files):
    return sorted(file for file in files if file.startswith(DATA_SIDE))


def test_the_walk_of_a_chat_to_the_loss(tmp_path, monkeypatch):
    turns = [[("user", f"What is {n} plus {n}?"), ("assistant", f"{2 * n}.")] for n in range(40)]
    records = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in turns]
    files = walk("sft", records, tmp_path, monkeypatch, batch_size=2, sequence_length=64)
    assert len(files) <= CHAT, sorted(files)
    assert len(of_data_side(files)) <= CHAT_DATA_SIDE, of_data_side(files)


def test_the_walk_of_a_pair_to_the_loss(tmp_path, monkeypatch):
    records = [{"prompt": f"{n} plus {n} is", "chosen": f" {2 * n}.", "rejected": f" {n}."} for n in range(1, 41)]
    files = walk("dpo", records, tmp_path, monkeypatch, pairs=4, max_length=64)
    assert len(files) <= PAIR, sorted(files)
    assert len(of_data_side(files)) <= PAIR_DATA_SIDE, of_data_side(files)


def test_the_data_room_has_few_files():
    assert len([*(PACKAGE / "training" / "data").rglob("*.py")]) <= DATA_ROOM


def test_the_walk_of_a_hidden_state_through_a_block(monkeypatch):
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = ligermodels.create({"model_type": "llama", "vocab_size": 64} | fields)
    ids = torch.arange(8)[None]
    model(input_ids=ids)
    block, files = type(model.get_submodule("model.layers.0")), set()
    forward = block.forward

    def watched(*arguments, **options):
        with files_entered() as found:
            result = forward(*arguments, **options)
        files.update(found)
        return result

    monkeypatch.setattr(block, "forward", watched)
    model(input_ids=ids)
    assert 1 < len(files) <= BLOCK, sorted(files)
