"""Parquet, data sets of the Hub and folders of save_to_disk: columns, rows, splits, and memory."""

import signal
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from ligermodels.errors import InputError
from ligermodels.training.data.formats import sources, tables
from ligermodels.training.data.formats.record_formats import KNOWN_FIELDS, Reading
from ligermodels.training.data.formats.records import BadLines, Completion, Conversation, Text
from ligermodels.training.data.formats.streams import ReadingProgress
from tests.refusals import limited_memory
from tests.suites import quick
from tests.training.data.source_files import ANSWER, CALLED, TERSE, TOOL, TURNS, USER, messages, read, write

DATA = Path(__file__).parents[3] / "data"


def test_the_rows_of_a_parquet_dictionary_are_decoded_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_BATCH_BYTES", 100_000)
    one = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 50, pyarrow.int32()), pyarrow.array(["x" * 30_000]))
    pyarrow.parquet.write_table(pyarrow.table({"text": one}), tmp_path / "a.parquet", store_schema=False)
    assert (tmp_path / "a.parquet").stat().st_size < 30_000
    held = []
    for batch in tables.parquet_batches(
        tmp_path / "a.parquet", Reading(KNOWN_FIELDS, BadLines(0), ReadingProgress("", None))
    ):
        held.append(len(batch))
        assert all(row == {"text": "x" * 30_000} for row in batch)
    assert sum(held) == 50 and max(held) == 3
    assert [record.place for record in read(tmp_path / "a.parquet")][-1] == f"{tmp_path}/a.parquet: row 50"
    monkeypatch.setattr(tables, "MAX_BATCH_BYTES", 20_000)
    with pytest.raises(InputError, match=r"a\.parquet: row 1: has more than 20,000 bytes"):
        read(tmp_path / "a.parquet")


