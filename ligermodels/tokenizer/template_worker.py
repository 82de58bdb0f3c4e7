"""The worker process that renders chat templates. `chat_template.py` starts it; it imports nothing of the package.

A template is an untrusted program from the Hub. Jinja's sandbox blocks access to Python's internals. The operating
system limits the process: it is killed after a limit of CPU time or of elapsed time, gets a limited address space, and
cannot open files or sockets. These limits also hold within a single call, such as a huge power, a padding to gigabytes
or the comparison of two deeply nested lists.

Requests and replies are lines of JSON on stdin and stdout: the reply to {template, variables, seconds, elapsed_seconds,
characters} is {text, spans} or {error, line}, and the seconds of processor time that it took.
"""

import functools
import json
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2.debug  # imported now, because no file can be opened later
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace


class OutputTooLong(Exception):
    """The rendered text has more characters than the limit."""


class Output:
    """The text rendered so far. spans: (start, end) in characters of its {% generation %} blocks."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.length = 0
        self.spans: list[tuple[int, int]] = []

    def add(self, piece: str, characters: int) -> None:
        self.length += len(piece)
        if self.length > characters:
            raise OutputTooLong(f"makes more than {characters} characters")
        self.pieces.append(piece)


class Generation(jinja2.ext.Extension):
    """The tag {% generation %} … {% endgeneration %}, which encloses the assistant's text."""

    tags = {"generation"}  # noqa: RUF012
    output = Output()

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        start = Generation.output.length
        Generation.output.spans.append((start, start + len(text)))
        return text


class PublicNamespace(Namespace):
    """Jinja's namespace without underscore attributes, which would bypass the sandbox's rule for underscores."""

    def __init__(*args: Any, **values: Any) -> None:  # no parameter `self`: a template may use that as a keyword
        Namespace.__init__(*args, **values)
        for name in dict(*args[1:], **values):
            refuse_private(name)

    def __setitem__(self, name: str, value: Any) -> None:
        refuse_private(name)
        super().__setitem__(name, value)


def refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r} that begins with an underscore")


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """JSON without HTML escapes, which Jinja's own filter would add."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def lipsum(*_: Any, **__: Any) -> None:
    """In place of Jinja's function, which imports a module, and so opens a file."""
    raise SecurityError("calls the function lipsum, which is not allowed")


def new_environment() -> ImmutableSandboxedEnvironment:
    """The Jinja environment of transformers, for which templates on the Hub are written."""
    extensions = [Generation, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "lipsum": lipsum,
        "namespace": PublicNamespace,
        "dict": lambda *args, **values: dict(*args, **values),  # a function, without the attributes of the type
    }
    return environment


compile_template = functools.lru_cache(maxsize=16)(new_environment().from_string)
# Uses everything that Python loads from files on first use: a codec for string literals, two modules, the time zone.
FIRST_USES = '{{ "x" | pprint | wordwrap }}{{ strftime_now("%c") }}'


def handle_request(request: bytes) -> dict[str, Any]:
    """The reply to a request. The time limits start here."""
    try:
        fields = json.loads(request)
        signal.setitimer(signal.ITIMER_PROF, fields["seconds"])  # these signals have no handler: they end the process
        signal.setitimer(signal.ITIMER_REAL, fields["elapsed_seconds"])
        return render_template(fields["template"], fields["variables"], fields["characters"])
    except MemoryError as error:
        return {"error": "needs more memory than the limit", "line": line_of(error)}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"is not a Jinja template: {error.message}", "line": error.lineno}
    except (jinja2.TemplateError, OutputTooLong) as error:
        return {"error": str(error), "line": line_of(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "line": line_of(error)}


def render_template(template: str, variables: dict[str, Any], characters: int) -> dict[str, Any]:
    output = Generation.output = Output()
    for piece in compile_template(template).generate(variables):
        output.add(piece, characters)
    return {"text": "".join(output.pieces), "spans": output.spans}


def line_of(error: BaseException) -> int | None:
    """The template's line that raised the error, if known."""
    line, trace = None, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def set_limits(memory: int) -> None:
    """Applies the limits to this process. memory: bytes of address space."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    compile_template(FIRST_USES).render()
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def serve() -> None:
    """Answers requests until stdin is closed."""
    for request in iter(sys.stdin.buffer.readline, b""):
        began = time.process_time()
        answer = handle_request(request)
        reply = json.dumps(answer | {"seconds": time.process_time() - began}, ensure_ascii=False)
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        sys.stdout.buffer.write(reply.encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    set_limits(memory=int(sys.argv[1]))
    try:
        serve()
    except MemoryError:
        sys.exit(int(sys.argv[2]))
