"""The benchmark of a generation step's kernels without a GPU: every case at a tiny size; times are mocked."""

import argparse

import pytest
import torch

from benchmarks import decode_kernels as bench
from benchmarks.decode_kernels import AttentionShape, graph_us
from ligermodels.kernels.decoding import decode_attention


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Each call runs once and takes 2 us."""
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "graph_us", lambda calls: [call() for call in calls] and 2.0)
    monkeypatch.setattr(bench, "EXPERTS", (32, 16, 6, 2))
    monkeypatch.setattr(bench, "ROWS", (1, 16))


def rows_of(*cases):
    with torch.no_grad():
        return [row for case in cases for row in bench.rows_of(case, 100.0, ["flash-attn-4", "torch varlen"])]


def figures(rows):
    return [(row["provider"], row.get("gb_per_s"), row.get("share"), row.get("reason")) for row in rows]


def test_attention_reads_the_keys_and_values_that_queries_see():
    plain, window = AttentionShape(2, 1000, 4, 2, 16), AttentionShape(2, 1000, 4, 2, 16, window=100, sinks=True)
    rows = rows_of(*map(bench.attention_case, (plain, window)))
    refused = "NotImplementedError: equal lengths alone, without window, softcap and sinks"
    assert figures(rows) == [
        ("ligermodels", 128, 1.28, None),  # 2 rows x 1000 keys x 2 heads x 16 x 2 x 2 bytes in 2 us
        ("sdpa, without pages", 128, 1.28, None),
        ("ligermodels", 13, 0.128, None),
        ("sdpa, without pages", None, None, refused),
    ]
    assert rows[2]["shape"] == "2 x 1000 4/2x16 window sinks"


def test_linears_experts_and_writes_agree_with_their_references(monkeypatch):
    for name, sizes in {"LINEARS": [(64, 48)], "NORM_LINEARS": [(64, 48)], "GATED_LINEARS": [(64, 48)]}.items():
        monkeypatch.setattr(bench, name, sizes)
    rows = rows_of(*bench.linear_cases(), *bench.experts_cases(), bench.write_case(3, 4, 2, 16))
    assert not [row for row in rows if "reason" in row]
    assert [row["provider"] for row in rows[:3]] == ["cublas", "ligermodels", "cublas"]  # ours up to eight rows
    assert rows[0]["gb_per_s"] == round(64 * 48 * 2 / 2e3)
    assert {row["group"] for row in rows} == {"linear", "norm_linear", "gated_linear", "experts", "rope, write"}


def test_a_wrong_provider_has_the_reason_instead_of_figures():
    case = bench.linear_case(1, [bench.draw(8, 16)])
    wrong = case._replace(providers={"wrong": lambda: [lambda: case.reference() * 1.5]})
    (row,) = rows_of(wrong)
    assert row["reason"] == "wrong: relative error 5.0e-01" and "us" not in row
    assert bench.format_row(row).endswith("wrong: relative error 5.0e-01")


def test_constants_of_kernels_are_set_by_name(monkeypatch):
    monkeypatch.setattr(decode_attention, "STAGES", 3)
    bench.set_constant("decoding.decode_attention.STAGES=2")
    assert decode_attention.STAGES == 2
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"ligermodels.kernels.decoding.decode_attention has no constant TILES"
    ):
        bench.set_constant("decoding.decode_attention.TILES=1")


@pytest.mark.gpu
def test_a_graph_of_many_calls_is_timed():
    x = torch.ones(2**20, device="cuda")
    assert 0.5 < graph_us([lambda: x + 1, lambda: x + 2]) < 1000
