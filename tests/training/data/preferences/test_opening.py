"""open_preferences: from files and embedded data to the steps of a run."""

import json

import numpy as np
import pytest
import torch

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.training import TrainConfig
from ligermodels.training.data import embedded
from ligermodels.training.data.opening import open_data
from ligermodels.training.data.preferences import GroupOptions, open_preferences

CPU = World(torch.device("cpu"))
QUESTIONS = ["Where is the fox", "How many plums are there", "Who sold the keys", "What did the raven count that day"]


@pytest.fixture(autouse=True)
def small_embedded_data(monkeypatch):
    def shrunk(kind):
        return embedded.EmbeddedSplit(kind, 0, 40), embedded.EmbeddedSplit(kind, 1, 6)

    for kind in list(embedded.EMBEDDED_GROUPS):
        monkeypatch.setitem(embedded.EMBEDDED_GROUPS, kind, shrunk(kind))


def opened(*data, kind="pairs", seed=0, **options):
    given = {"row_length": 300, "max_length": 200} | options
    names = ("allow_bad_lines", "validation_data", "validation_fraction")
    settings = {name: given.pop(name) for name in names if name in given}
    config = TrainConfig(model="qwen2", data=data, seed=seed, **settings)
    return open_preferences(config, GroupOptions(kind=kind, **given), None, 1024)


def write(file, records):
    file.write_text("\n".join(map(json.dumps, records)))
    return str(file)


def pairs(count, **others):
    return [
        {"prompt": f"{QUESTIONS[i % 4]} {i // 2}?", "chosen": f" Answer {i}.", "rejected": f" No {i}."} | others
        for i in range(count)
    ]


def content(batch):
    """(unit, side, ids of the completion's supervised tokens) of each completion."""
    ids = batch.labels[0, batch.rows[: batch.supervised] + 1].tensor_split(batch.completions[1:-1].long())
    return sorted((u, s, i.tolist()) for u, s, i in zip(batch.units.tolist(), batch.sides.tolist(), ids, strict=True))


def whole(steps):
    return sorted(entry for step in steps for batch in step.batches for entry in content(batch))


