"""A process that renders chat templates, started by `template_process.py`; it imports nothing else of the package.

A template is a program from the Hub. Jinja's sandbox keeps it from Python's internals. Whatever it computes, the kernel
ends this process after its share of processor time, gives it no more than its share of memory, and opens it neither
file nor socket: limits that no single call can escape, be it a power, a padding or the comparison of two nested lists.

Requests and replies are lines of JSON on stdin and stdout: {template, variables, seconds, characters} is answered by
{text, spans} or {error, line}.
"""

import functools
import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2.debug  # loaded now, for no file can be opened later
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace


class OutputTooLong(Exception):
    """The text has more characters than it may."""


class Output:
    """The text so far, and where in it the blocks {% generation %} lie: pairs of offsets in characters."""

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
    """{% generation %} … {% endgeneration %} around what the assistant says."""

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
    """Jinja's namespace, whose attributes would otherwise be a way around the sandbox's rule for underscores."""

    def __init__(*args: Any, **values: Any) -> None:  # `self` is a name that a template may use
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
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def new_environment() -> ImmutableSandboxedEnvironment:
    """What templates of the Hub are written for: the environment that transformers gives them."""
    extensions = [Generation, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "namespace": PublicNamespace,
        "dict": lambda *args, **values: dict(*args, **values),  # the type itself has more attributes than are needed
    }
    return environment


compile_template = functools.lru_cache(maxsize=16)(new_environment().from_string)
# What Python reads from files at first use: a codec for string literals, two modules for filters, the time zone.
FIRST_USES = '{{ "x" | pprint | wordwrap }}{{ strftime_now("%c") }}'


def handle_request(request: bytes) -> dict[str, Any]:
    """The reply to a request, from whose beginning the seconds count."""
    try:
        fields = json.loads(request)
        signal.setitimer(signal.ITIMER_PROF, fields["seconds"])  # nobody handles SIGPROF: it ends the process
        return render_template(fields["template"], fields["variables"], fields["characters"])
    except MemoryError as error:
        return {"error": "needs more memory than it may use", "line": line_of(error)}
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
    """Where in the template it was raised."""
    line, trace = None, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def set_limits(memory: int) -> None:
    """memory: in bytes, of address space."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    compile_template(FIRST_USES).render()
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def serve() -> None:
    for request in iter(sys.stdin.buffer.readline, b""):
        reply = json.dumps(handle_request(request), ensure_ascii=False)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(reply.encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    set_limits(int(sys.argv[1]))
    serve()
