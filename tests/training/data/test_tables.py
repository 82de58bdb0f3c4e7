"""Parquet and data sets of the Hub, and the line that names what is wrong with them."""

import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from ligermodels.errors import InputError
from ligermodels.training.data import sources
from ligermodels.training.data.progress import Progress
from ligermodels.training.data.records import BadLines, Completion, Conversation, Text
from tests.training.data.source_files import ANSWER, CALLED, TERSE, TOOL, TURNS, USER, messages, read, write


def test_parquet_gives_rows_in_which_null_is_absent(tmp_path):
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


def test_parquet_of_any_form_is_read_by_its_columns(tmp_path):
    rows = [{"id": 1, "system": None, "conversations": TURNS}, {"id": 2, "system": "Be terse.", "conversations": TURNS}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [record.messages for record in read(tmp_path / "a.parquet")] == [[USER, ANSWER], [TERSE, USER, ANSWER]]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["2"], "completion": ["4"]}), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet") == [Completion("2", "4", f"{tmp_path}/b.parquet: row 1")]


def test_bad_parquet_is_named(tmp_path):
    def table(file, **columns):
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / file)
        return str(tmp_path / file)

    with pytest.raises(InputError, match=r"a\.parquet: row 2: field text is a number"):
        read(table("a.parquet", text=[None, 5]), allowed=1)
    with pytest.raises(
        InputError,
        match=r"b\.parquet: has no column messages, conversations, instruction with output, .* or text, but x, y",
    ):
        read(table("b.parquet", x=[1], y=[2]), allowed=9)
    with pytest.raises(InputError, match=r"b\.parquet: has no column .*, but prompt, chosen"):
        read(table("b.parquet", prompt=["a"], chosen=["b"]), allowed=9)
    with pytest.raises(InputError, match=r"c\.parquet: holds no text and no conversation"):
        read(table("c.parquet", text=pyarrow.array([], pyarrow.string())))
    with pytest.raises(InputError, match=r"d\.parquet: not a parquet file that pyarrow reads: Parquet magic bytes"):
        read(write(tmp_path / "d.parquet", b"nothing of the kind"))
    whole = bytearray((tmp_path / "a.parquet").read_bytes())
    whole[4:40] = bytes(36)
    with pytest.raises(InputError, match=r"e\.parquet: not a parquet file that pyarrow reads"):
        read(write(tmp_path / "e.parquet", bytes(whole)), allowed=9)


def test_a_parquet_file_is_not_held_in_memory(tmp_path):
    """Its row groups are of 1 MB each, which Arrow's buffers count."""
    table = pyarrow.table({"text": [f"{number:06}" + "word " * 200 for number in range(16_000)]})
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, file, row_group_size=1000, compression="none", use_dictionary=False)
    del table
    before = pyarrow.total_allocated_bytes()
    records = sources.read(str(file), BadLines(0), Progress("", None))
    held = [pyarrow.total_allocated_bytes() - before for _ in records]
    assert len(held) == 16_000 and file.stat().st_size > 16_000_000
    assert max(held) < 4_000_000


def test_a_data_set_of_the_hub_is_read_by_split(tmp_path, monkeypatch):
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


def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"a\.parquet: needs pyarrow, but cannot import it: .*; pip install pyarrow"):
        read(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.txt\.zst: needs pyarrow, .*; pip install pyarrow"):
        read(write(tmp_path / "a.txt.zst", b"(\xb5/\xfd"))
    with pytest.raises(InputError, match=r"hub:a/b: needs datasets, .*; pip install datasets"):
        read("hub:a/b")
