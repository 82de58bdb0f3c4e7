"""Chat templates: Jinja programs that convert messages into the text format that a model was trained on.

A folder has its template in chat_template.jinja, and further ones in additional_chat_templates/NAME.jinja; otherwise in
tokenizer_config.json, as one template or a list; otherwise in chat_template.json. Templates run in a process with
limits of time, memory and output (`template_worker.py`). It is started with the first template, serves one request at a
time for all threads, and is restarted after it has ended.

BUILT_IN_TEMPLATES are for tokenizers that have none, by name: the formats that models on the Hub were trained on. Each
renders system, user and assistant messages as the template of its format does, and marks what the assistant writes, up
to the token that ends its turn, by {% generation %}. None supports tools.

    chatml    Qwen, SmolLM, OLMo 3                    llama3    Llama 3
    gemma     Gemma 3; Gemma 1 and 2, with system     granite   Granite 3.0; later ones add a system message
    phi3      Phi 3                                   tulu      Tülu, OLMo 2
    zephyr    Zephyr 7B                               mistral   Mistral 7B v0.2, Mixtral 8x7B
    llama2    Llama 2
"""

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ligermodels.errors import CheckpointError, InputError, first_line
from ligermodels.weights.reading import read_json, read_text, safe_file

TEMPLATE_FILE, TEMPLATE_JSON_FILE = "chat_template.jinja", "chat_template.json"
TEMPLATE_FOLDER = "additional_chat_templates"
DEFAULT_TEMPLATE, TOOLS_TEMPLATE = "default", "tool_use"
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # three names of the same message field
# Letters survive any filter; the space tells whether the message was stripped.
CONTINUE_MARK = "CONTINUE_FROM_HERE_5b1c0e9d "
MAX_ERROR_CHARACTERS = 500
MAX_TEMPLATE_BYTES = 10**6  # the largest on the Hub have 60 kB
# Limits of the process that renders templates.
SECONDS = 5.0  # of processor time, which other load on the machine does not count towards
ELAPSED_SECONDS = 60.0
# All renderings of a template may take this processor time, and more for each and for each byte of its variables: ten
# times and more what templates take that only write their messages.
FREE_SECONDS, SECONDS_EACH, SECONDS_A_BYTE = 60.0, 0.02, 5e-6
CHARACTERS = 10_000_000
MEMORY_BYTES = 2**29
OUT_OF_MEMORY = 3  # the worker's exit status if it cannot even read a request or write a reply
MAX_REPLY_BYTES = 6 * CHARACTERS + 2**20  # a control character takes six bytes in JSON

# What each template consists of: files of templates/. The first that fits a tokenizer is the one to propose for it.
PARTS_OF_TEMPLATES = {
    "chatml": ("refuse_tools", "chatml"), "llama3": ("refuse_tools", "llama3"),
    "gemma": ("refuse_tools", "take_turns", "gemma"), "granite": ("refuse_tools", "granite"),
    "phi3": ("refuse_tools", "three_roles", "phi3"), "tulu": ("refuse_tools", "three_roles", "tulu"),
    "zephyr": ("refuse_tools", "three_roles", "zephyr"), "mistral": ("refuse_tools", "take_turns", "mistral"),
    "llama2": ("refuse_tools", "take_turns", "llama2"),
}  # fmt: skip


@dataclass(frozen=True)
class ChatTemplate:
    """A template's Jinja source. origin: its file and field, for errors. Raises InputError for a source that is too
    long: compiling it would take a thousand times its memory."""

    source: str
    origin: str

    def __post_init__(self) -> None:
        if len(self.source) > MAX_TEMPLATE_BYTES:
            size = f"{len(self.source)} characters, more than {MAX_TEMPLATE_BYTES}"
            raise InputError(f"{self.origin}: has {size}; it is not a chat template")


@dataclass(frozen=True)
class Rendered:
    """A rendered chat. spans: [start, end) of each {% generation %} block in `text`, in characters."""

    text: str
    spans: tuple[tuple[int, int], ...]


def built_in_template(parts: Sequence[str]) -> str:
    files = resources.files("ligermodels.tokenizer").joinpath("templates")
    sources = (files.joinpath(f"{name}.jinja").read_text(encoding="utf-8") for name in parts)
    return "".join(sources).removesuffix("\n")


BUILT_IN_TEMPLATES = {name: built_in_template(parts) for name, parts in PARTS_OF_TEMPLATES.items()}


