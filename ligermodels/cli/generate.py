"""`ligermodels generate`: continues a prompt or holds a conversation; prints the text as it is generated.

Here are its flags. generate_text.py runs it, and generate_file.py with the prompts of a file.
"""

import argparse
from collections.abc import Callable
from numbers import Real

from ligermodels.aliases import GENERATE_ALIASES, flag_of
from ligermodels.cli.console import add_output_flags
from ligermodels.cli.flags import (
    IMAGE_COMMAND,
    Commands,
    add_adapter,
    add_command,
    add_device,
    add_dtype,
    add_quantize,
    add_revision,
    given_prompt,
    number,
    positive,
    whole_number,
)
from ligermodels.errors import InputError
from ligermodels.generation.sampling import CACHE_TOKENS, RULES, Sampling, SamplingOptions
from ligermodels.hub.names import refuse_mistyped

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


def add_generate_command(commands: Commands) -> None:
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
    add_dtype(parser, "compute dtype (default: the dtype of the weights; on a CPU float32)")
    add_quantize(parser, "store the linears and experts of the blocks in this format while they are loaded")
    add_device(parser)
    add_revision(parser)
    add_output_flags(parser)


def option(name: str) -> Callable[[str], float]:
    """The value of an option of sampling."""
    rule = RULES[name]
    return number(rule.holds, rule.words) if rule.kind is Real else whole_number(1, rule.words)


def run(args: argparse.Namespace) -> int:
    refuse_flag_conflicts(args)
    sampling: Sampling = {"stop": args.stop, "n": args.num_samples, "seed": args.seed}
    for name in SAMPLING_FLAGS:
        sampling[name] = getattr(args, name)  # type: ignore[literal-required]
    SamplingOptions(**sampling)  # raises InputError for options that contradict each other
    refuse_mistyped(args.model)
    if args.file is None:
        args.prompt = given_prompt(args)
    from ligermodels.cli.generate_text import generate_from_flags  # imports torch

    return generate_from_flags(args, sampling)


def refuse_flag_conflicts(args: argparse.Namespace) -> None:
    """Raises InputError for flags that exclude each other, or need another one."""
    if args.system is not None and not args.chat:
        raise InputError("generate: --system needs --chat")
    if args.file is not None and args.prompt is not None:
        raise InputError("generate: --file and --prompt are both given; leave out one")
    if args.file is not None and args.json:
        raise InputError("generate: --file writes JSON objects a line; leave out --json")
    if args.file is not None and args.image:
        raise InputError(
            "generate: --image belongs to --prompt or --chat; a line of --file has its images in its field images"
        )
    if args.cache_tokens is not None and not args.chat and args.file is None:
        raise InputError("generate: --cache-tokens needs --chat or --file: the cache of a prompt holds what it needs")
    for flag, given in (("--output", args.output is not None), ("--logprobs", args.logprobs)):
        if given and args.file is None:
            raise InputError(f"generate: {flag} needs --file")
    if args.chat and args.num_samples > 1 and args.file is None:
        raise InputError("generate: --num-samples with --chat needs --file: a conversation continues one answer")
