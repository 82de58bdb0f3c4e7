"""Small data sets of real text, made from what Python and this repository ship: no network, the same files every time.

    python -m benchmarks.real_models.data FOLDER

| files (each with -train and -validation) | |
|---|---|
| questions.jsonl | chats: what a function or class of the standard library does, with its docstring as the answer |
| calls.jsonl | chats: a request in plain words, and the tool call that it means, as one JSON object |
| topics.jsonl | text: the language reference, as `help("with")` prints it |
| pairs.jsonl | preferences: the answer to a question, and a rambling one or that to another question |
| prompts.jsonl | prompts with the column `name`, for the reward of `brief.py` |

prose.jsonl has text of another kind, the prose of this repository's documentation: the perplexity on it says whether a
model still knows what it was not trained on. The standard library differs a little between versions of Python.
"""

import hashlib
import importlib
import inspect
import json
import locale
import mimetypes
import random
import re
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from typing import Any

Record = dict[str, Any]
REPOSITORY = Path(__file__).parents[2]
QUESTIONS, CALLS, PAIRS, PROMPTS, HELD_OUT = 1000, 1000, 640, 960, 96
ANSWER_CHARACTERS = range(40, 500)  # of a docstring's first paragraph
MODULES = """
    argparse array ast asyncio base64 binascii bisect builtins bz2 calendar cmd code codecs codeop collections colorsys
    compileall concurrent.futures configparser contextlib copy csv ctypes dataclasses datetime decimal difflib dis
    doctest email.message email.policy email.utils enum filecmp fileinput fnmatch fractions ftplib functools gc getopt
    gettext glob graphlib gzip hashlib heapq hmac html html.parser http.client http.cookies http.server imaplib
    importlib inspect io ipaddress itertools json keyword linecache locale logging logging.handlers lzma mailbox math
    mimetypes multiprocessing netrc operator os os.path pathlib pdb pickle pickletools pkgutil platform plistlib poplib
    pprint profile pstats queue quopri random re reprlib runpy sched secrets select selectors shelve shlex shutil
    signal smtplib socket socketserver sqlite3 ssl stat statistics string struct subprocess symtable sys sysconfig
    tarfile tempfile textwrap threading time timeit token tokenize trace traceback tracemalloc types typing unicodedata
    unittest unittest.mock urllib.error urllib.parse urllib.request uuid warnings wave weakref webbrowser wsgiref.util
    xml.dom.minidom xml.etree.ElementTree xml.sax.saxutils xmlrpc.client zipapp zipfile zipimport zlib
"""
PHRASINGS = (
    "What does `{}` do?", "What is `{}` for?", "Explain `{}` from Python's standard library.",
    "When would I use `{}`?", "I found `{}` in a program. What is it?", "Describe `{}` briefly.",
    "Python: {}?", "Can you tell me what `{}` does and how to call it?",
)  # fmt: skip
BRIEFLY = ("In one short sentence, what does `{}` do?", "Say in a few words what `{}` is for.", "`{}`, very briefly?")
OPENINGS = (
    "That is a great question, and I am happy to help you with it! ",
    "Python is a popular programming language that is used by many people all over the world. ",
    "There are many things that could be said about this topic, so let us go through it step by step. ",
)
ENDINGS = (
    " I hope that this answers your question! If there is anything else, please let me know, I will be happy to help.",
    " As you can see, this is very useful. In conclusion, it is an important part of Python, and it is worth learning.",
    " There are many more details, which depend on what you want to do. It is always good to read more about it.",
)


def order(text: str) -> str:
    """What records are shuffled by: it does not depend on the run, the machine or the other records."""
    return hashlib.sha256(text.encode()).hexdigest()


def pick(options: Sequence[str], text: str) -> str:
    return options[int(order(text + "/pick")[:8], 16) % len(options)]


def available_modules() -> Iterator[ModuleType]:
    """Some systems have Python without some of its modules."""
    for name in MODULES.split():
        try:
            yield importlib.import_module(name)
        except ImportError:
            print(f"data: this Python has no {name}: skipped", file=sys.stderr)


def documented() -> dict[str, str]:
    """{name: the first paragraph of its docstring, and how it is called} of public functions, classes and methods.

    Of several with one paragraph, the first stays.
    """
    found: dict[str, tuple[str, Any]] = {}  # by the paragraph
    for name, thing in public_things():
        paragraph = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
        if len(paragraph) in ANSWER_CHARACTERS and paragraph[0].isalpha():
            found.setdefault(paragraph, (name, thing))
    return {name: answer(paragraph, name, thing) for paragraph, (name, thing) in found.items()}


