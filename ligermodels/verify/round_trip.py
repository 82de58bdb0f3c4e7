"""Checks that a checkpoint survives loading and exporting, and that its texts become the reference's tokens."""

import filecmp
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ligermodels import hub
from ligermodels.errors import CheckpointError, InputError
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.files import TOKENIZER_FILE
from ligermodels.verify import reference
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
    result, criterion = differing(changed, len(after)) + missing, "the same names and the same SHA-256 of the bytes"
    hashes = {"before": before, "after": after if changed else "the same"}
    return Check("tensors after a round trip", not changed, result, criterion, hashes)


def config_check(folder: Path, written: Path) -> Check:
    """Compares the fields of config.json; an export may add fields."""
    before, after = (flatten_fields(read_config(path)) for path in (folder, written))
    changed = sorted(key for key, value in before.items() if value is not None and after.get(key) != value)
    added = sorted(key for key in after if before.get(key) is None and after[key] is not None)
    result = f"{differing(changed, len(before))}; added: {shortened(added) if added else 'none'}"
    criterion = "every field unchanged; fields may be added for other readers"
    return Check("config.json after a round trip", not changed, result, criterion)


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
    _, different, missing = filecmp.cmpfiles(folder, written, names, shallow=False)
    changed, criterion = sorted([*different, *missing]), "tokenizer, templates, licence: the same bytes"
    return Check("other files after a round trip", not changed, differing(changed, len(names)), criterion)


def differing(changed: Sequence[str], count: int) -> str:
    return f"{len(changed)} differ: {shortened(changed)}" if changed else f"all {count} equal"


TEXTS = (
    "The quick brown fox jumps over 1,234 lazy dogs; isn't that 56.78 % more?  \n\tIndented, then\n\na paragraph.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. L'été, où êtes-vous ? ¿Qué pasó, señor Núñez?",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. עברית והעברית, العربية جميلة.",
    "我能吞下玻璃而不伤身体。いろはにほへと ちりぬるを。키스의 고유조건은 입술끼리 만나야 한다. हिन्दी में एक वाक्य।",
    "x  1   22    333 and ½ of   4 ²/₃",
    "def f(x: int) -> str:\n    return f'{x**2:>8}'  # naïve café — 👩‍👩‍👧‍👦 🇺🇳 e\u0301",
)
SAMPLE_CONVERSATIONS = (
    [{"role": "user", "content": "Hello, who are you?"}],
    [
        {"role": "system", "content": "You are a careful assistant."},
        {"role": "user", "content": "Wie spät ist es?"},
        {"role": "assistant", "content": "Zwölf Uhr."},
        {"role": "user", "content": "  And now?\n"},
    ],
)
IDS, CHAT = "token ids", "chat template"


def text_checks(folder: Path) -> list[Check]:
    """The checks of token ids and chat template; skipped if the folder has no tokenizer.json."""
    if not (folder / TOKENIZER_FILE).exists():
        return [Check(name, None, f"the folder has no {TOKENIZER_FILE}", "") for name in (IDS, CHAT)]
    ours = hub.load_tokenizer(folder)
    try:
        theirs, stored = (reference.load_reference_tokenizer(folder, as_stored=exact) for exact in (False, True))
    except CheckpointError as error:
        return [Check(name, False, str(error), "both read the tokenizer") for name in (IDS, CHAT)]
    return [ids_check(ours, theirs, stored), chat_check(ours, theirs)]


def ids_check(ours: Tokenizer, theirs: Any, stored: Any) -> Check:
    """stored: the tokenizer of tokenizer.json alone, which decides where that of transformers departs from it."""
    pairs, departs = [], 0
    for text in TEXTS:
        mine, other, exact = ours.encode(text), *(list(side(text)["input_ids"]) for side in (theirs, stored))
        departs += mine == exact != other
        pairs.append((mine, exact if mine == exact else other))
    check = comparison_check(IDS, "texts", pairs, f"the same ids for {len(TEXTS)} texts in many languages and code")
    note = f"; {type(theirs).__name__} of transformers departs from {TOKENIZER_FILE} in {departs}"
    return replace(check, result=check.result + note) if departs else check


def chat_check(ours: Tokenizer, theirs: Any) -> Check:
    if ours.chat_template is None:
        return Check(CHAT, None, "the folder has none", "")
    render, render_theirs = ours.render_chat_template, partial(theirs.apply_chat_template, tokenize=False)
    pairs = [
        (render_or_none(render, chat, InputError), render_or_none(render_theirs, chat, Exception))
        for chat in SAMPLE_CONVERSATIONS
    ]
    return comparison_check(CHAT, "conversations", pairs, "the same text, or both refuse")


def render_or_none(render: Callable[..., str], chat: Sequence[Any], refusal: type[Exception]) -> str | None:
    """The rendered text, or None if the template refuses the conversation, as some refuse a system message."""
    try:
        return render(chat, add_generation_prompt=True)
    except refusal:
        return None


def comparison_check(name: str, what: str, pairs: list[tuple[Any, Any]], criterion: str) -> Check:
    """The check that all pairs are equal; the certificate shows the first pair that differs."""
    different = [pair for pair in pairs if pair[0] != pair[1]]
    result = f"{len(different)} of {len(pairs)} {what} differ" if different else f"all {len(pairs)} {what} equal"
    first = dict(zip(("ours", "reference"), different[0], strict=True)) if different else {}
    return Check(name, not different, result, criterion, first)
