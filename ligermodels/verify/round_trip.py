"""Loads and exports a checkpoint; checks that tensors, config.json and all other files are unchanged."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligermodels import hub
from ligermodels.layers.decoder import CausalLM
from ligermodels.verify.certificate import Check
from ligermodels.weights.config_file import read_config
from ligermodels.weights.exporting import COPIED_FILES
from ligermodels.weights.files import shortened, tensor_hashes
from ligermodels.weights.loading import STALE_BUFFERS, tied_tensors


def round_trip_checks(folder: Path, device: str) -> list[Check]:
    """Exports in the stored dtype to a temporary folder, which needs as much disk space as the checkpoint."""
    with tempfile.TemporaryDirectory(prefix="ligermodels-verify-") as temporary:
        written = Path(temporary) / "export"
        model = hub.load(folder, device=device)
        hub.export(model, written)
        return [tensors_check(model, folder, written), config_check(folder, written), files_check(folder, written)]


def tensors_check(model: CausalLM, folder: Path, written: Path) -> Check:
    """Compares names and hashes. The second copy of a tied tensor and stale buffers are not written by an export."""
    before, after = tensor_hashes(folder), tensor_hashes(written)
    copies = tied_tensors(model, model.export_rules())
    left_out = {name for name in before.keys() - after.keys() if STALE_BUFFERS.fullmatch(name) or name in copies}
    expected = {name: digest for name, digest in before.items() if name not in left_out}
    changed = sorted(name for name in expected.keys() | after.keys() if expected.get(name) != after.get(name))
    missing = f"; not written, because tied or stale: {shortened(sorted(left_out))}" if left_out else ""
    result = f"{len(changed)} differ: {shortened(changed)}" if changed else f"all {len(after)} equal"
    return Check(
        "tensors after a round trip", not changed, result + missing, "the same names and the same SHA-256 of the bytes",
        {"before": before, "after": after if changed else "the same"},
    )  # fmt: skip


def config_check(folder: Path, written: Path) -> Check:
    """Compares the fields of config.json; an export may add fields."""
    before, after = (flatten_fields(read_config(path)) for path in (folder, written))
    changed = sorted(key for key, value in before.items() if value is not None and after.get(key) != value)
    added = sorted(key for key in after if before.get(key) is None and after[key] is not None)
    result = f"{len(changed)} differ: {shortened(changed)}" if changed else f"all {len(before)} equal"
    return Check(
        "config.json after a round trip", not changed, f"{result}; added: {shortened(added) if added else 'none'}",
        "every field unchanged; fields may be added for other readers",
    )  # fmt: skip


def flatten_fields(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields as a flat dict by their path, such as `rope_scaling.factor`."""
    result: dict[str, Any] = {}
    for key, value in fields.items():
        inner = isinstance(value, Mapping) and value
        result |= flatten_fields(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return result


def files_check(folder: Path, written: Path) -> Check:
    """Compares the bytes of all copied files."""
    names = sorted({str(file.relative_to(folder)) for pattern in COPIED_FILES for file in folder.glob(pattern)})
    changed = [
        name
        for name in names
        if not (written / name).exists() or (written / name).read_bytes() != (folder / name).read_bytes()
    ]
    result = f"{len(changed)} differ: {shortened(changed)}" if changed else f"all {len(names)} equal"
    return Check("other files after a round trip", not changed, result, "tokenizer, templates, licence: the same bytes")