def test_embedded_preferences_are_pairs_with_unseen_prompts_for_validation():
    data = opened("preferences")
    assert (len(data.training), len(data.validation)) == (40, 6) and data.description == "the embedded preferences"
    step = data.training.step(0, 8, CPU)
    assert step.units == 8 and step.tokens < 0.75 * step.tokens_unshared
    assert step.supervised == sum(batch.supervised for batch in step.batches)
    for batch in step.batches:
        assert batch.sides.tolist() == [0, 1] * (len(batch.sides) // 2) and batch.input_ids.shape[1] <= 384
        assert batch.margins is None and batch.desirable is None
    prompts = [{tuple(piece.group.prompt) for piece in map(side.groups.piece, range(len(side)), range(len(side)))}
               for side in (data.training, data.validation)]  # fmt: skip
    assert not prompts[0] & prompts[1]


def test_a_step_is_the_same_on_any_number_of_ranks_and_in_rows_of_any_length():
    data = opened("preferences")
    expected = whole([data.training.step(8, 8, CPU)])
    shares = [opened("preferences").training.step(8, 8, World(torch.device("cpu"), rank, 3)) for rank in range(3)]
    assert whole(shares) == expected and len({len(step.batches) for step in shares}) == 1
    assert len({step[1:] for step in shares}) == 1
    assert whole([opened("preferences", row_length=1000, share_prompts=False).training.step(8, 8, CPU)]) == expected


def test_the_order_is_a_function_of_seed_and_cursor():
    data = opened("preferences")
    first, second = data.training.step(0, 10, CPU), data.training.step(10, 10, CPU)  # the second was prefetched
    resumed = opened("preferences").training.step(10, 10, CPU)
    for a, b in zip(second.batches, resumed.batches, strict=True):
        assert torch.equal(a.input_ids, b.input_ids) and np.array_equal(a.numbers, b.numbers)
    taken = [number for cursor in range(0, 40, 10) for number in data.training.numbers(cursor, 10)]
    assert sorted(taken) == list(range(40)) and data.training.numbers(40, 40) != taken
    assert opened("preferences", seed=1).training.numbers(0, 10) != data.training.numbers(0, 10)
    assert opened("preferences").training.fingerprint == data.training.fingerprint
    assert whole([first]) != whole([second])


def test_pairs_are_judged_completions_and_meet_other_prompts_for_the_kl_estimate():
    data = opened("preferences", kind="judged", share_prompts=False)
    assert len(data.training) == 80 and data.training.labels == (40, 40)
    step, other = data.training.step(0, 6, CPU), data.training.mismatched(0, 6, CPU)
    good = [bool(flag) for batch in step.batches for flag in batch.desirable]
    values = [data.training.groups.value(number) for number in data.training.numbers(0, 6)]
    assert sum(good) == sum(values) and all(batch.desirable is None for batch in other.batches)
    own, given = ({unit: ids for unit, _, ids in whole([each])} for each in (step, other))
    assert sorted(own.values()) == sorted(given.values()) and all(own[unit] != given[unit] for unit in range(6))
    assert whole([opened("preferences", kind="judged").training.mismatched(0, 6, CPU)]) == whole([other])
    with pytest.raises(InputError, match="take 2 or more a step"):
        data.training.mismatched(0, 1, CPU)


def test_an_example_alone_meets_the_completion_of_the_one_before_it_for_the_kl_estimate():
    """As the last one of a validation may be: its own completion would make z the loss's own log-ratio."""
    groups = opened("preferences", kind="judged", share_prompts=False).validation.groups
    last = len(groups) - 1
    alone = groups.mismatched(range(last, last + 1), CPU, np.random.default_rng(last))
    before, own = (groups.step([number], CPU) for number in (last - 1, last))
    ids = [[ids for _, _, ids in whole([step])] for step in (alone, before, own)]
    assert ids[0] == ids[1] != ids[2]


def test_sums_are_prompts_with_their_answers():
    data = opened("sums", kind="prompts")
    prompts = data.training.prompts(0, 6, CPU)
    assert [prompt.unit for prompt in prompts] == list(range(6)) and all(p.text[-1]["role"] == "user" for p in prompts)
    assert data.tokenizer.apply_chat_template(prompts[0].text, add_generation_prompt=True) == prompts[0].ids.tolist()
    assert all("=" in prompt.columns["answer"] for prompt in prompts)
    shares = [data.training.prompts(0, 6, World(CPU.device, rank, 2)) for rank in range(2)]
    assert sorted(prompt.unit for share in shares for prompt in share) == list(range(6))
    assert len(data.questions) == 6 and len(data.validation.prompts(CPU)) == 6


def test_files_are_split_by_prompt(tmp_path):
    file = write(tmp_path / "a.jsonl", pairs(30, margin=0.5))
    data = opened(file)
    assert len(data.training) + len(data.validation) == 30 and len(data.validation) >= 1
    sides = [
        {tuple(side.groups.piece(i, i).group.prompt) for i in range(len(side))}
        for side in (data.training, data.validation)
    ]
    assert not sides[0] & sides[1]
    [batch] = data.training.step(0, 2, CPU).batches
    assert batch.margins.tolist() == [0.5, 0.5]
    steps = list(data.validation.steps(4, CPU))
    assert sum(step.units for step in steps) == len(data.validation)


@pytest.mark.parametrize(("kind", "copies", "units"), [("pairs", 1, 1), ("pairs", 20, 20), ("judged", 20, 40)])
def test_groups_of_a_single_prompt_are_trained_on_and_validated_with(tmp_path, kind, copies, units):
    data = opened(write(tmp_path / "a.jsonl", pairs(1) * copies), kind=kind)
    assert (len(data.training), len(data.validation)) == (units, units)
    groups = "1 group" if units == 1 else f"{units} groups"
    assert f"({groups} for training and for validation, too few to hold one out)" in data.description
    assert sum(step.units for step in data.validation.steps(4, CPU)) == units


def test_a_fraction_of_all_prompts_leaves_one_to_train_on(tmp_path):
    data = opened(write(tmp_path / "a.jsonl", pairs(4)), validation_fraction=0.9)
    assert (len(data.training), len(data.validation)) == (1, 3)


def test_a_fault_of_the_validation_data_names_their_flag():
    with pytest.raises(InputError, match=r"^--validation-data gone.jsonl: no file, folder or glob"):
        opened("preferences", validation_data=("gone.jsonl",))


def test_validation_data_take_their_prompts_out_of_training_and_counts_are_said(tmp_path):
    records = pairs(12)
    training = write(
        tmp_path / "a.jsonl", [*records, {"prompt": " ".join(map(str, range(300))), "chosen": "a", "rejected": "b"}, {}]
    )
    held_out = write(tmp_path / "b.jsonl", records[:2])
    data = opened(training, validation_data=(held_out,), allow_bad_lines=1)
    assert (len(data.training), len(data.validation)) == (10, 2)
    assert data.description == (
        f"{training} (1 bad line skipped, 1 group longer than --max-length 200 dropped, "
        "2 groups excluded, with a prompt of the validation data)"
    )


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([{"prompt": "a", "chosen": "b", "rejected": "b"}], {}, "a.jsonl:1: fields chosen and rejected are equal"),
        (pairs(1), {"max_length": 2}, "has no group outside the validation split"),
        (pairs(3), {"max_length": 4}, r"\(3 groups dropped as too long; raise --max-length, or use --too-long cut\)"),
        (pairs(3), {"kind": "prompts", "max_length": 2}, "dropped as too long; lower --max-completion-length"),
    ],
)
def test_data_that_cannot_be_used_are_refused(tmp_path, records, options, message):
    with pytest.raises(InputError, match=message):
        opened(write(tmp_path / "a.jsonl", records), **options)


def test_sources_that_do_not_fit_the_kind_are_refused(tmp_path):
    with pytest.raises(InputError, match="--data chats: is for supervised training; here, preferences and sums fit"):
        opened("chats")
    with pytest.raises(InputError, match="the sums: its records do not fit the objective, which takes pairs"):
        opened("sums")
    with pytest.raises(InputError, match="--data sums: is for post-training; supervised training takes stories or"):
        open_data(TrainConfig(model="qwen2", data=("sums",)), None, 1024, 512)
    with pytest.raises(InputError, match="--max-prompt-length 200: leaves no room for a completion"):
        GroupOptions(max_length=200, max_prompt_length=200)