def read_templates(folder: Path, config_file: Path, config: Any) -> dict[str, ChatTemplate]:
    """The templates of a folder by name. config: the unchecked field chat_template of tokenizer_config.json."""
    separate = dict(template_files(folder))
    if separate or config is not None:
        return separate or dict(named_templates(config, config_file))
    if not (folder / TEMPLATE_JSON_FILE).exists():
        return {}
    file = safe_file(folder, TEMPLATE_JSON_FILE)
    return dict(named_templates(read_json(file).get("chat_template"), file))


def template_files(folder: Path) -> Iterator[tuple[str, ChatTemplate]]:
    """The templates in .jinja files, with their names."""
    names = [TEMPLATE_FILE] if (folder / TEMPLATE_FILE).exists() else []
    for name in (*names, *sorted(str(file.relative_to(folder)) for file in (folder / TEMPLATE_FOLDER).glob("*.jinja"))):
        file = safe_file(folder, name)
        source = read_text(file, MAX_TEMPLATE_BYTES)
        yield DEFAULT_TEMPLATE if name == TEMPLATE_FILE else file.stem, ChatTemplate(source, str(file))


def named_templates(field: Any, file: Path) -> Iterator[tuple[str, ChatTemplate]]:
    """The templates in the JSON field chat_template, with their names. Raises CheckpointError."""
    origin = f"{file}: field chat_template"
    match field:
        case str():
            yield DEFAULT_TEMPLATE, ChatTemplate(field, origin)
        case [*_]:
            for index, entry in enumerate(field):
                match entry:
                    case {"name": str(name), "template": str(source)}:
                        yield name, ChatTemplate(source, f"{origin}[{index}]")
                    case _:
                        raise CheckpointError(f"{origin}[{index}] is not an object with name and template")
        case _:
            raise CheckpointError(f"{origin} is {type(field).__name__}; must be a template or a list of templates")


def choose_template(
    templates: Mapping[str, ChatTemplate], wanted: str | None, tools: bool, folder: Path | str
) -> ChatTemplate:
    """The template to render with. Raises InputError.

    wanted: a template's name, or the source of a template; None for the default one. If there are `tools`, and the
    folder has a template for tools, that is the default.
    """
    available = f"there is: {', '.join(sorted(templates)) or 'none'}"
    if wanted is None:
        wanted = TOOLS_TEMPLATE if tools and TOOLS_TEMPLATE in templates else DEFAULT_TEMPLATE
        if wanted not in templates:
            raise InputError(f"{folder}: has no chat template named {wanted}; {available}; pass chat_template=…")
    if wanted in templates:
        return templates[wanted]
    if "{" not in wanted:
        raise InputError(f"chat_template: {wanted!r} is neither a template's name nor a template; {available}")
    return ChatTemplate(wanted, "chat_template")


