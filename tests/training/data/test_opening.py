import csv
import dataclasses
import json
import random
import re
import tracemalloc

import datasets
import numpy as np
import pytest
import torch

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.training import TrainConfig
from ligermodels.training.data import count_supervised, embedded, open_data, reader, refuse_short_epoch
from ligermodels.training.data.embedded_stories import stories
from ligermodels.training.data.formats.records import is_empty_answer
from ligermodels.training.data.rows import packing, token_files
from ligermodels.training.data.run_tokenizer import save_tokenizer, train_tokenizer
from tests.training.data.documents import CPU

DEFAULTS = TrainConfig(validation_fraction=0.01, batch_size=2, sequence_length=64)


def opened(*data, folder=None, vocab_size=300, positions=512, **settings):
    config = dataclasses.replace(DEFAULTS, data=tuple(map(str, data)) or None, **settings)
    return open_data(config, folder, vocab_size, positions)


def write(path, texts):
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def rows_of(batches):
    return [tuple(row) for batch in batches for row in batch.input_ids.view(-1, 64).tolist()]


def one_pass(data):
    return rows_of(data.training.micro_batches(0, len(data.training), 1, CPU))


GOOD = '{"dtype": "uint16", "end_of_text": 1}'


@pytest.fixture(scope="module")
def texts():
    return [text for text, _ in stories(1, 300)]


