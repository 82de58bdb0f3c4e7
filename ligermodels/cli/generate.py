"""`ligermodels generate`: continues a prompt or holds a conversation; prints the text as it is generated."""

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence

from ligermodels import hub
from ligermodels.aliases import GENERATE_ALIASES
from ligermodels.cli.flags import Commands, add_command, not_negative, number, positive
from ligermodels.cli.parsing import (
    add_adapter,
    add_device,
    add_dtype,
    add_revision,
    load_with_adapter,
    resolve_model,
)
from ligermodels.errors import InputError, print_to_stderr, printable
from ligermodels.generation.decoding import engine_for
from ligermodels.generation.sampling import Sampling
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer

SAMPLED_PROBABILITY = number(lambda x: 0 < x <= 1, "above 0 and at most 1")


def add_to(commands: Commands) -> None:
    parser = add_command(
        commands, "generate", run, "continue a prompt, or hold a conversation",
        'Qwen/Qwen3-8B --chat --system "Answer in one sentence." --temperature 0.7 --top-p 0.95',
    )  # fmt: skip
    parser.flag_aliases = GENERATE_ALIASES
    parser.add_argument("model", help="a folder or a Hub id, of a model or of an adapter, which names its base")
    add_adapter(parser, "to generate with")
    # fmt: off
    parser.add_argument("--prompt", metavar="TEXT", help="a text to continue; with --chat, the user's message; - for "
        "standard input, which is also read without this flag if it is not a terminal")
    parser.add_argument("--chat", action="store_true", help="use the chat template; without --prompt, each line of "
        "standard input is a message of the user")
    # fmt: on
    parser.add_argument("--system", help="the system message, with --chat")
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="limit of new tokens")
    parser.add_argument("--temperature", type=not_negative, default=0.0, help="0 for greedy decoding")
    parser.add_argument("--top-k", type=positive, help="sample from the k most likely tokens")
    parser.add_argument("--top-p", type=SAMPLED_PROBABILITY, help="sample from the smallest set with this probability")
    parser.add_argument("--seed", type=int, help="seed of the random numbers, for reproducible samples")
    add_dtype(parser, "compute dtype (default: the dtype of the weights)")
    add_device(parser)
    add_revision(parser)


def run(args: argparse.Namespace) -> None:
    if args.system is not None and not args.chat:
        raise InputError("generate: --system needs --chat")
    args.prompt = given_prompt(args)
    folder, adapter = resolve_model(args.model, args)
    tokenizer = hub.load_tokenizer(folder, adapter=adapter)
    if args.chat:  # raises errors of the template before the weights are loaded
        tokenizer.render_chat_template(first_messages(args, "…"), add_generation_prompt=True)
    model = load_with_adapter(folder, adapter, dtype=args.dtype, device=args.device)
    with warnings.catch_warnings(record=True) as caught:
        if args.chat:
            converse(model, tokenizer, args, caught)
        else:
            ids = tokenizer.encode(args.prompt)
            pieces = stream_text(model, tokenizer, ids, args, shown=ids)
            print(args.prompt, end="", flush=True)
            show(pieces, caught)


def given_prompt(args: argparse.Namespace) -> str | None:
    """The prompt of the command line or of standard input; None for a conversation. Raises InputError without one."""
    if args.prompt not in (None, "-") or (args.prompt is None and args.chat):
        return args.prompt
    if args.prompt is None and sys.stdin.isatty():
        raise InputError("generate: --prompt is missing; give a text, pipe one in, or hold a conversation with --chat")
    text = "".join(lines_of_stdin()).rstrip("\n")
    if not text:
        raise InputError("generate: standard input is empty; pipe the prompt in, or give --prompt TEXT")
    return text


def lines_of_stdin() -> Iterator[str]:
    """The lines of standard input, each as soon as it is there. Raises InputError where it is not text."""
    try:
        yield from iter(sys.stdin.readline, "")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: is not text in {error.encoding}; convert it") from error


def first_messages(args: argparse.Namespace, text: str) -> list[dict[str, str]]:
    """The system message, if any, and the user's first message."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]


def converse(
    model: CausalLM, tokenizer: Tokenizer, args: argparse.Namespace, caught: list[warnings.WarningMessage]
) -> None:
    """Answers the prompt, or without one the user's messages until the input ends."""
    messages: list[dict[str, str]] = []
    for text in user_turns(args.prompt):
        messages += [{"role": "user", "content": text}] if messages else first_messages(args, text)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        messages.append({"role": "assistant", "content": show(stream_text(model, tokenizer, ids, args), caught)})


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


def show(pieces: Iterator[str], caught: list[warnings.WarningMessage]) -> str:
    """Prints the pieces of a text as they are generated, then the warnings caught; returns the text."""
    text = ""
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
            text += piece
    finally:
        print()  # an error is a line of its own
    while caught:
        print_to_stderr(printable(f"ligermodels: warning: {caught.pop(0).message}"))
    return text


def stream_text(
    model: CausalLM, tokenizer: Tokenizer, ids: Sequence[int], args: argparse.Namespace, shown: Sequence[int] = ()
) -> Iterator[str]:
    """The text that follows `ids`, piece by piece, up to a stop token of the model or the tokenizer.

    shown: ids whose text has been printed already; the space between the two texts depends on it.
    """
    if not ids:
        raise InputError("generate: the prompt has no tokens; pass a text that is not empty")
    sampling: Sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
    engine = engine_for(model, tokenizer, [ids], args.max_new_tokens, None, sampling, shown)
    return (drawn.text for step in engine.run() for drawn in step)