def render_chat(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = False,
    continue_final_message: bool = False, **variables: Any,
) -> Rendered:  # fmt: skip
    """The text of a conversation. variables: further variables of the template.

    continue_final_message: end the text after the last message's content, without what the template adds after it.
    Raises InputError with the template's origin if the template is broken, refuses the messages or exceeds a limit.
    """
    if continue_final_message and add_generation_prompt:
        raise InputError("continue_final_message and add_generation_prompt cannot both be set")
    chat = [normalize_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not chat:
        raise InputError("messages: is empty; a chat template needs at least one")
    final = mark_end(chat[-1]) if continue_final_message else ""
    reply = PROCESS.ask(
        template.source, {"messages": chat, "add_generation_prompt": add_generation_prompt, **variables}
    )
    if "error" in reply:
        line = f", line {reply['line']}" if reply["line"] else ""
        reason = first_line(reply["error"])[:MAX_ERROR_CHARACTERS]
        raise InputError(f"{template.origin}{line}: {reason}{text_advice(reason, chat, template.source)}")
    text = reply["text"]
    if continue_final_message:
        text = cut_at_mark(text, final, template.origin)
    return Rendered(text, tuple((start, min(end, len(text))) for start, end in reply["spans"] if start < len(text)))


def normalize_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A message as templates expect it: without null fields, and with the reasoning under several of its names."""
    if not isinstance(message, Mapping):
        raise InputError(f'{place}: is {type(message).__name__}; must be an object as {{"role": "user", "content": …}}')
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in REASONING_FIELDS if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def text_advice(reason: str, chat: Sequence[Mapping[str, Any]], source: str) -> str:
    """What to write in the place of the first content that is not a text, if that is why a template fails."""
    for index, message in enumerate(chat):
        if "content" not in message and "no attribute 'content'" in reason:
            if "tool_calls" in message and "tool_calls" not in source:
                return f"; it writes no tool calls, which messages[{index}] has: use a template that does"
            return f'; it needs a text in each message: give messages[{index}] one, as "content": ""'
        if isinstance(message.get("content"), list) and re.search(r"\blist\b", reason):
            return f"; it needs a text in each message: write the parts of messages[{index}] as one"
    return ""


def mark_end(message: dict[str, Any]) -> str:
    """Appends CONTINUE_MARK to the message's text, or to its last text part; returns the text without the mark."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + CONTINUE_MARK
        return content
    parts = list(content) if isinstance(content, Sequence) else []
    for index, part in reversed(list(enumerate(parts))):
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            parts[index] = {**part, "text": part["text"] + CONTINUE_MARK}
            message["content"] = parts
            return part["text"]
    raise InputError("messages: the last message has no text, which continue_final_message needs")


def cut_at_mark(text: str, final: str, origin: str) -> str:
    """The text before CONTINUE_MARK. final: the last message's text, which must be in it."""
    before, mark, after = text.rpartition(CONTINUE_MARK.strip())
    if not mark or final.strip() not in before:
        raise InputError(f"{origin}: omits or alters the last message, so it cannot be continued")
    return before if after.startswith(" ") else before.rstrip()  # if the mark was stripped, the message is stripped too


@dataclass
class Cost:
    """What a template has cost so far. renderings: their number. seconds: of processor time, and those that are
    allowed."""

    renderings: int = 0
    seconds: float = 0.0
    allowed: float = FREE_SECONDS

    def add(self, size: int, seconds: float) -> None:
        """Counts a rendering. size: bytes of its variables."""
        self.renderings += 1
        self.seconds += seconds
        self.allowed += SECONDS_EACH + SECONDS_A_BYTE * size


class TemplateProcess:
    """A worker process and its pipes, used by one thread at a time. costs: by a template's source."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.costs: dict[str, Cost] = {}

    def ask(self, template: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The worker's reply: {text, spans} or {error, line}; an error also if the process ended, as over a limit.
        Raises InputError if the variables are not JSON values."""
        limits = {"seconds": SECONDS, "elapsed_seconds": ELAPSED_SECONDS, "characters": CHARACTERS}
        request = {"template": template, "variables": variables, **limits}
        try:
            line = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"the variables of a chat template must be plain JSON values: {error}") from None
        with self.lock:
            cost = self.costs.setdefault(template, Cost())
            if cost.seconds > cost.allowed:
                each = f"{cost.seconds / cost.renderings:.2g} s a chat, {cost.seconds:.0f} s for {cost.renderings}"
                return {"error": f"takes too long: {each}; choose a quicker template", "line": None}
            try:
                answer = self.exchange(line)
            except BaseException:
                self.stop()  # otherwise the next request would get the reply to this one
                raise
            if answer.endswith(b"\n"):
                reply = json.loads(answer.decode("utf-8", "surrogatepass"))
                cost.add(len(line), reply.pop("seconds"))
                return reply
            cost.add(len(line), SECONDS)
            status = self.stop()
        reasons = {
            -signal.SIGPROF: f"takes more than {SECONDS:g} seconds",
            -signal.SIGALRM: f"does not end within {ELAPSED_SECONDS:g} seconds",
            OUT_OF_MEMORY: "needs more memory than the limit",
        }
        reason = reasons.get(status, f"ends with status {status}")
        return {"error": f"the process that renders it {reason}", "line": None}

    def exchange(self, request: bytes) -> bytes:
        """Sends the request; returns the reply, which lacks its final newline if the process ended first."""
        process = self.running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except BrokenPipeError:
            return b""
        return process.stdout.readline(MAX_REPLY_BYTES)

    def running(self) -> subprocess.Popen[bytes]:
        """The worker process, started if necessary."""
        if self.process is not None and self.process.poll() is not None:  # something else ended it
            self.stop()
        if self.process is None:
            worker = Path(__file__).with_name("template_worker.py")
            # -P: do not search the script's folder for imports; it has modules with common names.
            command = [sys.executable, "-P", str(worker), str(MEMORY_BYTES), str(OUT_OF_MEMORY)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self.process

    def stop(self) -> int:
        """Ends the process if it is still running; returns its exit status."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        process.kill()
        process.communicate()
        return process.returncode

    def forget(self) -> None:
        """Called in the child after a fork: the worker process belongs to the parent."""
        self.process = None
        self.lock.release()


PROCESS = TemplateProcess()
atexit.register(PROCESS.stop)
os.register_at_fork(before=PROCESS.lock.acquire, after_in_parent=PROCESS.lock.release, after_in_child=PROCESS.forget)
