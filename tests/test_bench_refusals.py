"""Every hostile file of the benchmark is refused, at a small size too, and its row has the error."""

import pytest

from benchmarks import refusals
from ligermodels.tokenizer import chat_template, files
from ligermodels.training.data.formats import text_files


@pytest.mark.parametrize("name", refusals.CASES)
def test_every_case_is_refused(name, monkeypatch):
    monkeypatch.setattr(files, "MAX_VALUES", 1000)
    monkeypatch.setattr(files, "MAX_COMPONENT_BYTES", 10_000)
    monkeypatch.setattr(text_files, "MAX_RECORD_BYTES", 50_000)
    monkeypatch.setattr(text_files, "MAX_RECORD_VALUES", 1000)
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    row = refusals.measure(name, 100_000)
    assert row.message != "not refused" and row.mib < 100, row
