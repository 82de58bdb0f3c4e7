"""Runs `ligermodels generate`: a prompt is continued or answered on standard output, as the text is generated."""

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ligermodels import hub
from ligermodels.cli.console import TokenCount
from ligermodels.cli.flags import (
    IMAGE_COMMAND,
    UNUSABLE_INPUT,
    chosen_device,
    lines_of_stdin,
    load_with_adapter,
    print_warnings,
    resolve_model,
)
from ligermodels.cli.generate_images import PromptInputs, PromptReader, message_content
from ligermodels.errors import InputError, print_to_stderr, printable
from ligermodels.generation.capacity import tokens_that_fit
from ligermodels.generation.decoding import engine_for
from ligermodels.generation.engine import DEFAULT_ROWS, Engine
from ligermodels.generation.sampling import CACHE_TOKENS, Sampling
from ligermodels.hub.models import checkpoint_dtype
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer
from ligermodels.weights.config_file import read_config
from ligermodels.weights.files import open_checkpoint


def generate_from_flags(args: argparse.Namespace, sampling: Sampling) -> int:
    """Runs the command of these flags, with its prompt read; returns the exit status. Raises InputError."""
    device = chosen_device(args)
    folder, adapter = resolve_model(args.model, args)
    tokenizer = hub.load_tokenizer(folder, adapter=adapter)
    reader = PromptReader(folder, tokenizer)
    reader.check(args.image)
    prompt = PromptInputs([])
    if args.chat:  # raises errors of the template before the weights are loaded
        reader.of_messages(first_messages(args, "…" if args.prompt is None else args.prompt, args.image))
    elif args.file is None:
        prompt = reader.of_text(args.prompt, args.image)
    dtype = args.dtype or dtype_on_cpu(folder, device)
    model = load_with_adapter(folder, adapter, dtype=dtype, device=device, quantize=args.quantize)
    with warnings.catch_warnings(record=True) as caught:
        if args.file is not None:
            return run_file(model, reader, args, sampling)
        count = TokenCount()
        if args.chat:
            converse(model, reader, args, sampling, caught, count)
        else:
            continue_prompt(model, tokenizer, prompt, args, sampling, caught, count)
    args.console.note(str(count))
    args.console.record({"new_tokens": count.tokens, "seconds": round(count.seconds, 3)})
    return 0


def dtype_on_cpu(folder: Path, device: torch.device) -> str | None:
    """On a CPU, float32 in place of a narrower dtype of the weights, as `train` chooses it; else None. Most CPUs
    compute faster in it."""
    if device.type != "cpu":
        return None
    stored = checkpoint_dtype(read_config(folder), open_checkpoint(folder))
    return "float32" if stored.itemsize < torch.float32.itemsize else None


def run_file(model: CausalLM, reader: PromptReader, args: argparse.Namespace, sampling: Sampling) -> int:
    """Continues the prompts of --file; returns the exit status."""
    from ligermodels.cli.generate_file import STANDARD_STREAM, generate_file, prompt_encoder  # imports training

    tokens = args.cache_tokens or default_cache_tokens(model, DEFAULT_ROWS)
    engine = Engine(model, tokenizer=reader.tokenizer, max_tokens=tokens)
    encode = prompt_encoder(reader, args.file, args.chat, args.system)
    target = args.output or STANDARD_STREAM
    refused = generate_file(
        engine, encode, args.file, target, args.max_new_tokens, sampling, args.logprobs, args.console
    )
    return UNUSABLE_INPUT if refused else 0


def default_cache_tokens(model: CausalLM, rows: int) -> int:
    return tokens_that_fit(model, rows) if model.device.type == "cuda" else CACHE_TOKENS


def first_messages(args: argparse.Namespace, text: str, images: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The system message, if any, and the user's first message."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": message_content(text, images)}]


def continue_prompt(
    model: CausalLM, tokenizer: Tokenizer, prompt: PromptInputs, args: argparse.Namespace, sampling: Sampling,
    caught: list[warnings.WarningMessage], count: TokenCount,
) -> None:  # fmt: skip
    """Prints the prompt and its continuation as it is generated; several samples when they have ended."""
    ids, images, end = prompt
    engine = engine_for(model, tokenizer, [ids], args.max_new_tokens, None, sampling, ids, [images])
    if args.num_samples == 1:
        print(args.prompt + end, end="", flush=True)
        text = show(pieces(engine, count), caught)
        args.console.record({"prompt": args.prompt, "completion": text})
        return
    for sample in engine:
        count.tokens += len(sample.ids)
        print(f"--- {sample.sample + 1} ---\n{args.prompt}{end}", end="")
        text = show(iter([sample.text or ""]), caught)
        args.console.record({"prompt": args.prompt, "sample": sample.sample, "completion": text})


def converse(
    model: CausalLM, reader: PromptReader, args: argparse.Namespace, sampling: Sampling,
    caught: list[warnings.WarningMessage], count: TokenCount,
) -> None:  # fmt: skip
    """Answers the prompt, or without one the user's messages until the input ends."""
    trained = max(model.config.trained_length, CACHE_TOKENS)
    tokens = args.cache_tokens or min(default_cache_tokens(model, 1), trained)
    engine = Engine(model, tokenizer=reader.tokenizer, max_tokens=tokens, max_rows=1)
    messages: list[dict[str, Any]] = []
    images = list(args.image)
    for text in user_turns(args.prompt):
        command, _, path = text.partition(" ")
        if command == IMAGE_COMMAND:
            images += named_image(reader, path.strip())
            continue
        content = message_content(text, images)
        messages += [{"role": "user", "content": content}] if messages else first_messages(args, text, images)
        images = []
        inputs = reader.of_messages(messages)
        engine.submit(inputs.ids, max_new_tokens=args.max_new_tokens, shown=(), images=inputs.images, **sampling)
        messages.append({"role": "assistant", "content": show(pieces(engine, count), caught)})
        args.console.record(messages[-1])
    if images:
        raise InputError(f"generate: the image {images[-1]} has no message behind it; give one, or leave the image out")


def named_image(reader: PromptReader, path: str) -> list[str]:
    """The image of a line of a conversation. At a terminal, one that cannot be read is reported and left out."""
    try:
        if not path:
            raise InputError(f"generate: {IMAGE_COMMAND} has no path; write {IMAGE_COMMAND} PATH")
        reader.check([path])
    except InputError as error:
        if not sys.stdin.isatty():
            raise
        print_to_stderr(printable(f"ligermodels: {error}"))
        return []
    return [path]


def user_turns(prompt: str | None) -> Iterator[str]:
    """The prompt, or without one the lines that the user types or pipes in."""
    if prompt is not None:
        yield prompt
        return
    for line in typed_lines() if sys.stdin.isatty() else lines_of_stdin():
        if text := line.strip():
            yield text


def typed_lines() -> Iterator[str]:
    """The lines that are typed at a prompt of ours, until Ctrl-D."""
    import readline  # noqa: F401  gives input() line editing and a history

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


def show(text_pieces: Iterator[str], caught: list[warnings.WarningMessage]) -> str:
    """Prints the pieces of a text as they are generated, then the warnings caught; returns the text."""
    text = ""
    try:
        for piece in text_pieces:
            print(piece, end="", flush=True)
            text += piece
    finally:
        print()  # an error is a line of its own
    print_warnings(caught)
    return text


def pieces(engine: Engine, count: TokenCount) -> Iterator[str]:
    """The text of the engine's only sample, piece by piece. Counts its tokens."""
    for step in engine.run():
        count.tokens += len(step)
        yield from (drawn.text for drawn in step)