def public_things() -> Iterator[tuple[str, Any]]:
    """The names and values of functions and classes, each class followed by its methods."""
    for module in available_modules():
        prefix = "" if module.__name__ == "builtins" else f"{module.__name__}."
        for name, thing in sorted(vars(module).items()):
            if name.startswith("_") or not (inspect.isclass(thing) or inspect.isroutine(thing)):
                continue
            yield prefix + name, thing
            for part, member in sorted(vars(thing).items()) if inspect.isclass(thing) else ():
                if not part.startswith("_") and inspect.isroutine(member):
                    yield f"{prefix}{name}.{part}", member


def answer(paragraph: str, name: str, thing: Any) -> str:
    """The paragraph, and the signature where Python knows one that is short and the same in every process."""
    try:
        called = f"{name.rsplit('.', 1)[-1]}{inspect.signature(thing)}"
    except (TypeError, ValueError):
        return paragraph
    return f"{paragraph}\n\nCall: `{called}`" if " at 0x" not in called and len(called) < 120 else paragraph


def chat(question: str, answer: str) -> Record:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def pair(question: str, answer: str, other: str) -> Record:
    """Every second pair has the answer to another question, the rest a rambling one."""
    rambling = pick(OPENINGS, question) + answer.split("\n\n")[0] + pick(ENDINGS, question)
    wrong = pick((other, rambling), answer)
    prompt, chosen, rejected = [{"role": "user", "content": question}], answer, wrong
    sides = {"chosen": chosen, "rejected": rejected}
    return {"prompt": prompt} | {side: [{"role": "assistant", "content": text}] for side, text in sides.items()}


def prompt(name: str) -> Record:
    return {"prompt": [{"role": "user", "content": pick(BRIEFLY, name).format(name)}], "name": name.rsplit(".", 1)[-1]}


# Requests for tools: each function returns a request in plain words and the call that it means.

NAMES = ("Anna", "Bilal", "Chen", "Dora", "Emeka", "Farah", "Goran", "Hana", "Ines", "Jonas", "Kofi", "Lena", "Mateo")
THINGS = ("report", "invoice", "minutes", "photo", "backup", "draft", "budget", "slides", "contract", "song", "map")
PATHS = ("orders", "users", "search", "login", "cart", "images", "health", "reviews", "basket", "tickets")
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TYPES = sorted((end, kind) for end, kind in mimetypes.types_map.items() if len(end) < 6)
LOCALES = sorted({name: code for name, code in locale.locale_alias.items() if name.isalpha() and len(name) > 5}.items())


def send_file(draw: random.Random) -> tuple[str, Record]:
    end, kind = draw.choice(TYPES)
    path, to = f"{draw.choice(THINGS)}-{draw.randint(1, 99)}{end}", draw.choice(NAMES)
    request = draw.choice(("Send {0} to {1}.", "{1} needs the file {0}, please send it.", "Could you mail {0} to {1}?"))
    return request.format(path, to), {"tool": "send_file", "path": path, "type": kind, "to": to}


def log_response(draw: random.Random) -> tuple[str, Record]:
    status, method = draw.choice(list(HTTPStatus)), draw.choice(("GET", "POST", "PUT", "DELETE"))
    path, time = f"/{draw.choice(PATHS)}/{draw.randint(1, 999)}", draw.randint(2, 900)
    request = draw.choice((
        "{0} {1} came back with {2} after {3} ms.", "Log that {0} {1} gave a {2}, it took {3} milliseconds.",
        "We got {2} for {0} {1} in {3} ms.",
    ))  # fmt: skip
    call = {"tool": "log_response", "method": method, "path": path, "status": int(status), "reason": status.phrase}
    return request.format(method, path, int(status), time), call | {"milliseconds": time}


def insert_character(draw: random.Random) -> tuple[str, Record]:
    character = chr(draw.choice((*range(0xA1, 0x17F), *range(0x391, 0x3A0), *range(0x2190, 0x21B0))))
    name, line, column = unicodedata.name(character, "PILCROW SIGN").lower(), draw.randint(1, 400), draw.randint(1, 80)
    request = draw.choice(("Put a {0} at line {1}, column {2}.", "Insert the character {0} in line {1} at column {2}."))
    call = {"tool": "insert_character", "codepoint": f"U+{ord(character):04X}", "line": line, "column": column}
    return request.format(name, line, column), call