@pytest.fixture(scope="module")
def folder(texts, tmp_path_factory):
    """A model's folder, with the files that open_data needs."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(train_tokenizer(texts[:50], 300), folder)
    (folder / "config.json").write_text('{"eos_token_id": [7, 8]}')
    return folder


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(embedded, "TRAINING_STORIES", 300)
    monkeypatch.setattr(embedded, "VALIDATION_STORIES", 30)
    monkeypatch.setattr(embedded, "TRAINING_CHATS", 60)
    monkeypatch.setattr(embedded, "VALIDATION_CHATS", 10)


def test_the_floor_is_the_nats_of_the_validation_stories_over_their_supervised_tokens(few):
    data = opened(model="llama", vocab_size=1024, sequence_length=64)
    unseen = list(stories(1, 30))
    tokens = sum(len(data.new_tokenizer.encode(text, add_special_tokens=False)) + 1 for text, _ in unseen)
    assert data.floor == pytest.approx(sum(nats for _, nats in unseen) / tokens, rel=1e-12)
    assert 0.45 < data.floor < 0.8
    assert sum(int(count_supervised(batch)) for batch in data.validation.batches(4, CPU)) == tokens
    assert data.description == "the embedded stories"
    prompt, answer = data.questions[0]
    assert unseen[0][0].startswith(prompt) and prompt.endswith("=") and answer in unseen[0][0]


def test_embedded_data_is_tokenised_once_per_tokenizer_and_number_of_documents(few, folder, monkeypatch):
    data = opened("stories", "chats", vocab_size=1024)
    monkeypatch.setattr(reader, "train_tokenizer", None)
    with monkeypatch.context() as once:
        once.setattr(reader, "tokenize_records", None)
        again = opened("stories", "chats", vocab_size=1024)
    assert one_pass(again) == one_pass(data) and again.floor == data.floor and again.questions == data.questions
    assert again.training.fingerprint == data.training.fingerprint
    assert again.new_tokenizer.tokenizer.to_str() == data.new_tokenizer.tokenizer.to_str()
    assert (
        opened("stories", folder=folder).training.fingerprint != opened("stories", vocab_size=1024).training.fingerprint
    )
    monkeypatch.setattr(embedded, "TRAINING_STORIES", 100)
    assert len(opened("stories", vocab_size=1024).training) < len(data.training) / 2


def test_only_the_answers_of_chats_are_supervised_with_floor_zero_and_chats_mix_with_stories(few):
    chats = opened("chats", vocab_size=1024)
    assert chats.floor == 0.0
    (batch,) = chats.training.micro_batches(0, 8, None, CPU)
    assert 0.05 < int(count_supervised(batch)) / batch.input_ids.numel() < 0.5
    mixed = opened("stories=0.75", "chats=0.25", vocab_size=1024)
    assert mixed.description.startswith("the embedded stories=0.75 + the embedded chats=0.25")
    alone = opened("stories", vocab_size=1024)
    predicted = [sum(int(count_supervised(b)) for b in d.validation.batches(1, CPU)) for d in (alone, chats, mixed)]
    assert predicted[0] + predicted[1] == predicted[2]
    assert mixed.floor == pytest.approx(alone.floor * predicted[0] / predicted[2])
    entries = mixed.training.mixture.entries(0, 100)
    assert sum(source for source, _ in entries) == 25


def test_random_tokens_are_rows_without_packing_within_the_vocabulary():
    data = opened("random", vocab_size=50)
    (batch,) = data.training.micro_batches(0, 256, None, CPU)
    assert batch.cu_seqlens is None and batch.input_ids.shape == (256, 64)
    assert (int(batch.input_ids.min()), int(batch.input_ids.max())) == (0, 49)
    assert data.floor == pytest.approx(3.912, abs=1e-3)
    assert data.tokenizer is None and data.questions is None
    assert len(data.training) == 256 and len(data.validation) == 1


def test_a_file_is_tokenised_by_the_models_tokenizer_or_by_a_new_one(texts, folder, tmp_path):
    path = write(tmp_path / "d.jsonl", texts)
    read = opened(path, folder=folder)
    assert read.new_tokenizer is None and read.floor is None
    ids = torch.tensor(one_pass(read))
    given = read.tokenizer.encode(texts[5])
    whole = [*given, 7][:64]
    assert whole in ids.unfold(1, len(whole), 1).flatten(0, 1).tolist()
    new = opened(path)
    assert new.new_tokenizer.tokenizer.to_str() == train_tokenizer(texts, 300).tokenizer.to_str()
    assert new.new_tokenizer is new.tokenizer


def split_of(data):
    """The places of the training documents and of the validation documents."""
    rows = data.validation.rows
    return set(data.training.places(0, len(data.training))), {
        p.store.place(p.start) for row in range(len(rows)) for p in rows.segments(row)
    }


def test_the_validation_split_is_fixed_and_disjoint_and_keeps_copies_on_one_side(texts, folder, tmp_path):
    path = write(tmp_path / "d.jsonl", texts + texts[:150])
    splits = [
        split_of(opened(path, folder=folder, validation_fraction=0.05, **settings))
        for settings in ({}, {"seed": 5}, {"sequence_length": 32}, {"packing": False}, {"batch_size": 8})
    ]
    training, validation = splits[0]
    assert all(split == splits[0] for split in splits)
    assert len(training) + len(validation) == 450 and not training & validation
    numbers = sorted(int(place.rpartition(":")[2]) - 1 for place in validation)
    assert 22 <= len(numbers) <= 24  # 5 %, and perhaps the copy of the last
    assert (
        {n % 300 for n in numbers if n % 300 < 150}
        == {n for n in numbers if n < 150}
        == {n - 300 for n in numbers if n >= 300}
    )
    reversed_path = write(tmp_path / "reversed.jsonl", [*reversed(texts), *texts[:150]])
    again = split_of(opened(reversed_path, folder=folder, validation_fraction=0.05))[1]
    assert {n % 300 for n in numbers} == {
        299 - n if n < 300 else n - 300 for n in (int(p.rpartition(":")[2]) - 1 for p in again)
    }


def test_the_end_of_a_single_long_document_is_for_validation_and_no_target_is_lost(texts, folder, tmp_path):
    (tmp_path / "d.txt").write_text("".join(texts))
    data = opened(tmp_path / "d.txt", folder=folder, validation_fraction=0.1)
    ids = [*data.tokenizer.encode("".join(texts)), 7]
    before, after = [data.training.sources[0].parts[0]], [data.validation.rows.parts[0]]
    assert before[0].starts.min() == 0 and after[0].starts.max() + after[0].lengths[-1] <= len(ids)
    due = sum(int(count_supervised(b)) for b in data.training.micro_batches(0, len(data.training), 1, CPU))
    held_out = sum(int(count_supervised(b)) for b in data.validation.batches(1, CPU))
    assert due + held_out == len(ids) - 1
    assert held_out == pytest.approx(0.1 * len(ids), abs=1)


def test_files_named_for_validation_validate_and_those_for_a_test_are_left_out(texts, folder, tmp_path):
    named = {name: write(tmp_path / f"{name}.jsonl", texts[n : n + 20]) for name, n in
             (("train", 0), ("dev", 20), ("test", 40))}  # fmt: skip
    data = opened(tmp_path, folder=folder, validation_fraction=None)
    assert [{place.rpartition(":")[0] for place in side} for side in split_of(data)] == [
        {str(named["train"])}, {str(named["dev"])}
    ]  # fmt: skip
    assert "(1 file named for validation, and used so, 1 file not named for training left out)" in data.description
    both = opened(tmp_path, folder=folder, validation_fraction=0.1)
    assert {place.rpartition(":")[0] for side in split_of(both) for place in side} == {str(named["train"])}
    assert "(2 files not named for training left out)" in both.description


def test_one_chat_and_its_copies_are_trained_on_and_validated_with(folder, tmp_path):
    for copies in (1, 50):
        path = tmp_path / f"{copies}.jsonl"
        path.write_text('{"prompt": "once upon a time ", "completion": "there"}\n' * copies)
        data = opened(path, folder=folder, sequence_length=None)
        batches = data.training.micro_batches(0, copies, 1, CPU)
        assert len(batches) == copies == len(data.validation)
        assert all(count_supervised(batch) > 1 for batch in batches)
        assert "for training and for validation, too few to hold one out)" in data.description


def test_pieces_of_prompts_without_an_answer_are_left_out_and_counted(folder, tmp_path):
    path = tmp_path / "d.jsonl"
    prompts = ("once upon a time there was a girl. " * 40 + str(n) for n in range(12))
    path.write_text("".join(json.dumps({"prompt": text, "completion": "ok"}) + "\n" for text in prompts))
    data = opened(path, folder=folder, sequence_length=64)
    assert all(count_supervised(b) for b in data.training.micro_batches(0, len(data.training), 1, CPU))
    assert re.search(r"\(\d+ pieces of long documents without a supervised token left out\)", data.description)


def test_documents_of_the_validation_data_are_excluded_from_training(texts, folder, tmp_path):
    path, other = write(tmp_path / "d.jsonl", texts), write(tmp_path / "v.jsonl", texts[40:50])
    data = opened(path, folder=folder, validation_data=(str(other),))
    training, validation = split_of(data)
    assert validation == {f"{other}:{n}" for n in range(1, 11)}
    assert training == {f"{path}:{n}" for n in range(1, 301) if not 41 <= n <= 50}
    assert "(10 documents excluded, also in the validation data)" in data.description


def test_the_documents_of_token_files_end_with_the_end_of_text_token(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(token_files, "READ_TOKENS", 500)
    draw = random.Random(0)
    documents = [[draw.randrange(8, 300) for _ in range(draw.randint(1, 90))] for _ in range(200)]
    ids = np.array([token for document in documents for token in [*document, 7]])
    ids.astype("<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "a.json").write_text('{"dtype": "uint16", "end_of_text": 7}')
    np.save(tmp_path / "b.npy", ids.astype(np.uint32))  # uses the model's end-of-text token
    raw, saved = opened(tmp_path / "a.bin"), opened(tmp_path / "b.npy", folder=folder)
    assert one_pass(raw) == one_pass(saved)
    assert raw.tokenizer is None
    batches = [*raw.training.micro_batches(0, len(raw.training), 1, CPU), *raw.validation.batches(1, CPU)]
    targets = [int(label) for batch in batches for label in batch.labels[batch.labels != -100]]
    assert sorted(targets) == sorted(token for document in documents for token in [*document, 7][1:])
    place = raw.training.places(0, 1)[0]
    assert place.startswith(f"{tmp_path / 'a.bin'}: token ")
    start = int(place.split()[-1])
    assert start == 0 or ids[start - 1] == 7


@pytest.mark.parametrize(
    "content, about, complaint",
    [
        (b"\x01\x00" * 4, "{}", r"a\.json: field dtype is None; a\.bin needs this file"),
        (b"\x01\x00" * 4, None, r"a\.json: field dtype is None; a\.bin needs this file"),
        (b"\x01\x00" * 4, "{dtype", r"a\.json: not JSON"),
        (b"\x01\x00" * 4, "[]", r"a\.json: holds list, not a JSON object"),
        (b"\x01\x00\x01", GOOD, r"a\.bin: has 3 bytes, not a multiple of the 2"),
        (b"", GOOD, r"a\.bin: contains no tokens"),
        (b"\x01\x00" * 4, '{"dtype": "uint16", "end_of_text": "x"}', r"a\.json: field end_of_text is 'x'"),
        (b"\x01\x00" * 4, '{"dtype": "uint16"}', r"a\.json: must give end_of_text"),
        (b"\x01\x00" * 4, '{"dtype": "uint16", "end_of_text": 300}', r"a\.json: field end_of_text is 300, outside"),
        (b"\x01\x00" * 70_000 + b"\x2c\x01", GOOD, r"a\.bin: token 70000 has the id 300, .* vocabulary of 300"),
    ],
)  # fmt: skip
def test_the_error_for_an_invalid_token_file_names_field_and_offset(content, about, complaint, tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "READ_TOKENS", 20_000)
    (tmp_path / "a.bin").write_bytes(content)
    if about is not None:
        (tmp_path / "a.json").write_text(about)
    with pytest.raises(InputError, match=complaint):
        opened(tmp_path / "a.bin")


@pytest.mark.parametrize(
    "array", [np.zeros((2, 2), np.uint16), np.zeros(4, np.float32), np.zeros(0, np.uint16), np.array([-1, 5])]
)
def test_an_array_that_has_no_valid_token_ids_is_refused(array, tmp_path, folder):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(InputError, match=r"a\.npy: (must be a one-dim|contains no tokens|token 0 has the id -1)"):
        opened(tmp_path / "a.npy", folder=folder)


@pytest.mark.parametrize(
    "settings, complaint",
    [
        ({"sequence_length": 20_000}, r"d\.jsonl: has [\d,]+ tokens for training, less than one row; lower --s"),
        ({"vocab_size": 200}, r"d\.jsonl:1: token \d+ has the id 2\d\d, outside the model's vocabulary of 200"),
    ],
)  # fmt: skip
def test_too_little_data_and_a_tokenizer_that_does_not_fit_are_refused(settings, complaint, texts, folder, tmp_path):
    path = write(tmp_path / "d.jsonl", texts[:100])
    with pytest.raises(InputError, match=complaint):
        opened(path, folder=folder, **settings)
    with pytest.raises(InputError, match=r"d\.jsonl: fills \d+ rows of 64 tokens .* but a step takes 5000; lower --b"):
        refuse_short_epoch(opened(path, folder=folder), 5000)


def test_a_fault_of_the_validation_data_names_their_flag(texts, folder, tmp_path):
    path, empty = write(tmp_path / "a.jsonl", texts), tmp_path / "empty.txt"
    empty.touch()
    for name, fault in {
        "gone.txt": "no file, folder or glob",
        str(empty): "contains no text",
        "sums": "is for",
    }.items():
        with pytest.raises(InputError, match=f"^--validation-data {re.escape(name)}: {fault}"):
            opened(path, folder=folder, validation_data=(name,))
        with pytest.raises(InputError, match=f"^--data {re.escape(name)}: {fault}"):
            opened(name, folder=folder, validation_data=(str(path),))


def test_weights_on_only_some_sources_or_on_validation_data_are_refused(texts, folder, tmp_path):
    path = write(tmp_path / "d.jsonl", texts)
    with pytest.raises(InputError, match=r"--validation-data stories=0\.5: .*; remove the weight"):
        opened(path, folder=folder, validation_data=("stories=0.5",))
    with pytest.raises(InputError, match="--data stories: has no weight"):
        opened(f"{path}=0.5", "stories", folder=folder)


def test_bad_lines_are_counted_over_all_sources_also_from_the_cache(texts, folder, tmp_path):
    paths = [write(tmp_path / f"{name}.jsonl", texts[:100]) for name in "ab"]
    for path in paths:
        path.write_text(path.read_text() + "\nbad\n")
    for _ in range(2):
        assert "(2 bad lines skipped)" in opened(*paths, folder=folder, allow_bad_lines=2).description
        with pytest.raises(InputError, match="2 bad lines, but --allow-bad-lines 1"):
            opened(*paths, folder=folder, allow_bad_lines=1)
    assert "(1 bad line skipped)" in opened(paths[0], folder=folder, allow_bad_lines=1).description


def test_answers_without_text_are_counted_where_they_are_supervised(folder, tmp_path):
    """Also from the cache. A context's answer of weight 0, and one with a tool call, are none of them."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    answers = [{"content": ""}, {"content": " \n"}, {"content": "hi"}, {"content": "", "tool_calls": [call]}]
    asked, ignored = {"role": "user", "content": "q"}, {"role": "assistant", "content": "", "weight": 0}
    assert [is_empty_answer({"role": "assistant", **answer}) for answer in (*answers, ignored)] == [1, 1, 0, 0, 0]
    chats = [[asked, {"role": "assistant", **answer}, asked | {"content": str(answer)}, ignored | {"content": "x"}]
             for answer in answers[:3]]  # fmt: skip
    chats += [[asked | {"content": str(number)}, {"role": "assistant", "content": "yes"}] for number in range(9)]
    path, template = tmp_path / "chats.jsonl", tmp_path / "template.jinja"
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in chats))
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}#"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    for _ in range(2):
        described = opened(path, folder=folder, chat_template=str(template), sequence_length=32).description
        assert "(2 answers without text, trained to end at once" in described
    path.write_text("\n".join(json.dumps({"prompt": f"q{n}", "completion": "a" * n}) for n in range(9)))
    described = opened(path, folder=folder, sequence_length=8).description
    assert "(1 answer without text, trained to end at once)" in described