def test_rows_too_large_for_a_batch_together_are_decoded_one_by_one(tmp_path, monkeypatch):
    texts = [f"{number} " * (20_000 if 70 <= number < 75 else 1) for number in range(80)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    monkeypatch.setattr(tables, "BATCH_BYTES", 100_000)
    assert [record.text for record in read(tmp_path / "a.parquet")] == texts
    monkeypatch.setattr(tables, "BATCH_BYTES", 50_000)
    with pytest.raises(InputError, match=r"a\.parquet: row 71: needs more than 640 MiB of memory; split it, and write"):
        read(tmp_path / "a.parquet")


PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
"""


HUGE = [("list_of_100_million_nulls", "messages"), ("text_of_300_million", "text")]


@pytest.mark.parametrize(("name", "column"), quick(HUGE, HUGE[1:]))
def test_a_parquet_row_that_decoding_makes_huge_is_refused_within_one_gib(name, column):
    """300 MB that a dictionary has once; 10⁸ levels, of which Arrow makes up to 2 GB."""
    file = DATA / "hostile" / f"{name}.parquet"
    with limited_memory(128), pytest.raises(InputError, match=rf"{name}\.parquet: row 1: needs more than 640 MiB"):
        read(file)
    worker = tables.Worker(file, [column], 1, 0)
    measured = subprocess.run([sys.executable, "-c", PEAK, *worker.command], capture_output=True, check=True)
    assert 100 < float(measured.stdout) < 1024 - 128


def test_a_parquet_file_that_is_not_read_to_its_end_leaves_no_process(tmp_path, monkeypatch):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *given, **options: started.append(popen(*given, **options)) or started[0]
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": ["word " * 1000] * 1000}), tmp_path / "a.parquet")
    records = sources.read_records(str(tmp_path / "a.parquet"), BadLines(0), ReadingProgress("", None))
    assert next(records).text == "word " * 1000 and started[0].poll() is None
    records.close()
    assert started[0].returncode == -signal.SIGKILL


def test_strings_within_lists_count_towards_the_size_of_a_parquet_row(tmp_path, monkeypatch):
    rows = [messages(USER, ANSWER), messages(*[USER, ANSWER | {"content": "x" * 1000}] * 20)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    monkeypatch.setattr(tables, "MAX_BATCH_BYTES", 30_000)
    assert len(read(tmp_path / "a.parquet")) == 2
    monkeypatch.setattr(tables, "MAX_BATCH_BYTES", 15_000)
    with pytest.raises(InputError, match=r"a\.parquet: row 2: has more than 15,000 bytes"):
        read(tmp_path / "a.parquet")


def test_null_fields_of_parquet_rows_are_dropped(tmp_path):
    rows = [messages(USER, CALLED), messages(USER | {"name": "Ada"}, ANSWER, tools=[TOOL]), {"text": "c"}, {"text": ""}]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"id": 1, "tools": None, "text": None} | r for r in rows]),
        tmp_path / "a.parquet",
        row_group_size=1,
    )
    name = str(tmp_path / "a.parquet")
    called, plain, text = read(name)
    assert called.messages[0] == USER and set(called.messages[1]) == {"role", "content", "tool_calls"}
    assert called.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 2}
    assert plain == Conversation([USER | {"name": "Ada"}, ANSWER], [TOOL], f"{name}: row 2")
    assert text == Text("c", f"{name}: row 3")


def test_the_record_format_of_parquet_follows_from_its_columns(tmp_path):
    rows = [{"id": 1, "system": None, "conversations": TURNS}, {"id": 2, "system": "Be terse.", "conversations": TURNS}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [record.messages for record in read(tmp_path / "a.parquet")] == [[USER, ANSWER], [TERSE, USER, ANSWER]]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["2"], "completion": ["4"]}), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet") == [Completion("2", "4", f"{tmp_path}/b.parquet: row 1")]


def test_the_error_for_bad_parquet_names_the_file(tmp_path):
    def table(file, **columns):
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / file)
        return str(tmp_path / file)

    with pytest.raises(InputError, match=r"a\.parquet: row 2: field text is a number"):
        read(table("a.parquet", text=[None, 5]), allowed=1)
    with pytest.raises(
        InputError,
        match=r"b\.parquet: has no column messages, conversations, .* or content; its columns are x, y; name one with",
    ):
        read(table("b.parquet", x=[1], y=[2]), allowed=9)
    with pytest.raises(InputError, match=r"b\.parquet: has no column .*; its columns are prompt, chosen"):
        read(table("b.parquet", prompt=["a"], chosen=["b"]), allowed=9)
    with pytest.raises(InputError, match=r"c\.parquet: contains no text and no conversation"):
        read(table("c.parquet", text=pyarrow.array([], pyarrow.string())))
    with pytest.raises(InputError, match=r"d\.parquet: not a parquet file that pyarrow can read: Parquet magic bytes"):
        read(write(tmp_path / "d.parquet", b"nothing of the kind"))
    whole = bytearray((tmp_path / "a.parquet").read_bytes())
    whole[4:40] = bytes(36)
    with pytest.raises(InputError, match=r"e\.parquet: not a parquet file that pyarrow can read"):
        read(write(tmp_path / "e.parquet", bytes(whole)), allowed=9)


def test_a_parquet_file_is_not_held_in_memory(tmp_path):
    """Counts Arrow's buffers; the row groups of the file have 1 MB each."""
    table = pyarrow.table({"text": [f"{number:06}" + "word " * 200 for number in range(16_000)]})
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, file, row_group_size=1000, compression="none", use_dictionary=False)
    del table
    before = pyarrow.total_allocated_bytes()
    records = sources.read_records(str(file), BadLines(0), ReadingProgress("", None))
    held = [pyarrow.total_allocated_bytes() - before for _ in records]
    assert len(held) == 16_000 and file.stat().st_size > 16_000_000
    assert max(held) < 4_000_000


