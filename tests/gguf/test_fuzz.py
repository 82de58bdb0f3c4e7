"""Files with a changed header are loaded, or refused in one line: nothing else is raised, whatever the bytes say."""

import random
import re

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


def test_more_blocks_than_tensors_are_refused_before_a_model_is_built(tmp_path, content):
    place = re.search(rb"llama\.block_count\x04\0\0\0", content).end()
    file = tmp_path / "x.gguf"
    file.write_bytes(content[:place] + b"\xff\xff\xff\x7f" + content[place + 4 :])
    with pytest.raises(InputError, match=r"tensors, too few for 2147483647 blocks \(llama.block_count\)"):
        ligermodels.load(file)
