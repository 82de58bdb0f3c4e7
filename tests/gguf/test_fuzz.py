"""Files with a changed header are loaded, or refused in one line: nothing else is raised, whatever the bytes say."""

import random
import re
import struct

import pytest

import ligermodels
from ligermodels.errors import InputError
from tests.gguf.files import write_model
from tests.interop.folders import tiny_model

CHANGES = 60  # of each seed: each is a whole load
SIZES = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    return write_model(tiny_model("llama", **SIZES), tmp_path_factory.mktemp("whole"), "q8_0").read_bytes()


@pytest.mark.parametrize("seed", range(3))
def test_a_model_with_a_changed_header_is_loaded_or_refused(tmp_path, content, seed):
    generator, refused = random.Random(seed), 0
    # The metadata in front of the tokens, those behind the merges, and the descriptions of tensors: where a change
    # means most.
    parts = [(24, content.index(b"tokenizer.ggml.tokens")), (content.index(b"tokenizer.ggml.eos_token_id"), None)]
    end = content.index(b"blk.0.ffn_down.weight") + 64
    for number in range(CHANGES):
        changed = bytearray(content)
        start, stop = generator.choice(parts)
        for _ in range(generator.randint(1, 3)):
            changed[generator.randrange(start, stop or end)] = generator.choice(
                [0, 1, 0x7F, 0xFF, generator.randrange(256)]
            )
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(changed)
        try:
            ligermodels.load(file)
            ligermodels.load_tokenizer(file)
        except InputError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 2000
        file.unlink()
    assert refused > CHANGES // 3


@pytest.mark.parametrize(
    ("key", "kind", "value", "words"),
    [
        ("block_count", "I", 2**31 - 1, "llama.block_count is 2147483647, but its tensors are of 1 blocks"),
        ("block_count", "I", 0, "llama.block_count is 0, but"),
        ("embedding_length", "I", 33, "llama.embedding_length is 33, but token_embd.weight has 32"),
        ("feed_forward_length", "I", 3, "llama.feed_forward_length is 3, but blk.0.ffn_down.weight has 64"),
        ("attention.head_count_kv", "I", 1, "llama.attention.head_count_kv * llama.attention.key_length is 16, but bl"),
        ("context_length", "I", 0, "llama.context_length is 0; must be positive"),
        ("rope.freq_base", "f", -1.0, "llama.rope.freq_base is -1.0; must be positive"),
    ],
)
def test_a_wrong_size_is_refused_by_the_file_and_its_key(tmp_path, content, key, kind, value, words):
    place = re.search(rb"llama\." + key.encode() + rb"[\x04\x06]\0\0\0", content).end()
    file = tmp_path / "x.gguf"
    file.write_bytes(content[:place] + struct.pack(f"<{kind}", value) + content[place + 4 :])
    with pytest.raises(InputError) as error:
        ligermodels.load(file)
    assert str(error.value).startswith(f"{file}: {words}")


def test_tensors_that_do_not_fit_are_refused_by_the_file(tmp_path, content):
    file = tmp_path / "x.gguf"
    file.write_bytes(content.replace(b"blk.0.attn_norm.weight", b"blk.0.attn_morn.weight"))
    with pytest.raises(InputError) as error:
        ligermodels.load(file)
    assert str(error.value).startswith(f"{file}: the weights do not fit its metadata: 1 missing: model.layers.0.input")
