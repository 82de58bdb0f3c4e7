"""Random damage: a damaged folder either loads exactly what its files contain, or is refused with an InputError.

A case is determined by its seed. It changes one file of a valid folder, in its JSON values or in its bytes.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from torch.testing import assert_close

import ligermodels
from ligermodels.architectures import ARCHITECTURES
from ligermodels.errors import InputError
from ligermodels.weights.files import open_checkpoint
from ligermodels.weights.loading import select_layout
from tests.cases import CASES
from tests.refusals import limited_memory
from tests.weights.raw_files import safetensors_bytes

SEEDS, GROUPS = 240, 4
MIB = 64
FAMILIES = (
    "llama",
    "llama-tied",
    "llama-rope-llama3",
    "phi3-longrope-long",
    "olmo3-rope-yarn",
    "gemma3",
    "qwen3_moe",
    "granitemoe",
)
FIELDS = sorted(
    {field for family in ARCHITECTURES.values() for field in family.Config.__dataclass_fields__}
    | {"dtype", "rope_scaling", "rope_parameters", "rope_theta", "quantization_config", "text_config", "architectures"}
    | {
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "attention_factor",
        "factor",
        "rope_local_base_freq",
    }
)
VALUES = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 1000, 2**20, 2**31, 2**53, 2**63 - 1, -(2**63), 2**63, 2**64, 10**30,
    0.0, 0.5, 1.0, -2.5, 1e-308, 1e308, float("inf"), float("nan"), "", "a", "a\nb\0", "\ud800", "x" * 5000, "bfloat16",
    "float16", "yarn", "llama3", "linear", "dynamic", "longrope", "gelu", "qwen2", "mistral", "F16", "BF16", "I8",
    [], [0], [1, 2, 3], [0, 2**62], ["full_attention", "sliding_attention"], [[[]]], {}, {"": 0},
    {"rope_type": "yarn", "factor": 2.0}, {"rope_type": "linear", "factor": 0.5}, {"rope_type": "dynamic", "factor": 9},
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
     "original_max_position_embeddings": 8},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1e-30] * 4},
    {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "yarn", "factor": 4.0}},
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Valid folders; every second one has several shards."""
    made = []
    for number, name in enumerate(FAMILIES):
        folder = tmp_path_factory.mktemp("healthy") / name
        ligermodels.export(ligermodels.create(CASES[name]), folder, max_shard_size=60_000 if number % 2 else 10**9)
        ligermodels.load(folder)  # so that the one-time costs of the first load are not counted for a case
        made.append(folder)
    return made


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_damaged_folder_loads_what_its_files_contain_or_is_refused(group, folders):
    outcomes = [check(seed, folders) for seed in range(group, SEEDS, GROUPS)]
    assert 0.05 < outcomes.count("loaded") / len(outcomes) < 0.5  # otherwise the damage is too severe or too mild


def check(seed: int, folders: list[Path]) -> str:
    """The outcome of one case. Raises AssertionError if it is neither a correct load nor a proper refusal."""
    rng = random.Random(seed)
    folder = rng.choice(folders)
    file = rng.choice([*sorted(folder.iterdir()), folder / "config.json", folder / "config.json"])
    healthy = file.read_bytes()
    damaged, how = damage(rng, file.name, healthy)
    file.write_bytes(damaged)
    try:
        return outcome(folder)
    except Exception as error:
        raise AssertionError(f"seed {seed}, {file}: {'; '.join(how)}: {type(error).__name__}: {error}") from error
    finally:
        file.write_bytes(healthy)


def outcome(folder: Path) -> str:
    with limited_memory(MIB):
        try:
            model = ligermodels.load(folder)
        except InputError as error:
            message = str(error)
            assert message.isprintable() and len(message) < 20_000, message
            return "refused"
    assert_holds(model, folder)
    return "loaded"


def assert_holds(model, folder: Path) -> None:
    """Checks that every parameter equals the tensors as the safetensors library reads them."""
    checkpoint = open_checkpoint(folder)
    parameters = dict(model.named_parameters())
    filled = dict.fromkeys(parameters, 0)
    for piece in select_layout(checkpoint, model)[1]:
        with safe_open(checkpoint.tensors[piece.tensor].file, framework="pt") as stored:
            expected = stored.get_tensor(piece.tensor)
        box = parameters[piece.parameter].detach()[piece.index]
        assert_close(box.reshape(piece.shape), expected.to(box.dtype), rtol=0, atol=0, equal_nan=True)
        filled[piece.parameter] += box.numel()
    assert filled == {name: parameter.numel() for name, parameter in parameters.items()}


