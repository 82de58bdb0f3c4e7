"""A streamed box equals the plain slice of the tensor, for every buffer size, and no other byte is read."""

import errno
import itertools
import os
import threading

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.loading import HostMemory
from ligermodels.errors import CheckpointError
from ligermodels.weights import streaming
from ligermodels.weights.files import SINGLE_FILE, open_checkpoint
from ligermodels.weights.loading import FLOAT_DTYPES
from ligermodels.weights.streaming import Transfer, bit_equal, contiguous_runs, run_transfers
from tests.conftest import DEVICE

# Boxes of a tensor [5, 4, 6]: all of it, some matrices, rows of one matrix, the right half of each row, a box cut on
# every side, one element, the left part of each row, the first rows of each matrix.
BOXES = [
    (slice(0, 5), slice(0, 4), slice(0, 6)),
    (slice(1, 4), slice(0, 4), slice(0, 6)),
    (slice(2, 3), slice(1, 3), slice(0, 6)),
    (slice(0, 5), slice(0, 4), slice(3, 6)),
    (slice(1, 5), slice(1, 3), slice(2, 4)),
    (slice(4, 5), slice(3, 4), slice(5, 6)),
    (slice(0, 5), slice(0, 4), slice(0, 2)),
    (slice(0, 5), slice(0, 3), slice(0, 6)),
]


@pytest.fixture(params=[32, 96, 16 * 2**20])
def buffers(request, monkeypatch):
    """Buffers smaller than a row of the test tensor, smaller than the tensor, and of the default size."""
    monkeypatch.setattr(streaming, "BUFFER_BYTES", request.param)
    monkeypatch.setattr(streaming, "BUFFERS", 3)


def stored(folder, tensors):
    save_file(tensors, folder / SINGLE_FILE)
    return open_checkpoint(folder).tensors


def nan_filled(shape, dtype, strided):
    """A target for a box: a contiguous tensor of its shape, or every second column of a wider one."""
    whole = torch.full((*shape[:-1], 2 * shape[-1]) if strided else shape, float("nan"), dtype=dtype, device=DEVICE)
    return whole[..., ::2] if strided else whole


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_every_box_arrives_in_every_dtype_and_layout(tmp_path, buffers, read_lengths, dtype):
    x = (torch.randn(5, 4, 6, dtype=torch.float64) * 100).to(dtype)
    files = stored(tmp_path, {"x": x, "scalar": torch.tensor(3.25, dtype=dtype), "empty": torch.empty(0, 2)})
    cases = [
        Transfer("x", files["x"], box, nan_filled(x[box].shape, target, strided))
        for box, target, strided in itertools.product(BOXES, FLOAT_DTYPES, (False, True))
    ]
    scalars = [
        Transfer("scalar", files["scalar"], (), torch.zeros((), dtype=target, device=DEVICE)) for target in FLOAT_DTYPES
    ]
    run_transfers([*cases, *scalars], "test")
    for case in cases:
        assert torch.equal(case.target.cpu(), x[case.box].to(case.target.dtype)), case
    assert all(scalar.target == 3.25 for scalar in scalars)
    assert sum(read_lengths) == sum(case.target.numel() for case in [*cases, *scalars]) * dtype.itemsize


def test_contiguous_runs_are_as_long_as_possible(tmp_path):
    files = stored(tmp_path, {"a": torch.zeros(2, dtype=torch.float64), "x": torch.zeros(5, 4, 6)})
    begin = files["x"].begin
    assert begin == files["a"].begin + 16
    found = [list(contiguous_runs(files["x"], box)) for box in BOXES]
    assert found[:3] == [[(begin, 480)], [(begin + 96, 288)], [(begin + 2 * 96 + 24, 48)]]
    assert found[3] == [(begin + 24 * row + 12, 12) for row in range(20)]
    assert found[4] == [(begin + 96 * i + 24 * j + 8, 8) for i in range(1, 5) for j in range(1, 3)]
    assert found[5] == [(begin + 476, 4)]
    assert found[6] == [(begin + 24 * row, 8) for row in range(20)]
    assert found[7] == [(begin + 96 * i, 72) for i in range(5)]


