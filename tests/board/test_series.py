"""The numbers of a metrics file: exact where few are shown, bounded where they are many, whatever the file holds."""

import json
import os

import numpy as np
import pytest

from ligermodels.board import series
from ligermodels.board.folders import Place
from ligermodels.board.series import COUNT, HIGH, LOW, MEAN, STEP, MetricSeries, reduced

EVER = (0, 2.0**53)


def write(file, steps, first=1):
    with file.open("a") as stream:
        for step in range(first, first + steps):
            stream.write(json.dumps({"step": step, "loss": 100.0 / step, "learning_rate": 0.5}) + "\n")
            if step % 100 == 0:
                stream.write(json.dumps({"step": step, "validation_loss": step / 100, "sample": f"text {step}"}) + "\n")


def read(file, **options):
    found = MetricSeries(Place(file.parent, file.name), **options)
    while found.update(10**6):
        pass
    return found


@pytest.fixture
def few_rows(monkeypatch):
    """So that files of a test have many chunks, of whose numbers not all are kept."""
    monkeypatch.setattr(series, "CHUNK_BYTES", 2048)
    monkeypatch.setattr(series, "KEPT", 200)


def test_every_value_of_a_short_file_is_there_exactly(tmp_path):
    write(tmp_path / "m", 250)
    rows = read(tmp_path / "m").view(["loss", "validation_loss"], *EVER, 1000)
    assert rows["loss"][:, STEP].tolist() == [*range(1, 251)]
    for column in (LOW, HIGH, MEAN):
        assert rows["loss"][:, column].tolist() == [100.0 / step for step in range(1, 251)]
    assert rows["validation_loss"][:, [STEP, MEAN]].tolist() == [[100, 1], [200, 2]]


def test_a_long_file_keeps_extremes_and_counts(tmp_path, few_rows):
    write(tmp_path / "m", 5000)
    found = read(tmp_path / "m")
    assert len(found.chunks) > 100 and len(found.columns["loss"]) <= 400
    rows = found.view(["loss"], *EVER, 50)["loss"]
    assert 40 <= len(rows) <= 50 and rows[:, COUNT].sum() == 5000
    assert rows[:, HIGH].max() == 100.0 and rows[:, LOW].min() == 0.02
    assert (rows[:, MEAN] * rows[:, COUNT]).sum() == pytest.approx(sum(100.0 / step for step in range(1, 5001)))
    assert np.diff(found.columns["loss"][:, STEP]).max() < 5000 / 50  # even over the file


def test_a_view_of_few_chunks_is_exact_again(tmp_path, few_rows):
    write(tmp_path / "m", 5000)
    rows = read(tmp_path / "m").view(["loss"], 3001, 3010, 1000)["loss"]
    assert rows[:, [STEP, MEAN]].tolist() == [[step, 100.0 / step] for step in range(3001, 3011)]


def test_a_view_reads_no_chunk_again_while_others_wait_or_the_kept_rows_suffice(tmp_path, few_rows, monkeypatch):
    monkeypatch.setattr(MetricSeries, "records_of", lambda *_: pytest.fail("a chunk was read again"))
    write(tmp_path / "m", 5000)
    found = MetricSeries(Place(tmp_path, "m"))
    found.update(40)
    assert found.pending and 0 < found.done < 1
    found.view(["loss"], 1, 10, 1000)
    while found.update(10**6):
        pass
    assert found.done == 1 and len(found.view(["loss"], *EVER, 100)["loss"]) <= 100


def test_no_line_is_lost_or_counted_twice_wherever_chunks_end(tmp_path, monkeypatch):
    write(tmp_path / "m", 300)
    for size in (100, 101, 120, 1000):
        monkeypatch.setattr(series, "CHUNK_BYTES", size)
        rows = read(tmp_path / "m").view(["loss"], *EVER, 10**6)["loss"]
        assert rows[:, COUNT].sum() == 300 and rows[-1, MEAN] == 100.0 / 300


def test_lines_that_are_added_are_read_alone_and_half_a_line_waits(tmp_path, few_rows):
    file = tmp_path / "m"
    write(file, 2000)
    found = read(file)
    chunks = len(found.chunks)
    assert not found.update(10)
    with file.open("a") as stream:
        stream.write('{"step": 2001, "loss": 7.0')
    found.update(100)
    assert found.last_step == 2000 and not found.pending and found.done == 1
    with file.open("a") as stream:
        stream.write("}\n")
    found.update(100)
    assert found.view(["loss"], 2001, 2001, 5)["loss"].tolist() == [[2001, 7, 7, 7, 1]]
    assert len(found.chunks) <= chunks + 1