def damage(rng: random.Random, name: str, content: bytes) -> tuple[bytes, list[str]]:
    """The damaged content, and a description of the damage."""
    how: list[str] = []
    if name.endswith(".safetensors"):
        end = 8 + int.from_bytes(content[:8], "little")
        kind = rng.choice(("header's JSON", "header's JSON", "header's bytes", "file's bytes"))
        if kind == "header's JSON":
            text = changed_json(rng, content[8:end], how)
            return safetensors_bytes(text + b" " * (-len(text) % 8), content[end:]), how
        if kind == "header's bytes":
            return safetensors_bytes(changed_bytes(rng, content[8:end], how), content[end:]), how
        return changed_bytes(rng, content, how), how
    if rng.random() < 0.75:
        return changed_json(rng, content, how), how
    return changed_bytes(rng, content, how), how


def changed_bytes(rng: random.Random, content: bytes, how: list[str]) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(min(len(data), rng.choice((8, 200, 10**9)))) if data else 0
        to = at + rng.choice((1, 1, 4, 100))
        change = rng.choice(("flip", "set", "cut", "insert", "delete", "repeat"))
        how.append(f"{change} {at}:{to}")
        if change == "flip" and data:
            data[at] ^= 1 << rng.randrange(8)
        elif change == "set":
            data[at:to] = bytes([rng.randrange(256)]) * len(data[at:to])
        elif change == "cut":
            del data[at:]
        elif change == "insert":
            data[at:at] = rng.randbytes(to - at)
        elif change == "delete":
            del data[at:to]
        else:
            data[at:at] = data[at:to]
    return bytes(data)


def changed_json(rng: random.Random, text: bytes, how: list[str]) -> bytes:
    root = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        change_one(rng, root, how)
    again = json.dumps(root)
    if rng.random() < 0.05 and root:
        key = rng.choice(sorted(root))
        how.append(f"{key} twice")
        again = f"{{{json.dumps(key)}: {json.dumps(rng.choice(VALUES))}, {again[1:]}"
    return again.encode("utf-8", "surrogatepass")


def change_one(rng: random.Random, root: dict[str, Any], how: list[str]) -> None:
    inner = [item for item in containers(root) if item] or [root]
    where = rng.choice(inner)
    keys = list(where) if isinstance(where, dict) else list(range(len(where)))
    if where is root and (not keys or rng.random() < 0.4):
        key = rng.choice(FIELDS)
        root[key] = rng.choice(VALUES)
        how.append(f"{key} = {str(root[key])[:80]}")
        return
    key = rng.choice(keys)
    change = rng.choice(("replace", "replace", "near", "near", "delete", "rename", "swap", "nest"))
    how.append(f"{change} {key}")
    if change == "replace":
        where[key] = rng.choice(VALUES)
    elif change == "near":
        where[key] = near(rng, where[key])
    elif change == "delete":
        del where[key]
    elif change == "rename" and isinstance(where, dict):
        where[rng.choice([*FIELDS, key[:-1], key + "x", "", "a\n"])] = where.pop(key)
    elif change == "swap":
        other = rng.choice(keys)
        where[key], where[other] = where[other], where[key]
    else:
        for _ in range(rng.choice((1, 60, 150))):
            where[key] = [where[key]]
    how[-1] += f" -> {str(where[key])[:80]}" if isinstance(where, dict) and key in where else ""


def near(rng: random.Random, value: Any) -> Any:
    """A value similar to the given one."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return rng.choice((value + 1, value - 1, value * 2, value // 2, -value, float(value), str(value), [value]))
    if isinstance(value, str):
        return rng.choice((value[1:], value + "é", value.upper(), value[::-1], [value]))
    return rng.choice((value[:-1], value * 2, value[::-1])) if isinstance(value, list) else list(value)


def containers(root: Any) -> list[Any]:
    """All objects and lists within a JSON value."""
    found = [root]
    for value in found:  # the list grows during the iteration
        items = value.values() if isinstance(value, dict) else value
        found += [item for item in items if isinstance(item, dict | list)]
    return found