def test_small_tensors_share_a_buffer_and_large_ones_take_several(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "BUFFER_BYTES", 64)
    x = torch.arange(40.0)
    files = stored(tmp_path, {"a": x[:3].clone(), "b": x[:5].clone(), "c": x})
    boxes = [Transfer(n, files[n], (slice(0, size),), torch.zeros(size)) for n, size in (("a", 3), ("b", 5), ("c", 40))]
    batches = list(streaming.batch_transfers(part for box in boxes for part in streaming.split_transfer(box)))
    assert [[(part.name, part.nbytes) for part in batch] for batch in batches] == [
        [("a", 12), ("b", 20)],
        [("c", 64)],
        [("c", 64)],
        [("c", 32)],
    ]


def test_tensors_of_different_dtypes_share_a_buffer(tmp_path):
    """Without alignment the second would begin at an offset that does not fit its dtype."""
    tensors = {"first": torch.randn(3).bfloat16(), "second": torch.randn(3, dtype=torch.float64)}
    boxes = []
    for name, x in tensors.items():
        (tmp_path / name).mkdir()
        boxes.append(Transfer(name, stored(tmp_path / name, {name: x})[name], (slice(0, 3),), torch.zeros(3)))
    run_transfers(boxes, "test")
    assert all(torch.equal(box.target, tensors[box.name].float()) for box in boxes)


def test_an_error_names_file_and_tensor_if_the_file_was_truncated_after_its_header_was_read(tmp_path):
    files = stored(tmp_path, {"first": torch.zeros(8), "last": torch.zeros(8)})
    os.truncate(tmp_path / SINGLE_FILE, os.path.getsize(tmp_path / SINGLE_FILE) - 1)
    whole = (slice(0, 8),)
    run_transfers([Transfer("first", files["first"], whole, torch.empty(8))], "test")
    with pytest.raises(CheckpointError, match=rf"{tmp_path / SINGLE_FILE}: truncated .* within tensor last; download"):
        run_transfers([Transfer("last", files["last"], whole, torch.empty(8))], "test")


def test_a_disk_error_names_file_and_tensor_and_cancels_the_queued_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "BUFFER_BYTES", 64)
    monkeypatch.setattr(streaming, "THREADS", 1)
    asked, cancelled = [], threading.Event()

    class Pool(streaming.ThreadPoolExecutor):
        def shutdown(self, **options):  # comes after the main thread has cancelled what is queued
            cancelled.set()
            super().shutdown(**options)

    def fails(descriptor, views, offset):
        if asked:
            cancelled.wait()
        asked.append(offset)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(streaming, "ThreadPoolExecutor", Pool)

    files = stored(tmp_path, {"x": torch.zeros(1600)})
    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(
        CheckpointError, match=rf"{tmp_path / SINGLE_FILE}: tensor x cannot be read: Input/output error"
    ):
        run_transfers([Transfer("x", files["x"], (slice(0, 1600),), torch.empty(1600))], "test")
    assert len(asked) <= 2  # of 100: the second may have begun before the first one's error arrived


def test_a_short_read_is_continued(tmp_path, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, views, offset: preadv(descriptor, [views[0][:5]], offset))
    x = torch.randn(7, 3)
    target = torch.empty(7, 3)
    run_transfers([Transfer("x", stored(tmp_path, {"x": x})["x"], (slice(0, 7), slice(0, 3)), target)], "test")
    assert torch.equal(target, x)