def test_a_file_that_grows_line_by_line_has_few_chunks_and_its_steps_are_exact(tmp_path, few_rows):
    found = MetricSeries(Place(tmp_path, "m"))
    for step in range(1, 601):
        write(tmp_path / "m", 1, first=step)
        found.update(1)
    assert len(found.chunks) <= (tmp_path / "m").stat().st_size / 1024
    rows = found.view(["loss"], 201, 210, 1000)["loss"]
    assert rows[:, [STEP, MEAN]].tolist() == [[step, 100.0 / step] for step in range(201, 211)]


def test_a_file_that_is_replaced_is_read_anew(tmp_path):
    file = tmp_path / "m"
    write(file, 50)
    found = read(file)
    write(tmp_path / "other", 20)
    os.replace(tmp_path / "other", file)
    found.update(100)
    assert found.last_step == 20
    file.unlink()
    found.update(100)
    assert found.last_step is None and found.latest() == {}


@pytest.mark.parametrize(
    "line",
    [
        *("", "no JSON", "[1, 2]", '{"loss": 1}', '{"step": "3", "loss": 1}', '{"step": -1, "loss": 1}'),
        *('{"step": 1e3, "loss": 2}', "[" * 100_000, '{"step": 3, "loss": NaN', '{"step": ' + "9" * 5000 + "}"),
        *('{"step": true, "loss": 1}', '{"step": 3}, {"step": 4}', "\x00\xff"),
    ],
)
def test_a_damaged_line_is_counted_and_changes_nothing_else(tmp_path, line):
    file = tmp_path / "m"
    write(file, 10)
    with file.open("ab") as stream:
        stream.write(line.encode("latin1") + b"\n")
    write(file, 10, first=11)
    found = read(file)
    assert found.view(["loss"], *EVER, 100)["loss"][:, STEP].tolist() == [*range(1, 21)]
    assert found.unreadable == (line != "")


def test_numbers_that_are_no_finite_numbers_are_left_out(tmp_path):
    file = tmp_path / "m"
    file.write_text(
        '{"step": 1, "loss": NaN, "a": "3", "b": true, "c": [1], "d": null}\n'
        '{"step": 2, "loss": Infinity, "e": 1e999, "f": 2}\n{"step": 3, "loss": 4}\n'
        '{"step": 4, "g": ' + "9" * 400 + "}\n"
    )
    found = read(file)
    assert found.latest() == {"loss": 4.0, "f": 2.0} and found.unreadable == 0


def test_a_line_without_an_end_and_names_without_number_take_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(series, "CHUNK_BYTES", 2**14)
    file = tmp_path / "m"
    write(file, 10)
    with file.open("ab") as stream:
        stream.write(b'{"step": 11, "loss": "' + b"x" * 2**20 + b'"}\n')
        for step in range(12, 14):
            record = {"step": step, **{f"name {step} {i}": 1.0 for i in range(500)}, "y" * 1000: 1.0}
            stream.write(json.dumps(record).encode() + b"\n")
    write(file, 5, first=14)
    found = read(file)
    assert found.last_step == 18 and found.unreadable == 1
    assert max(map(len, found.latest())) < 1000 and len(found.latest()) <= series.MAX_NAMES


def test_memory_is_bounded_however_large_the_file(tmp_path, few_rows):
    write(tmp_path / "m", 16_000)
    found = read(tmp_path / "m")
    assert max(map(len, found.columns.values())) <= 2 * series.KEPT
    assert found.view(["loss"], *EVER, 10)["loss"][:, COUNT].sum() == 16_000


def test_texts_are_noted_evenly_up_to_a_number(tmp_path, few_rows):
    write(tmp_path / "m", 5000)
    found = read(tmp_path / "m", text="sample")
    assert [step for step, _ in found.some_texts(50)] == [*range(100, 5001, 100)]
    few = [step for step, _ in found.some_texts(10)]
    assert len(few) == 10 and few[-1] == 5000 and set(np.diff(few)) == {500}


def test_reduced_rows_have_the_sums_of_all():
    rows = np.stack([np.arange(10.0), np.zeros(10), np.ones(10), np.arange(10.0), np.full(10, 2.0)], 1)
    small = reduced(rows, 3)
    assert small[:, COUNT].sum() == 20 and (small[:, MEAN] * small[:, COUNT]).sum() == 90
    assert reduced(rows, 10) is rows


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "inside").mkdir()
    write(tmp_path / "secret", 10)
    (tmp_path / "inside/m").symlink_to(tmp_path / "secret")
    assert read(tmp_path / "inside/m").last_step is None