def schedule(draw: random.Random) -> tuple[str, Record]:
    day, hour, minute, who = (
        draw.choice(WEEKDAYS),
        draw.randint(1, 11),
        draw.choice((0, 15, 30, 45)),
        draw.choice(NAMES),
    )
    words = {0: "{0} o'clock", 15: "quarter past {0}", 30: "half past {0}", 45: "{0}:45"}[minute].format(hour)
    evening = draw.random() < 0.5
    request = draw.choice(
        ("Meet {0} on {1} at {2} in the {3}.", "{1} {3}, {2}: call {0}.", "Remind me of {0}, {1} {3} at {2}.")
    )
    at = f"{hour + 12 * evening:02}:{minute:02}"
    text = request.format(who, day, words, "evening" if evening else "morning")
    return text, {"tool": "schedule", "with": who, "day": day, "at": at}


def set_locale(draw: random.Random) -> tuple[str, Record]:
    name, code = draw.choice(LOCALES)
    language, _, encoding = code.partition(".")
    request = draw.choice(("Switch the program to {0}.", "{0}, please.", "I would like to have the texts in {0}."))
    return request.format(name.capitalize()), {"tool": "set_locale", "locale": language, "encoding": encoding or None}


def send_signal(draw: random.Random) -> tuple[str, Record]:
    kind, process = draw.choice([kind for kind in signal.Signals if signal.strsignal(kind)]), draw.randint(100, 32000)
    request = draw.choice(("Send {0} to process {1}.", "Process {1} should get a {0}.", "{1} has to receive {0} now."))
    return request.format(kind.name, process), {"tool": "send_signal", "signal": int(kind), "process": process}


TOOLS: tuple[Callable[[random.Random], tuple[str, Record]], ...] = (
    send_file, log_response, insert_character, schedule, set_locale, send_signal,
)  # fmt: skip
CALLS_SYSTEM = "Answer with the tool call that the request means, as one JSON object."


def calls(count: int) -> list[Record]:
    """Requests that all differ."""
    draw, records = random.Random(0), {}
    while len(records) < count:
        request, call = draw.choice(TOOLS)(draw)
        messages = [{"role": "system", "content": CALLS_SYSTEM}, *chat(request, json.dumps(call))["messages"]]
        records[request] = {"messages": messages}
    return list(records.values())


def topics() -> list[Record]:
    """The topics of `help()`. Long topics repeat the paragraphs of short ones, which stay only where they are first."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    documents = []
    for _, text in sorted(topics.items(), key=lambda item: (len(item[1]), item[0])):
        paragraphs = [part for part in dict.fromkeys(text.strip().split("\n\n")) if part not in seen]
        seen.update(paragraphs)
        if len(document := "\n\n".join(paragraphs)) > 500:
            documents.append({"text": document})
    return sorted(documents, key=lambda record: order(record["text"]))


def prose() -> list[Record]:
    """The paragraphs of README.md and docs/*.md: no headings, tables, lists or code; links have their text alone."""
    documents = []
    for path in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))):
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        paragraphs = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", part.strip()) for part in text.split("\n\n")]
        kept = [part for part in paragraphs if len(part) > 120 and part[0].isalpha() and "\n|" not in part]
        documents.append({"text": "\n\n".join(kept)})
    return [document for document in documents if document["text"]]


def data_sets() -> dict[str, tuple[list[Record], list[Record]]]:
    """{name: (training records, validation records)}. What is held out for one set is in no other's training part."""
    items = sorted(documented().items(), key=lambda item: order(item[0]))
    asked = [(pick(PHRASINGS, name).format(name), answer) for name, answer in items]
    pairs = [pair(*item, other) for item, (_, other) in zip(asked, asked[1:] + asked[:1], strict=True)]
    prompts = [prompt(name) for name, _ in items]
    requests, documents = calls(CALLS + HELD_OUT), topics()
    return {
        "questions": ([chat(*item) for item in asked[HELD_OUT:][:QUESTIONS]], [chat(*i) for i in asked[:HELD_OUT]]),
        "calls": (requests[HELD_OUT:], requests[:HELD_OUT]),
        "topics": (documents[len(documents) // 8 :], documents[: len(documents) // 8]),
        "pairs": (pairs[HELD_OUT:][:PAIRS], pairs[:HELD_OUT]),
        "prompts": (prompts[HELD_OUT:][:PROMPTS], prompts[:HELD_OUT]),
    }


def write(folder: Path, most: int | None = None) -> None:
    """most: of validation records, and of prose; ten times that of training records. None for all."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"prose": prose()[:most]}
    for name, (training, validation) in data_sets().items():
        parts |= {f"{name}-train": training[: most and 10 * most], f"{name}-validation": validation[:most]}
    for name, records in parts.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        print(f"{path}: {len(records):,} records, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