def test_a_hub_dataset_is_read_by_split(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    write(folder / "train.jsonl", messages(USER, ANSWER), messages(USER, ANSWER | {"name": "Ada"}))
    write(folder / "test.jsonl", messages(ANSWER))
    sums = b"- {config_name: sums, data_files: [{split: dev, path: sums.txt}]}"
    write(tmp_path / "sets" / "README.md", b"---", b"configs:", sums, sums.replace(b"sums", b"more"), b"---")
    write(tmp_path / "sets" / "sums.txt", b"2 + 2 = 4")
    train = [
        Conversation([USER, ANSWER], None, f"hub:{folder}: row 1"),
        Conversation([USER, ANSWER | {"name": "Ada"}], None, f"hub:{folder}: row 2"),
    ]
    assert read(f"hub:{folder}") == train
    assert [record.messages for record in read(f"hub:{folder}:default:train[1:]")] == [train[1].messages]
    assert [record.messages for record in read(f"hub:{folder}:default:test")] == [[ANSWER]]
    assert read(f"hub:{tmp_path}/sets:sums:dev")[0].text == "2 + 2 = 4"
    with pytest.raises(InputError, match=rf'--data hub:{folder}:dev: Unknown split "dev". Should be one of'):
        read(f"hub:{folder}:dev")
    with pytest.raises(InputError, match="must be hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIGURATION:SPLIT"):
        read("hub:a:b:c:d")


def test_fields_that_the_user_names_are_columns_of_parquet_and_of_hub_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [
        {"q": "2 + 2?", "a": "4", "text": "x", "tools": None},
        {"q": "3 + 3?", "a": None, "text": "x", "tools": None},
    ]
    (tmp_path / "set").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "set/train.parquet")
    chats = pyarrow.Table.from_pylist([{"q": [USER], "a": [ANSWER], "tools": [TOOL]}])
    pyarrow.parquet.write_table(chats, tmp_path / "chats.parquet")
    (chat,) = read(tmp_path / "chats.parquet", prompt="q", completion="a")
    assert (chat.messages, chat.tools) == ([USER, ANSWER], [TOOL])
    for name in (tmp_path / "set/train.parquet", f"hub:{tmp_path}/set"):
        assert [record.text for record in read(name, text="q")] == ["2 + 2?", "3 + 3?"]
        assert read(name, 1, prompt="q", completion="a") == [Completion("2 + 2?", "4", f"{name}: row 1")]
        with pytest.raises(InputError, match=r": row 2: field a is null; must be a string"):
            read(name, prompt="q", completion="a")
        with pytest.raises(
            InputError, match=r": has no column b, which --text-field names; its columns are q, a, text"
        ):
            read(name, text="b")


def saved(folder, rows, **options):
    """A data set of so many rows, as save_to_disk writes it."""
    datasets.Dataset.from_list(rows, **options).save_to_disk(folder, num_shards=len(rows))
    return folder


def test_a_folder_of_save_to_disk_is_read_by_split(tmp_path):
    datasets.disable_progress_bars()
    rows = [messages(USER, ANSWER, tools=None, id=1), messages(USER, CALLED | {"weight": 1}, tools=[TOOL], id=2)]
    calls = [CALLED | {"tool_calls": [{"function": {"name": "f", "arguments": {"x": x}}}]} for x in (2, "a")]
    train = saved(tmp_path / "set/train", [messages(USER, call) for call in calls], on_mixed_types="use_json")
    test = saved(tmp_path / "set/test", rows)
    write(tmp_path / "set/dataset_dict.json", {"splits": ["train", "test"]})
    write(train / "cache-1.arrow", b"not named by state.json")
    for name in (tmp_path / "set", f"{tmp_path}/set:train", train):
        assert [record.messages for record in read(name)] == [[USER, call] for call in calls]
    first, second = read(f"{tmp_path}/set:test")
    assert first == Conversation([USER, ANSWER], None, f"{test}/data-00000-of-00002.arrow: row 1")
    assert second.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 2} and second.tools == [TOOL]
    with pytest.raises(
        InputError, match=r"set:dev: has no split dev; its splits are train, test; give one as .*/set:SPL"
    ):
        read(f"{tmp_path}/set:dev")
    with pytest.raises(InputError, match=r"train:dev: .*/set/train is a data set without splits; leave out :dev$"):
        read(f"{train}:dev")
    with pytest.raises(
        InputError, match=r"train/data-00000-of-00002\.arrow: has no column text, which --text-field names"
    ):
        read(train, text="text")


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({}, "field _data_files must name .arrow files; save it again"),
        ({"_data_files": [{"filename": "a.arrow"}, {"filename": "b.csv"}]}, "field _data_files must name .arrow files"),
        ({"_data_files": [{"filename": "no.arrow"}]}, r"no\.arrow: is missing"),
        ({"_data_files": [{"filename": "../a.arrow"}]}, r"a\.arrow: is a link that leads out of the folder"),
        (
            {"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]},
            "an old version of datasets wrote indices",
        ),
        (b"[", "not JSON"),
    ],
)
def test_a_damaged_folder_of_save_to_disk_is_refused(tmp_path, state, complaint):
    write(tmp_path / "a.arrow", b"")
    write(tmp_path / "set/dataset_info.json", {})
    write(tmp_path / "set/state.json", state)
    with pytest.raises(InputError, match=complaint):
        read(tmp_path / "set")


