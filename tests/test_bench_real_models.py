"""The comparison on real models without a GPU and without real models: its data, its measures and a run of it."""

import json
import re
from pathlib import Path

import pytest
import torch

import ligermodels
from benchmarks.real_models import measure, run
from benchmarks.real_models.brief import brief
from benchmarks.real_models.data import calls, data_sets, topics, write
from benchmarks.real_models.gather import compact, thinned
from benchmarks.real_models.measure import Sequences, of_chats, sums
from benchmarks.real_models.publish import TARGET, published
from benchmarks.real_models.recipes import SETS, Recipe
from ligermodels.board.runs import published_runs
from ligermodels.board.series import MEAN
from ligermodels.training import TrainConfig, train
from tests.pages import ROOT

RESULTS = sorted((ROOT / "benchmarks/results").glob("*-real-models.json"))


@pytest.fixture(scope="module")
def sets():
    return data_sets()


def test_data_sets_have_their_sizes_and_hold_out_what_they_do_not_train_on(sets):
    assert {name: len(training) for name, (training, _) in sets.items() if name != "topics"} == {
        "questions": 1000, "calls": 1000, "pairs": 640, "prompts": 960,
    }  # fmt: skip
    for training, validation in sets.values():
        assert len(validation) >= 8
        assert not {json.dumps(record) for record in training} & {json.dumps(record) for record in validation}
    held_out = {record["messages"][1]["content"] for record in sets["questions"][1]}
    assert not held_out & {record["messages"][1]["content"] for record in sets["questions"][0]}
    assert not held_out & {record["chosen"][0]["content"] for record in sets["pairs"][0]}


def test_pairs_have_every_kind_of_rejected_answer(sets):
    answers = {record["messages"][1]["content"] for record in sets["questions"][0] + sets["questions"][1]}
    others = [record["rejected"][0]["content"] in answers for record in sets["pairs"][0]]
    assert 0.4 < sum(others) / len(others) < 0.6  # the rest rambles
    assert all(record["chosen"] != record["rejected"] for record in sets["pairs"][0])


def test_requests_and_their_calls_are_the_same_in_every_process():
    record = calls(1)[0]
    assert [message["role"] for message in record["messages"]] == ["system", "user", "assistant"]
    assert calls(40) == calls(40)
    tools = {json.loads(record["messages"][-1]["content"])["tool"] for record in calls(40)}
    assert tools == {"send_file", "log_response", "insert_character", "schedule", "set_locale", "send_signal"}


def test_no_paragraph_is_in_two_topics():
    paragraphs = [part for record in topics() for part in record["text"].split("\n\n")]
    assert len(paragraphs) > 1000
    long = [part for part in paragraphs if len(part) > 80]
    assert len(long) == len(set(long))


def test_the_reward_of_short_answers():
    texts = ["`dedent` removes indentation.", "It removes indentation.", "dedent " * 60, "dedent " + "a " * 29]
    assert brief(texts, ["dedent"] * 4) == pytest.approx([1 - 3 / 60, 0.0, 0.0, 0.5])
    assert brief([[{"role": "assistant", "content": "join"}]], ["join"], prompts=[[]]) == [pytest.approx(59 / 60)]
    assert brief(["rejoined"], ["join"]) == [0.0]