@pytest.mark.parametrize("quiet", [False, True])
def test_the_progress_bar_counts_the_bytes(tmp_path, monkeypatch, quiet):
    monkeypatch.setattr(streaming, "BUFFER_BYTES", 64)
    bars = []

    class Bar(streaming.tqdm):
        def __init__(self, **options):
            bars.append((self, options))
            super().__init__(**options)

        def update(self, n):
            self.counted = getattr(self, "counted", 0) + n

    monkeypatch.setattr(streaming, "tqdm", Bar)
    files = stored(tmp_path, {"x": torch.zeros(100, 2)})
    run_transfers([Transfer("x", files["x"], (slice(10, 90), slice(0, 2)), torch.empty(80, 2))], "Loading x", quiet)
    [(bar, options)] = bars
    assert (options["desc"], options["total"], bar.counted) == ("Loading x", 640, 640)
    assert options["disable"] is (True if quiet else None)  # None: shown on a terminal only


def test_inference_tensors_can_be_targets(tmp_path):
    x = torch.randn(6)
    files = stored(tmp_path, {"x": x})
    with torch.inference_mode():
        targets = [torch.empty(6, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.float64)]
        run_transfers([Transfer("x", files["x"], (slice(0, 6),), target) for target in targets], "test")
        assert all(torch.equal(target.cpu(), x.to(target.dtype)) for target in targets)


@pytest.mark.parametrize("place", [0, 7, 8, 20])
def test_bit_equality_is_checked_one_buffer_at_a_time(tmp_path, monkeypatch, read_lengths, place):
    monkeypatch.setattr(streaming, "BUFFER_BYTES", 64)
    x = torch.randn(21, dtype=torch.float64)
    y = x.clone()
    y[place] = -x[place]
    minus_zero = {"plus": torch.zeros(1), "minus": -torch.zeros(1)}
    stored(
        tmp_path, {"x": x, "same": x.clone(), "y": y, "shaped": x.view(3, 7).clone(), "cast": x.long(), **minus_zero}
    )
    checkpoint = open_checkpoint(tmp_path)
    assert bit_equal(checkpoint, "x", "same")
    assert max(read_lengths) <= 64 and sum(read_lengths) == 2 * x.nbytes
    assert not any(bit_equal(checkpoint, "x", other) for other in ("y", "shaped", "cast"))
    assert not bit_equal(checkpoint, "plus", "minus")


def test_the_host_holds_no_more_than_the_buffers(tmp_path, monkeypatch):
    """Reads 200 MB and converts them. The bound allows for pinned memory being counted twice."""
    monkeypatch.setattr(streaming, "BUFFER_BYTES", 2**20)
    name, size = "x", 50_000_000
    stored(tmp_path, {name: torch.zeros(1)})
    header = f'{{"{name}":{{"dtype":"F32","shape":[{size}],"data_offsets":[0,{4 * size}]}}}}'.encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(tmp_path / SINGLE_FILE, 8 + len(header) + 4 * size)
    target = torch.ones(size, dtype=torch.bfloat16, device=DEVICE)
    files = open_checkpoint(tmp_path).tensors
    with HostMemory() as memory:
        run_transfers([Transfer(name, files[name], (slice(0, size),), target)], "test")
    assert not target.any()
    assert memory.peak < 4 * streaming.BUFFERS * 2**20


@pytest.mark.gpu
def test_buffers_for_a_gpu_are_pinned_and_reused_only_after_their_copies(tmp_path, monkeypatch):
    """The tensor fills far more buffers than there are, so that each is reused while copies are in flight."""
    monkeypatch.setattr(streaming, "BUFFER_BYTES", 2**20)
    monkeypatch.setattr(streaming, "BUFFERS", 3)
    x = torch.randn(2**24)
    files = stored(tmp_path, {"x": x})
    ring = streaming.BufferRing(torch.device("cuda"), 1)
    with ring.buffer() as buffer:
        assert buffer.is_pinned() and torch.cuda.current_stream() == ring.stream
    for dtype in (torch.float32, torch.bfloat16):
        target = torch.zeros(2**24, dtype=dtype, device="cuda")
        run_transfers([Transfer("x", files["x"], (slice(0, 2**24),), target)], "test")
        assert torch.equal(target.cpu(), x.to(dtype))