def test_tokenised_data_is_read_from_the_cache_until_anything_changes(
    texts, folder, tmp_path, cache_of_its_own, monkeypatch
):
    path = write(tmp_path / "d.jsonl", texts)
    first = one_pass(opened(path, folder=folder))
    monkeypatch.setattr(reader, "tokenize_records", None)  # makes tokenisation impossible
    assert one_pass(opened(path, folder=folder)) == first
    assert one_pass(opened(path, folder=folder, validation_fraction=0.2)) != first
    for change in ({"vocab_size": 301}, {"folder": None}, {"text_field": "text"}):
        with pytest.raises(TypeError):
            opened(path, **({"folder": folder} | change))
    write(path, texts[1:])
    with pytest.raises(TypeError):
        opened(path, folder=folder)
    assert {file.suffix for file in (cache_of_its_own / "ligermodels/data").iterdir()} == {
        "",
        ".lock",
    }  # nothing incomplete


def test_splits_of_a_hub_dataset_are_not_confused(folder, tmp_path, texts, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums").mkdir()
    write(tmp_path / "sums/train.jsonl", texts[:40])
    write(tmp_path / "sums/dev.jsonl", texts[40:60])
    splits = ("train", "validation", "train+validation", "train[:25%]")
    datas = [opened(f"hub:sums:{split}", folder=folder) for split in splits]
    assert [len(set().union(*split_of(data))) for data in datas] == [40, 20, 60, 10]


def test_named_fields_are_read_in_training_and_validation_data_and_by_a_new_tokenizer(texts, folder, tmp_path):
    def write_csv(name, bodies):
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file).writerows([["id", "body"], *enumerate(bodies)])
        return tmp_path / name

    path, held_out = write_csv("d.csv", texts[20:90]), write_csv("v.csv", texts[:20])
    named = opened(path, text_field="body", validation_data=(str(held_out),))
    given = [write(tmp_path / f"{name}.jsonl", part) for name, part in (("d", texts[20:90]), ("v", texts[:20]))]
    known = opened(given[0], validation_data=(str(given[1]),))
    assert one_pass(named) == one_pass(known) and len(named.validation.rows) == len(known.validation.rows)
    assert named.new_tokenizer.tokenizer.to_str() == known.new_tokenizer.tokenizer.to_str()
    one, other = (opened(path, folder=folder, text_field=name, sequence_length=8) for name in ("body", "id"))
    assert one.training.tokens > 5 * other.training.tokens  # and not from the cache of the other