def test_sums_of_packed_sequences_are_those_of_each_alone(monkeypatch):
    model = ligermodels.create("qwen2", size="tiny").eval()
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, 200, (length,), generator=generator).tolist() for length in (9, 5, 12)]
    monkeypatch.setattr(measure, "ROW", 16)  # two rows: 9 + 5, 12
    found = sums(model, Sequences(ids, [4, 1, 11]))
    for place, (row, begin) in enumerate(zip(ids, [4, 1, 11], strict=True)):
        logprobs = model(torch.tensor([row])).logits[0].log_softmax(-1)
        alone = sum(logprobs[spot - 1, row[spot]].item() for spot in range(begin, len(row)))
        assert found.logprobs[place].item() == pytest.approx(alone, rel=1e-5)
    assert found.counts.tolist() == [5, 4, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a chat template, trained for a moment, and the data."""
    folder = tmp_path_factory.mktemp("real")
    write(folder / "data", most=2)
    config = TrainConfig(
        model="qwen2", data=(str(folder / "data/questions-train.jsonl"),), steps=1, batch_size=1, sequence_length=64,
        output=folder / "r",
    )  # fmt: skip
    return folder, str(train(config).exported)


def test_a_run_is_trained_exported_and_measured(folder):
    folder, model = folder
    place = run.Place({"tiny": model}, folder / "data", folder, "cpu", steps=6, most=2, given=["learning_rate=1e-3"])
    meter = measure.Measure(folder / "data", "cpu", most=2)
    before = run.run(Recipe("tiny", "questions", "before", before=True), place, meter, keep=False)["after"]
    result = run.run(Recipe("tiny", "questions"), place, meter, keep=False)
    assert result["steps"] == 6 and result["chosen"]["learning_rate"] == 1e-3
    first, *_, last = result["validations"]
    assert first["validation_loss"] == pytest.approx(before["loss"], abs=1e-3)  # the trainer's own is the same number
    assert last["validation_loss"] == pytest.approx(result["after"]["loss"], abs=1e-3)
    assert last["validation_loss"] < first["validation_loss"] - 0.01
    assert [step for step, _ in result["curves"]["loss"]] == [1, 2, 3, 4, 5, 6]
    assert "validation" in run.line({"name": "x", **result})
    assert not (folder / Recipe("tiny", "questions").name).exists()


def test_chats_count_up_to_the_end_of_the_turn(folder):
    tokenizer = ligermodels.load_tokenizer(folder[1])
    chat = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A lamp."}]
    ids, begins = of_chats(tokenizer, [chat])
    counted = tokenizer.decode(ids[0][begins[0] :], skip_special_tokens=False)
    assert counted.startswith("A lamp.") and not counted.endswith("\n") and len(counted) > len("A lamp.")


def test_names_of_recipes_differ():
    for model in ("smollm2", "gemma3"):
        names = [recipe.name for kind in SETS.values() for recipe in kind(model)]
        assert len(names) == len(set(names)) > 60


def test_compact_results_have_the_margin_that_training_gained():
    run_of_trl = {
        "model": "m", "data": "pairs", "label": "default", "library": "trl", "settings": {"objective": "dpo"},
        "steps": 100, "seconds": 2.4, "curves": {"loss": [[step, float(step)] for step in range(1, 101)]},
        "validations": [{"step": 0, "differences": [50.0, 50.0]}, {"step": 100, "differences": [54.0, 58.0]}],
        "after": {"loss": 3.0, "prose_perplexity": 57.0, "differences": [54.0, 58.0]},
    }  # fmt: skip
    found = compact("trl", run_of_trl, {"m": 50.0})
    assert found["margin"] == pytest.approx(0.6) and found["validation"] == [[0, 0.0], [100, 0.6]]
    assert found["curves"]["loss"][:2] == [[3, 2.0], [6, 5.0]] and found["curves"]["loss"][-1] == [100, 100.0]
    assert "curves" not in compact("sweep", run_of_trl, {"m": 50.0})
    assert thinned([[1, 4.0]]) == [[1, 4.0]]


def test_prose_is_prose(folder):
    texts = [json.loads(line)["text"] for line in Path(folder[0] / "data/prose.jsonl").read_text().splitlines()]
    assert texts and all("```" not in text and "](" not in text for text in texts)


def test_the_boards_file_has_the_published_runs():
    assert TARGET.read_text() == published([json.loads(file.read_text())["runs"] for file in RESULTS])
    assert TARGET.stat().st_size < 150_000


@pytest.mark.parametrize("model", ["SmolLM2", "Gemma 3"])
def test_the_board_has_every_number_of_the_tables_of_real_models(model):
    """Each number of a row is, at the digits that it is printed with, a value of a run of the row's data or objective,
    its steps or its seconds."""
    runs = [run for run in published_runs().values() if run.settings["model"].startswith(model)]
    tables = re.findall(r"(?:^\|.*\n)+", (ROOT / "docs/real-models.md").read_text(), re.M)
    place = ("SmolLM2", "Gemma 3").index(model)
    rows = [line.split("|")[1:-1] for line in tables[place].splitlines()[2:]]
    rows += [[title, both[place]] for title, *both in (line.split("|")[1:-1] for line in tables[2].splitlines()[2:])]
    for title, *cells in rows:
        word = re.split("[,: ]", title.strip())[0]
        kind = {"distillation": "distill", "LoRA": "questions"}.get(word, word).lower()
        of_row = [
            run for run in runs
            if kind in (run.settings["data"], run.settings["objective"]) or run.name.endswith("before training")
        ]  # fmt: skip
        values = [value for run in of_row for rows in run.metrics.columns.values() for value in rows[:, MEAN]]
        values += [run.settings[name] for run in of_row for name in ("steps", "seconds") if name in run.settings]
        found = re.findall(r"(\d+(?:\.(\d+))?)( %)?", " ".join(cells))
        assert found
        for number, digits, percent in found:
            half = 0.5 * 10.0 ** -len(digits) + 1e-9
            close = (abs((100 if percent else 1) * abs(value) - float(number)) <= half for value in values)
            assert any(close), (title, number)
