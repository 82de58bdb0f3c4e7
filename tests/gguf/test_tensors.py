"""Every encoding that gguf decodes, read as a whole and in parts; names and orders of what converters change."""

import gguf
import numpy as np
import pytest
import torch

from ligermodels.errors import CheckpointError, InputError
from ligermodels.weights.gguf.header import GgufHeader, TensorInfo
from ligermodels.weights.gguf.names import GGUF_TYPES
from ligermodels.weights.gguf.tensors import open_gguf
from ligermodels.weights.gguf.writing import PlannedFile, encode, encoding
from ligermodels.weights.streaming import Transfer, read_tensors, run_transfers

TYPES = [
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *(
        "IQ4_NL",
        "IQ4_XS",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ2_S",
        "IQ3_XXS",
        "IQ3_S",
        "IQ1_S",
        "IQ1_M",
        "TQ1_0",
        "TQ2_0",
        "MXFP4",
    ),
]
HEADS, HALF, COLUMNS = 3, 4, 512
ROWS = HEADS * 2 * HALF


def encoded(kind: gguf.GGMLQuantizationType, rows: int) -> np.ndarray:
    """Rows of bytes with finite values."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(0)
    if kind.name in ("F32", "F16", "BF16"):
        return gguf.quants.quantize(generator.standard_normal((rows, COLUMNS), np.float32), kind).view(np.uint8)
    while True:
        data = generator.integers(0, 256, (rows, COLUMNS // block, size), np.uint8)
        data[..., 1::2] &= 0x3B  # no scale in fp16 is infinite, whichever two bytes it has
        data[..., 0] &= 0x7F  # nor one of MXFP4
        data = data.reshape(rows, -1)
        if np.isfinite(gguf.quants.dequantize(data, kind)).all():
            return data


def stored(tmp_path, kind: gguf.GGMLQuantizationType, name: str, shape: tuple[int, ...], **metadata):
    """A file with one tensor; its checkpoint, and its decoded values."""
    data, file = encoded(kind, ROWS), tmp_path / "data"
    file.write_bytes(bytes(96) + data.tobytes())
    info = TensorInfo(file, int(kind), *gguf.GGML_QUANT_SIZES[kind], shape, 96)
    values = gguf.quants.dequantize(data, kind).astype(np.float32)
    return open_gguf(GgufHeader(file, metadata, {name: info})), torch.from_numpy(values)


@pytest.mark.parametrize("name", TYPES)
def test_every_encoding_is_decoded_as_by_gguf_whole_and_in_boxes(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    metadata = {"general.architecture": "qwen2"}
    checkpoint, values = stored(tmp_path, kind, "blk.0.ffn_down.weight", (ROWS, COLUMNS), **metadata)
    [(hub, tensor)] = checkpoint.tensors.items()
    assert hub == "model.layers.0.mlp.down_proj.weight" and tensor.shape == (ROWS, COLUMNS)
    assert torch.equal(read_tensors(checkpoint.tensors)[hub].float(), values)
    for box in ((slice(5, 17), slice(0, COLUMNS)), (slice(3, 4), slice(7, 500))):
        for dtype in (torch.float32, torch.bfloat16):
            target = torch.empty(values[box].shape, dtype=dtype)
            run_transfers([Transfer(hub, tensor, box, target)], "", quiet=True)
            assert torch.equal(target, values[box].to(dtype))


@pytest.mark.parametrize("name", ["F32", "Q4_K"])
def test_the_halves_of_rotary_pairs_are_apart_whatever_rows_are_read(tmp_path, name):
    heads = {"general.architecture": "llama", "llama.attention.head_count": HEADS}
    kind = gguf.GGMLQuantizationType[name]
    checkpoint, values = stored(tmp_path, kind, "blk.7.attn_k.weight", (ROWS, COLUMNS), **heads)
    [(hub, tensor)] = checkpoint.tensors.items()
    expected = values.view(HEADS, HALF, 2, COLUMNS).transpose(1, 2).reshape(ROWS, COLUMNS)
    assert hub == "model.layers.7.self_attn.k_proj.weight" and not torch.equal(expected, values)
    for start, stop in ((0, ROWS), (0, HALF), (3, 13), (ROWS - 1, ROWS)):
        target = torch.empty(stop - start, COLUMNS)
        run_transfers([Transfer(hub, tensor, (slice(start, stop), slice(0, COLUMNS)), target)], "", quiet=True)
        assert torch.equal(target, expected[start:stop])


def test_stacked_experts_are_a_tensor_each(tmp_path):
    experts = {"general.architecture": "llama", "llama.expert_count": 4, "llama.attention.head_count": HEADS}
    kind = gguf.GGMLQuantizationType.Q6_K
    checkpoint, values = stored(tmp_path, kind, "blk.1.ffn_up_exps.weight", (4, ROWS // 4, COLUMNS), **experts)
    names = [f"model.layers.1.block_sparse_moe.experts.{expert}.w3.weight" for expert in range(4)]
    assert list(checkpoint.tensors) == names
    read = read_tensors(checkpoint.tensors)
    assert torch.equal(torch.cat([read[name] for name in names]), values)


def test_an_encoding_that_gguf_does_not_decode_is_refused(tmp_path):
    info = TensorInfo(tmp_path / "data", int(gguf.GGMLQuantizationType.Q8_K), 256, 292, (2, 256), 0)
    header = GgufHeader(tmp_path / "x.gguf", {"general.architecture": "qwen2"}, {"blk.0.ffn_up.weight": info})
    with pytest.raises(CheckpointError, match=r"tensor blk.0.ffn_up.weight has the type 15, which gguf cannot decode"):
        open_gguf(header)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_rows_of_tiny_values_are_written_as_zeros_and_too_large_ones_are_refused(kind):
    values = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    values[1] *= np.float32(1e-38)
    output = PlannedFile("blk.0.ffn_up.weight", ("x",), values.shape, kind)
    decoded = gguf.quants.dequantize(encode(values, output, gguf), gguf.GGMLQuantizationType[kind.upper()])
    assert np.abs(decoded[1]).max() < 1e-37 and np.abs(decoded - values).max() < 0.51 * np.abs(values).max()
    values[2, 5] = 3e7
    if kind in ("f32", "bf16", "mxfp4"):
        assert np.isfinite(gguf.quants.dequantize(encode(values, output, gguf), encoding(gguf, kind))).all()
    else:
        with pytest.raises(
            InputError, match=rf"ffn_up.weight: has a value of 30000000.0, too large for {kind}; choose"
        ):
            encode(values, output, gguf)
