"""`ligermodels generate`: continues a prompt or holds a conversation; prints the text as it is generated.

The prompts of a file are those of generate_file.py.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any

from ligermodels import hub
from ligermodels.aliases import GENERATE_ALIASES, flag_of
from ligermodels.cli.flags import UNUSABLE_INPUT, Commands, add_command, number, positive, whole_number
from ligermodels.cli.generate_images import IMAGE_COMMAND, PromptInputs, PromptReader, message_content
from ligermodels.cli.parsing import (
    add_adapter,
    add_device,
    add_dtype,
    add_quantize,
    add_revision,
    load_with_adapter,
    resolve_model,
)
from ligermodels.errors import InputError, print_to_stderr, printable
from ligermodels.generation.capacity import tokens_that_fit
from ligermodels.generation.decoding import engine_for
from ligermodels.generation.engine import DEFAULT_ROWS, Engine
from ligermodels.generation.sampling import RULES, Sampling, SamplingOptions
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer

CACHE_TOKENS = 16384  # on a CPU, or of a conversation with a model that was trained for less; 2 GiB for Llama-3-8B
# The flag of each option of sampling, and what it does; a rule of generation/sampling.py says what it may be.
SAMPLING_FLAGS = {
    "temperature": "0 for greedy decoding",
    "top_k": "sample from the k most likely tokens",
    "top_p": "sample from the smallest set with this probability",
    "min_p": "sample from tokens with at least this part of the highest probability",
    "repetition_penalty": "divides the logits of tokens of the prompt and of generated ones; 1 for none",
    "presence_penalty": "subtracted from the logits of generated tokens; 0 for none",
    "frequency_penalty": "subtracted from the logits of generated tokens for each time; 0 for none",
}


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
    # fmt: off
    parser.add_argument("--image", action="append", default=[], metavar="PATH", help="an image of the prompt, in the "
        "order of its placeholders or before it; with --chat, of the first message; may be repeated. A line "
        f"{IMAGE_COMMAND} PATH of a conversation adds one to the next message")
    parser.add_argument("--file", metavar="PATH", help="JSON lines with a prompt each, a text or a list of messages; "
        "with --chat, a text is the user's message; - for standard input")
    parser.add_argument("--output", metavar="PATH", help="JSON lines with the fields of --file and the completions, in "
        "the order in which they end; what an interrupted run has written is kept (default: standard output)")
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="limit of new tokens")
    for name, meaning in SAMPLING_FLAGS.items():
        default = getattr(SamplingOptions(), name)
        parser.add_argument(flag_of(name), type=option(name), metavar="N", default=default, help=meaning)
    parser.add_argument("--stop", nargs="+", metavar="TEXT", help="texts that end a completion, which is cut before "
        "them")
    parser.add_argument("--num-samples", type=positive, default=1, help="completions of each prompt")
    parser.add_argument("--logprobs", action="store_true", help="with --file, add token ids and their "
        "log-probabilities")
    parser.add_argument("--seed", type=int, help="seed of the random numbers, for reproducible samples")
    parser.add_argument("--cache-tokens", type=positive, help="tokens that the key-value cache holds: the most that a "
        "conversation may have, or all prompts of --file that run at a time (default: what 80 %% of the GPU's free "
        f"memory holds, of a conversation at most what the model was trained for; on a CPU {CACHE_TOKENS})")
    # fmt: on
    add_dtype(parser, "compute dtype (default: the dtype of the weights)")
    add_quantize(parser, "store the linears and experts of the blocks in this format while they are loaded")
    add_device(parser)
    add_revision(parser)


def option(name: str) -> Callable[[str], float]:
    """The value of an option of sampling."""
    rule = RULES[name]
    return number(rule.holds, rule.words) if rule.kind is Real else whole_number(1, rule.words)


def run(args: argparse.Namespace) -> int:
    refuse_flag_conflicts(args)
    sampling = sampling_of(args)
    if args.file is None:
        args.prompt = given_prompt(args)
    folder, adapter = resolve_model(args.model, args)
    tokenizer = hub.load_tokenizer(folder, adapter=adapter)
    reader = PromptReader(folder, tokenizer)
    reader.check(args.image)
    prompt = PromptInputs([])
    if args.chat:  # raises errors of the template before the weights are loaded
        reader.of_messages(first_messages(args, "…" if args.prompt is None else args.prompt, args.image))
    elif args.file is None:
        prompt = reader.of_text(args.prompt, args.image)
    model = load_with_adapter(folder, adapter, dtype=args.dtype, device=args.device, quantize=args.quantize)
    with warnings.catch_warnings(record=True) as caught:
        if args.file is not None:
            return run_file(model, reader, args, sampling)
        if args.chat:
            converse(model, reader, args, sampling, caught)
        else:
            continue_prompt(model, tokenizer, prompt, args, sampling, caught)
    return 0


def refuse_flag_conflicts(args: argparse.Namespace) -> None:
    """Raises InputError for flags that exclude each other, or need another one."""
    if args.system is not None and not args.chat:
        raise InputError("generate: --system needs --chat")
    if args.file is not None and args.prompt is not None:
        raise InputError("generate: --file and --prompt are both given; leave out one")
    if args.file is not None and args.image:
        raise InputError(
            "generate: --image belongs to --prompt or --chat; a line of --file has its images in its field images"
        )
    for flag, given in (("--output", args.output is not None), ("--logprobs", args.logprobs)):
        if given and args.file is None:
            raise InputError(f"generate: {flag} needs --file")
    if args.chat and args.num_samples > 1 and args.file is None:
        raise InputError("generate: --num-samples with --chat needs --file: a conversation continues one answer")


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The options of sampling. Raises InputError for those that contradict each other."""
    sampling: Sampling = {"stop": args.stop, "n": args.num_samples, "seed": args.seed}
    for name in SAMPLING_FLAGS:
        sampling[name] = getattr(args, name)  # type: ignore[literal-required]
    SamplingOptions(**sampling)
    return sampling


