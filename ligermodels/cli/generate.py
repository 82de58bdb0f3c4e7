"""`ligermodels generate`: continues a prompt or holds a conversation; prints the text as it is generated."""

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence

from ligermodels import hub
from ligermodels.cli.flags import Commands, add_command, not_negative, number, positive
from ligermodels.cli.parsing import (
    add_adapter,
    add_device,
    add_dtype,
    add_revision,
    load_with_adapter,
    resolve_model,
)
from ligermodels.errors import InputError
from ligermodels.generation.decoding import model_stop_tokens, stream
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer

SAMPLED_PROBABILITY = number(lambda x: 0 < x <= 1, "above 0 and at most 1")


def add_to(commands: Commands) -> None:
    parser = add_command(
        commands, "generate", run, "continue a prompt, or hold a conversation",
        'Qwen/Qwen3-8B --chat --system "Answer in one sentence." --temperature 0.7 --top-p 0.95',
    )  # fmt: skip
    parser.add_argument("model", help="a folder or a Hub id, of a model or of an adapter, which names its base")
    add_adapter(parser, "to generate with")
    parser.add_argument("--prompt", help="a text to continue; with --chat, the user's message")
    parser.add_argument("--chat", action="store_true", help="use the chat template; interactive without --prompt")
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
    if args.prompt is None and not (args.chat and sys.stdin.isatty()):
        raise InputError("generate: --prompt is missing; it is optional only with --chat at a terminal")
    if args.system is not None and not args.chat:
        raise InputError("generate: --system needs --chat")
    folder, adapter = resolve_model(args.model, args)
    tokenizer = hub.load_tokenizer(folder, adapter=adapter)
    if args.chat:  # raises errors of the template before the weights are loaded
        tokenizer.render_chat_template(first_messages(args, "…"), add_generation_prompt=True)
    model = load_with_adapter(folder, adapter, dtype=args.dtype, device=args.device)
    if args.chat:
        converse(model, tokenizer, args)
    else:
        print(args.prompt, end="", flush=True)
        ids = tokenizer.encode(args.prompt)
        show(stream_text(model, tokenizer, ids, args, shown=ids))


def first_messages(args: argparse.Namespace, text: str) -> list[dict[str, str]]:
    """The system message, if any, and the user's first message."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]


def converse(model: CausalLM, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Answers the prompt, or without one the user's messages until the input ends."""
    messages: list[dict[str, str]] = []
    for text in user_turns(args.prompt):
        messages += [{"role": "user", "content": text}] if messages else first_messages(args, text)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        messages.append({"role": "assistant", "content": show(stream_text(model, tokenizer, ids, args))})


def user_turns(prompt: str | None) -> Iterator[str]:
    """The prompt, or without one the lines that the user types."""
    if prompt is not None:
        yield prompt
        return
    import readline  # noqa: F401  gives input() line editing and a history

    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        if text:
            yield text


def show(pieces: Iterator[str]) -> str:
    """Prints the pieces of a text as they are generated; returns the text."""
    text = ""
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
            text += piece
    finally:
        print()  # an error is a line of its own
    return text


def stream_text(
    model: CausalLM, tokenizer: Tokenizer, ids: Sequence[int], args: argparse.Namespace, shown: Sequence[int] = ()
) -> Iterator[str]:
    """The text that follows `ids`, piece by piece, up to a stop token of the model or the tokenizer.

    shown: ids whose text has been printed already; the space between the two texts depends on it.
    """
    if not ids:
        raise InputError("generate: the prompt has no tokens; pass a text that is not empty")
    hidden = len(tokenizer.decode(shown))
    for piece in decode_pieces(tokenizer, itertools.chain(shown, new_tokens(model, tokenizer, ids, args))):
        yield piece[hidden:]
        hidden = max(0, hidden - len(piece))


def new_tokens(model: CausalLM, tokenizer: Tokenizer, ids: Sequence[int], args: argparse.Namespace) -> Iterator[int]:
    """The generated ids up to a stop token."""
    stops = model_stop_tokens(model) | {tokenizer.eos_token_id}
    tokens = stream(model, [ids], args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed)
    return itertools.takewhile(lambda token: token not in stops, (token for (token,) in tokens))


def decode_pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The text of the ids, piece by piece."""
    decoder = tokenizer.decode_stream()
    for token in ids:
        yield decoder.step(token) or ""
    yield decoder.flush()
