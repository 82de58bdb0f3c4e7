"""`ligermodels generate --file`: continues the prompts of a JSON-lines file, and writes a line for each sample.

Lines are read as the engine gets room for them and written as samples end, so that neither file is in memory. A run
that was interrupted goes on with the samples that its output does not have.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, Self, TypeVar

from tqdm import tqdm

from ligermodels.cli.console import Console, TokenCount
from ligermodels.cli.generate_images import PromptInputs, PromptReader
from ligermodels.errors import InputError, print_to_stderr, printable
from ligermodels.generation import Engine, GeneratedSample, Sampling
from ligermodels.images.parts import parse_source, take_images
from ligermodels.training.data.formats.record_formats import record_images, with_image_parts
from ligermodels.training.data.formats.records import MAX_RECORD_BYTES, parse_messages
from ligermodels.training.data.formats.sources import whole_path
from ligermodels.training.data.formats.streams import ReadingProgress
from ligermodels.training.data.formats.text_files import decode_json_line, numbered_lines, stream_lines
from ligermodels.units import counted

STANDARD_STREAM = "-"
MAX_RESULT_BYTES = 2 * MAX_RECORD_BYTES  # of a line that is written: that of the input, and its completion
FIRST_FIELD = b'{"index": '  # of every line that is written
RESULT_FIELDS = ("index", "sample", "completion", "finish_reason", "ids", "logprobs")  # fields that a line gets
Parsed = TypeVar("Parsed")


class Encoder(Protocol):
    """Turns the fields of a line, whose place is given for errors, into (inputs, the tokens whose text the completion
    continues)."""

    def __call__(self, fields: Mapping[str, Any], place: str) -> tuple[PromptInputs, Sequence[int]]: ...


@dataclass(frozen=True)
class PromptLine:
    """A line of the input. index: of the lines that are not blank, from 0."""

    index: int
    fields: dict[str, Any]


class Written(NamedTuple):
    """What an output already has of a line: a digest of the line's fields, and the numbers of the samples."""

    digest: bytes
    samples: set[int]


def prompt_encoder(reader: PromptReader, source: str, chat: bool, system: str | None) -> Encoder:
    """source: the file, in whose folder images are; of standard input in the current one. chat: a text is the user's
    message, after the system message; otherwise it is continued."""
    folder = Path() if source == STANDARD_STREAM else Path(source).parent

    def encode(fields: Mapping[str, Any], place: str) -> tuple[PromptInputs, Sequence[int]]:
        prompt, beside = fields["prompt"], record_images(fields)
        if isinstance(prompt, str) and not chat:
            images = [parse_source(image, f"images[{number}]") for number, image in enumerate(beside)]
            inputs = reader.of_text(prompt, [whole_path(image, folder, place) for image in images])
            return inputs, inputs.ids
        if isinstance(prompt, str):
            messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
            messages.append({"role": "user", "content": prompt})
        elif not isinstance(prompt, list):
            raise InputError("field prompt must be a text or a list of messages")
        elif system is not None:
            raise InputError("field prompt is a list of messages; put the message of --system into it")
        else:
            messages = parse_messages(prompt, "prompt", images=True)
        messages, images = take_images(with_image_parts(messages, len(beside)), beside, "prompt")
        return reader.of_messages(messages, [whole_path(image, folder, place) for image in images]), ()

    return encode


def generate_file(
    engine: Engine, encode: Encoder, source: str, target: str, max_new_tokens: int, sampling: Sampling, logprobs: bool,
    console: Console,
) -> int:  # fmt: skip
    """Writes the completions of a file's prompts; returns the number of lines that cannot be used.

    source, target: files, or "-" for standard input and output. Such a line is reported on stderr as one line.
    Raises InputError for an output that has other lines than those of this input.
    """
    if STANDARD_STREAM not in (source, target) and Path(source).resolve() == Path(target).resolve():
        raise InputError(f"--output {target}: is the input; give another file")
    written = {} if target == STANDARD_STREAM else results_in(Path(target))
    total = None if source == STANDARD_STREAM else sum(1 for _ in raw_lines(source))
    with ExitStack() as stack:
        output = sys.stdout.buffer if target == STANDARD_STREAM else stack.enter_context(open_output(Path(target)))
        progress = stack.enter_context(PromptProgress(total, console))
        batch = PromptBatch(engine, encode, prompt_lines(source), written, max_new_tokens, sampling, progress)
        for line, sample in batch.results():
            write(output, encode_result(line, sample, logprobs), target)
    return progress.refused


