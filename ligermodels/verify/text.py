"""Compares token ids of fixed texts and rendered conversations with those of the reference implementation."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ligermodels import hub
from ligermodels.errors import CheckpointError, InputError
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.files import TOKENIZER_FILE
from ligermodels.verify import reference
from ligermodels.verify.certificate import Check

TEXTS = (
    "The quick brown fox jumps over 1,234 lazy dogs; isn't that 56.78 % more?  \n\tIndented, then\n\na paragraph.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. L'été, où êtes-vous ? ¿Qué pasó, señor Núñez?",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. עברית והעברית, العربية جميلة.",
    "我能吞下玻璃而不伤身体。いろはにほへと ちりぬるを。키스의 고유조건은 입술끼리 만나야 한다. हिन्दी में एक वाक्य।",
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


def has_tokenizer_json(folder: Path) -> bool:
    """Whether the folder has a tokenizer that both sides read."""
    return (folder / TOKENIZER_FILE).exists()


def text_checks(folder: Path) -> list[Check]:
    """The checks of token ids and chat template; skipped if the folder has no tokenizer.json."""
    if not has_tokenizer_json(folder):
        return [Check(name, None, f"the folder has no {TOKENIZER_FILE}", "") for name in (IDS, CHAT)]
    ours = hub.load_tokenizer(folder)
    try:
        theirs = reference.load_reference_tokenizer(folder)
    except CheckpointError as error:
        return [Check(name, False, str(error), "both read the tokenizer") for name in (IDS, CHAT)]
    return [ids_check(ours, theirs), chat_check(ours, theirs)]


def ids_check(ours: Tokenizer, theirs: Any) -> Check:
    pairs = [(ours.encode(text), reference.encode_text(theirs, text)) for text in TEXTS]
    return comparison_check(IDS, "texts", pairs, f"the same ids for {len(TEXTS)} texts in many languages and code")


def chat_check(ours: Tokenizer, theirs: Any) -> Check:
    if ours.chat_template is None:
        return Check(CHAT, None, "the folder has none", "")
    pairs = [
        (
            render_or_none(partial(ours.render_chat_template, chat, add_generation_prompt=True), InputError),
            render_or_none(partial(reference.render_reference_chat, theirs, chat), Exception),
        )
        for chat in SAMPLE_CONVERSATIONS
    ]
    return comparison_check(CHAT, "conversations", pairs, "the same text, or both refuse")


def render_or_none(render: Callable[[], str], refusal: type[Exception]) -> str | None:
    """The rendered text, or None if the template refuses the conversation, as some refuse a system message."""
    try:
        return render()
    except refusal:
        return None


def comparison_check(name: str, what: str, pairs: list[tuple[Any, Any]], criterion: str) -> Check:
    """The check that all pairs are equal; the certificate shows the first pair that differs."""
    different = [pair for pair in pairs if pair[0] != pair[1]]
    result = f"{len(different)} of {len(pairs)} {what} differ" if different else f"all {len(pairs)} {what} equal"
    first = dict(zip(("ours", "reference"), different[0], strict=True)) if different else {}
    return Check(name, not different, result, criterion, first)