@pytest.mark.parametrize("name", ["a.txt", "a.npy", "stories"])
def test_naming_a_field_of_data_without_fields_is_refused(folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    np.save(tmp_path / "a.npy", np.arange(9))
    with pytest.raises(InputError, match=f"--data {name}: has no fields that --prompt-field could name; leave it out"):
        opened(name, folder=folder, prompt_field="a", completion_field="b")


def test_the_order_of_the_data_depends_on_the_seed_and_not_on_the_number_of_ranks(texts, folder, tmp_path):
    path = write(tmp_path / "d.jsonl", texts)

    def step(ranks, seed=0):
        worlds = [World(torch.device("cpu"), rank, ranks) for rank in range(ranks)]
        datas = [opened(path, "random", folder=folder, seed=seed, batch_size=8) for world in worlds]
        return sorted(
            rows_of(b for d, w in zip(datas, worlds, strict=True) for b in d.training.micro_batches(8, 8, None, w))
        )

    assert step(1) == step(2) == step(4) != step(1, seed=1)


def test_the_default_validation_fraction_is_larger_for_small_data_and_smaller_for_large():
    def fraction(*tokens):
        return packing.default_fraction(sum(tokens))

    assert fraction(9_000) == fraction(100_000, 227_680) == 0.05
    assert fraction(655_360) == 0.025
    assert fraction(1_638_400) == fraction(13_107_200) == 0.01
    assert fraction(13_107_200, 13_107_200) == 0.005


def test_the_default_validation_split_of_large_data_is_limited_in_tokens(texts, folder, tmp_path, monkeypatch):
    path = write(tmp_path / "d.jsonl", texts)
    monkeypatch.setattr(packing, "DEFAULT_FRACTION", 0.2)
    few = opened(path, folder=folder, validation_fraction=None)
    monkeypatch.setattr(packing, "DEFAULT_MAX_TOKENS", 1000)
    fewer = opened(path, folder=folder, validation_fraction=None)
    given = opened(path, folder=folder, validation_fraction=0.2)
    held_out = [
        sum(int(count_supervised(batch)) for batch in data.validation.batches(1, CPU)) for data in (few, fewer, given)
    ]
    assert held_out[0] == held_out[2] > 5000
    assert 500 < held_out[1] < 1500


def test_a_large_token_file_is_indexed_once_and_in_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "READ_TOKENS", 2**16)
    ids = np.random.default_rng(0).integers(8, 300, 4_000_000, np.uint16)
    ids.tofile(tmp_path / "a.bin")
    (tmp_path / "a.json").write_text('{"dtype": "uint16", "end_of_text": 7}')
    tokens = token_files.open_tokens(tmp_path / "a.bin")
    tracemalloc.start()
    token_files.write_index(tokens, 7, 300, {}, "a.bin", tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_500_000  # of 8 MB
    assert np.fromfile(tmp_path / "offsets", np.int64).tolist() == [0, 4_000_000]
    first = opened(tmp_path / "a.bin", sequence_length=2048).training.fingerprint
    monkeypatch.setattr(token_files, "read_block", None)  # so nothing can be read except for batches
    assert opened(tmp_path / "a.bin", sequence_length=2048).training.fingerprint == first


def test_a_new_tokenizer_is_trained_on_an_amount_of_text_that_follows_its_size(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "CHARACTERS_PER_ENTRY", 20)
    path, read = write(tmp_path / "d.jsonl", texts), []
    train = reader.train_tokenizer
    monkeypatch.setattr(
        reader, "train_tokenizer", lambda given, size: train((read.append(text) or text for text in given), size)
    )
    opened(path, vocab_size=300)
    longest = max(map(len, texts))
    assert read == texts[: len(read)] and 6000 <= sum(map(len, read)) < 6000 + longest
    monkeypatch.setattr(reader, "MAX_CHARACTERS", 2000)
    read.clear()
    opened(write(path, texts[1:]), vocab_size=300)
    assert 2000 <= sum(map(len, read)) < 2000 + longest