def write(output: BinaryIO, line: bytes, target: str) -> None:
    try:
        output.write(line)
        output.flush()
    except OSError as error:
        if target == STANDARD_STREAM:
            raise
        remedy = "make room, and run the same command again"
        raise InputError(f"--output {target}: not written: {error.strerror}; {remedy}") from error


class PromptBatch:
    """The lines that the engine works on, and those that it has yet to get."""

    def __init__(
        self, engine: Engine, encode: Encoder, lines: Iterator[tuple[int, str, bytes]], written: dict[int, Written],
        max_new_tokens: int, sampling: Sampling, progress: "PromptProgress",
    ) -> None:  # fmt: skip
        self.engine, self.encode, self.lines, self.written = engine, encode, lines, written
        self.max_new_tokens, self.sampling, self.progress = max_new_tokens, sampling, progress
        self.samples = sampling.get("n", 1)
        self.submitted: dict[int, PromptLine] = {}  # by request
        self.remaining: dict[int, int] = {}  # samples of a request that have not ended

    def results(self) -> Iterator[tuple[PromptLine, GeneratedSample]]:
        """The samples of all lines that the output does not have, as they end."""
        self.submit()
        for step in self.engine.run():
            self.progress.add_tokens(len(step))
            for sample in (drawn.sample.completion() for drawn in step if drawn.sample.finish_reason is not None):
                line = self.submitted[sample.request]
                if line.index not in self.written or sample.sample not in self.written[line.index].samples:
                    yield line, sample
                self.count(sample.request)
            self.submit()

    def count(self, request: int) -> None:
        """Counts a sample of a request that has ended."""
        self.remaining[request] -= 1
        if not self.remaining[request]:
            del self.remaining[request], self.submitted[request]
            self.progress.add_line()

    def submit(self) -> None:
        """Submits lines until as many requests wait as samples may run at a time."""
        while len(self.engine.waiting) < self.engine.max_rows and (entry := next(self.lines, None)) is not None:
            index, place, raw = entry
            fields = self.attempt(place, parse_line, raw, place)
            if fields is None:
                continue
            if index in self.written and self.written[index].digest != digest(fields):
                raise InputError(f"{place}: the output has results of another line here; give another --output")
            if index in self.written and self.written[index].samples.issuperset(range(self.samples)):
                self.progress.keep_line()
                continue
            request = self.attempt(place, self.submit_line, index, fields, place)
            if request is not None:
                self.submitted[request], self.remaining[request] = PromptLine(index, fields), self.samples

    def attempt(self, place: str, function: Callable[..., Parsed], *arguments: Any) -> Parsed | None:
        """What the function returns; None, after a line on stderr, for a line that cannot be used."""
        try:
            return function(*arguments)
        except InputError as error:
            message = str(error).removeprefix("generate: ")
            self.progress.refuse(message if message.startswith(f"{place}:") else f"{place}: {message}")
            return None

    def submit_line(self, index: int, fields: Mapping[str, Any], place: str) -> int:
        """The number of the line's request. Its random numbers depend on its index."""
        inputs, shown = self.encode(fields, place)
        options: dict[str, Any] = {"shown": shown, "stream": index, "images": inputs.images, **self.sampling}
        return self.engine.submit(inputs.ids, max_new_tokens=self.max_new_tokens, **options)


class PromptProgress:
    """A progress bar on a terminal, a line at the end, and a line for each line that cannot be used; all on stderr."""

    def __init__(self, total: int | None, console: Console) -> None:
        hidden = console.quiet or not sys.stderr.isatty()
        self.bar = tqdm(total=total, unit=" prompts", dynamic_ncols=True, disable=hidden, leave=False)
        self.console, self.count = console, TokenCount()
        self.lines = self.kept = self.refused = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.bar.close()
        if kind is not None:
            return
        kept = f", {self.kept:,} of them answered by an earlier command" if self.kept else ""
        refused = f"; {counted(self.refused, 'line')} cannot be used" if self.refused else ""
        self.console.note(f"{counted(self.lines, 'prompt')}{kept}, {self.count}{refused}")

    def add_tokens(self, count: int) -> None:
        self.count.tokens += count
        self.bar.set_postfix_str(str(self.count), refresh=False)
        self.bar.update(0)

    def add_line(self) -> None:
        self.lines += 1
        self.bar.update()

    def keep_line(self) -> None:
        """Counts a line whose completions an earlier command wrote, whatever its model and flags were."""
        self.kept += 1
        self.add_line()

    def refuse(self, message: str) -> None:
        self.refused += 1
        with tqdm.external_write_mode(sys.stderr):
            print_to_stderr(printable(f"ligermodels: {message}"))
        self.bar.update()