def arrow(file, array, **options):
    batch = pyarrow.record_batch({"text": array})
    with pyarrow.ipc.new_stream(str(file), batch.schema, options=pyarrow.ipc.IpcWriteOptions(**options)) as stream:
        stream.write_batch(batch)
    return file


TEXTS, LISTS = pyarrow.array(["a", "b" * 2000, "c"]), pyarrow.array(["[" * 60])
OFFSETS = pyarrow.array([0, 2**30, 2, 3], pyarrow.int32()).buffers()[1]  # of which pyarrow checks only the last
BEYOND = pyarrow.StringArray.from_buffers(3, OFFSETS, pyarrow.py_buffer(b"abc"))


@pytest.mark.parametrize(
    ("array", "options", "complaint"),
    [
        (TEXTS, {"compression": "zstd"}, "message 1 is compressed, which datasets does not write"),
        (TEXTS.dictionary_encode(), {"compression": "lz4"}, "message 1 is compressed, which datasets does not write"),
        (BEYOND, {}, "not an Arrow stream, .*: .*nvalid"),
        (pyarrow.RunEndEncodedArray.from_arrays([3], ["a"]), {}, "column text: has the Arrow type run_end_encoded<"),
        (TEXTS.cast(pyarrow.string_view()), {}, "column text: has the Arrow type string_view; must be text or b"),
        (TEXTS.cast(pyarrow.binary_view()), {}, "column text: has the Arrow type binary_view; must be text or bytes, "),
        (pyarrow.array([5]), {}, "row 1: field text is a number"),
        (pyarrow.array([b"a"]), {}, "row 1: field text is bytes; must be a string"),
        (TEXTS[1:].cast(pyarrow.binary()), {}, "row 1: has more than 1,000 bytes; split it"),
        (TEXTS[1:].cast(pyarrow.large_binary()).dictionary_encode(), {}, "row 1: has more than 1,000 bytes; split it"),
        (TEXTS.dictionary_encode().take(pyarrow.array([1] * 9)), {}, "row 1: has more than 1,000 bytes; split it"),
        (pyarrow.ExtensionArray.from_storage(pyarrow.json_(), LISTS), {}, "row 1: has more than 1,000"),
        (pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(["{"])), {}, "text is a string that is "),
    ],
)  # fmt: skip
def test_a_hostile_arrow_file_is_refused_before_it_is_decoded(tmp_path, monkeypatch, array, options, complaint):
    monkeypatch.setattr(tables, "MAX_BATCH_BYTES", 1000)
    with pytest.raises(InputError, match=complaint) as refused:
        read(arrow(tmp_path / "a.arrow", array, **options))
    assert str(refused.value).startswith(f"{tmp_path}/a.arrow: ")


def test_an_arrow_file_that_is_truncated_or_of_another_kind_is_refused(tmp_path):
    whole = arrow(tmp_path / "a.arrow", TEXTS).read_bytes()
    assert [record.text for record in read(tmp_path / "a.arrow")] == TEXTS.to_pylist()
    for content in (b"", b"ARROW1\0\0" + whole, whole[: len(whole) // 2], whole[:400] + b"\xff" * 99 + whole[499:]):
        with pytest.raises(
            InputError, match=r"b\.arrow: not an Arrow stream, as save_to_disk writes it, that pyarrow can"
        ):
            read(write(tmp_path / "b.arrow", content))


def test_the_error_for_a_missing_package_names_it(tmp_path, monkeypatch):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"a\.parquet: needs pyarrow, but cannot import it: .*; pip install pyarrow"):
        read(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.txt\.zst: needs pyarrow, .*; pip install pyarrow"):
        read(write(tmp_path / "a.txt.zst", b"(\xb5/\xfd"))
    with pytest.raises(InputError, match=r"hub:a/b: needs datasets, .*; pip install datasets"):
        read("hub:a/b")