def run_file(model: CausalLM, reader: PromptReader, args: argparse.Namespace, sampling: Sampling) -> int:
    """Continues the prompts of --file; returns the exit status."""
    from ligermodels.cli.generate_file import STANDARD_STREAM, generate_file, prompt_encoder  # imports training

    tokens = args.cache_tokens or default_cache_tokens(model, DEFAULT_ROWS)
    engine = Engine(model, tokenizer=reader.tokenizer, max_tokens=tokens)
    encode = prompt_encoder(reader, args.file, args.chat, args.system)
    target = args.output or STANDARD_STREAM
    refused = generate_file(engine, encode, args.file, target, args.max_new_tokens, sampling, args.logprobs)
    return UNUSABLE_INPUT if refused else 0


def default_cache_tokens(model: CausalLM, rows: int) -> int:
    return tokens_that_fit(model, rows) if model.device.type == "cuda" else CACHE_TOKENS


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


def first_messages(args: argparse.Namespace, text: str, images: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The system message, if any, and the user's first message."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": message_content(text, images)}]


def continue_prompt(
    model: CausalLM, tokenizer: Tokenizer, prompt: PromptInputs, args: argparse.Namespace, sampling: Sampling,
    caught: list[warnings.WarningMessage],
) -> None:  # fmt: skip
    """Prints the prompt and its continuation as it is generated; several samples when they have ended."""
    ids, images, end = prompt
    engine = engine_for(model, tokenizer, [ids], args.max_new_tokens, None, sampling, ids, [images])
    if args.num_samples == 1:
        print(args.prompt + end, end="", flush=True)
        show(pieces(engine), caught)
        return
    for sample in engine:
        print(f"--- {sample.sample + 1} ---\n{args.prompt}{end}", end="")
        show(iter([sample.text or ""]), caught)


def converse(
    model: CausalLM, reader: PromptReader, args: argparse.Namespace, sampling: Sampling,
    caught: list[warnings.WarningMessage],
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
        messages.append({"role": "assistant", "content": show(pieces(engine), caught)})
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
    while caught:
        print_to_stderr(printable(f"ligermodels: warning: {caught.pop(0).message}"))
    return text


def pieces(engine: Engine) -> Iterator[str]:
    """The text of the engine's only sample, piece by piece."""
    return (drawn.text for step in engine.run() for drawn in step)