def raw_lines(source: str) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their line numbers."""
    if source == STANDARD_STREAM:
        return stream_lines(sys.stdin.buffer, "standard input")
    return numbered_lines(Path(source), ReadingProgress(source, None))


def prompt_lines(source: str) -> Iterator[tuple[int, str, bytes]]:
    """(index, place, content) of the lines of the input."""
    name = "standard input" if source == STANDARD_STREAM else source
    for index, (number, line) in enumerate(raw_lines(source)):
        yield index, f"{name}:{number}", line


def parse_line(raw: bytes, place: str) -> dict[str, Any]:
    """The fields of a line. Raises InputError without a prompt, and for fields that the output has of its own."""
    fields = decode_json_line(raw, place)
    if not isinstance(fields, dict) or "prompt" not in fields:
        raise InputError('has no field prompt; must be an object such as {"prompt": "Once upon a time"}')
    taken = [name for name in RESULT_FIELDS if name in fields]
    if taken:
        raise InputError(f"has a field {taken[0]}, which is one of the results; rename it")
    try:
        json.dumps(fields, allow_nan=False)
    except ValueError:
        raise InputError("has a number that is infinite or NaN, which JSON does not have; correct it") from None
    return fields


def encode_result(line: PromptLine, sample: GeneratedSample, logprobs: bool) -> bytes:
    result: dict[str, Any] = {"index": line.index, "sample": sample.sample, **line.fields}
    result |= {"completion": sample.text, "finish_reason": sample.finish_reason}
    if logprobs:
        result |= {"ids": sample.ids, "logprobs": sample.logprobs}
    return json.dumps(result, ensure_ascii=False).encode() + b"\n"


def results_in(target: Path) -> dict[int, Written]:
    """What an output has of each line, by its index. A last line that is incomplete does not count. Raises InputError
    for a file that has other lines than `encode_result` writes."""
    written: dict[int, Written] = {}
    for number, line in enumerate(lines_of_output(target), 1):
        if len(line) == MAX_RESULT_BYTES:
            raise InputError(f"{target}:{number}: is longer than any result of generate; give another --output")
        if not line.endswith(b"\n") and (line.startswith(FIRST_FIELD) or FIRST_FIELD.startswith(line)):
            break
        fields = decode_json_line(line, f"{target}:{number}") if line.startswith(FIRST_FIELD) else {}
        if not all(type(value := fields.get(name)) is int and value >= 0 for name in RESULT_FIELDS[:2]):
            raise InputError(f"{target}:{number}: is not a result of generate; give another --output")
        own = {name: value for name, value in fields.items() if name not in RESULT_FIELDS}
        written.setdefault(fields["index"], Written(digest(own), set())).samples.add(fields["sample"])
    return written


def lines_of_output(target: Path) -> Iterator[bytes]:
    """The lines of a file; none of what is not a file, as /dev/null."""
    if target.is_file():
        with target.open("rb") as stream:
            while line := stream.readline(MAX_RESULT_BYTES):
                yield line


@contextmanager
def open_output(target: Path) -> Iterator[BinaryIO]:
    """The output, behind its last complete line. Raises InputError if it cannot be written."""
    stream = appended(target)
    try:
        yield stream
    finally:
        with suppress(OSError):  # of what `write` could not flush, and has reported
            stream.close()


def appended(target: Path) -> BinaryIO:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        complete = sum(len(line) for line in lines_of_output(target) if line.endswith(b"\n"))
        if target.is_file():
            os.truncate(target, complete)
        # Not blocking: opening a pipe that nobody reads is an error, in place of waiting for a reader.
        descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "ab")
    except OSError as error:
        raise InputError(f"--output {target}: cannot be written: {error.strerror}") from error


def digest(fields: dict[str, Any]) -> bytes:
    return blake2b(json.dumps(fields, ensure_ascii=False).encode(), digest_size=8).digest()
