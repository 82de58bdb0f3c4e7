"""`ligermodels export`: writes a checkpoint in another dtype, with other shards, with a merged adapter, or as GGUF."""

import argparse
import functools
from pathlib import Path

from ligermodels import hub
from ligermodels.cli.flags import (
    Commands,
    add_adapter,
    add_command,
    add_dtype,
    add_quantize,
    add_revision,
    load_with_adapter,
    print_line,
    resolve_model,
)
from ligermodels.errors import InputError
from ligermodels.hub.names import refuse_mistyped
from ligermodels.units import MAX_SHARD_SIZE, byte_size, counted, size_in_bytes
from ligermodels.weights.gguf.names import GGUF_TYPES, SUFFIX, is_gguf


def add_export_command(commands: Commands) -> None:
    parser = add_command(
        commands, "export", run,
        "convert a checkpoint: another dtype, another shard size, with a merged adapter, or to or from GGUF",
        "Qwen/Qwen3-8B out/ --adapter my-adapter/ --max-shard-size 2GB",
    )  # fmt: skip
    parser.add_argument(
        "source", help="a folder, a GGUF file or a Hub id, of a model or of an adapter, which names its base"
    )
    parser.add_argument(
        "output", type=Path, help=f"a folder that is empty or does not exist yet, or a {SUFFIX} file; see --overwrite"
    )
    add_dtype(parser, "dtype of the written weights (default: the stored dtype)")
    parser.add_argument(
        "--max-shard-size",
        help="bytes per file, such as 500MB or 2GiB; without it, the source's files keep their sizes "
        f"(default: {MAX_SHARD_SIZE})",
    )
    parser.add_argument(
        "--gguf-type", choices=GGUF_TYPES, help=f"of the matrices of a {SUFFIX} file (default: by the stored dtype)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the model that is in the output")
    add_adapter(parser, "to merge into the weights")
    add_quantize(parser, "write NF4 as bitsandbytes does, or FP8 by block; an adapter cannot be merged into it")
    add_revision(parser)


def run(args: argparse.Namespace) -> None:
    if is_gguf(args.output):
        export_to_gguf(args)
    else:
        export_to_folder(args)


def export_to_gguf(args: argparse.Namespace) -> None:
    unused = {"--dtype": args.dtype, "--quantize": args.quantize, "--max-shard-size": args.max_shard_size}
    given = [flag for flag, value in unused.items() if value is not None]
    if given:
        raise InputError(f"{given[0]} is for folders; --gguf-type says how the matrices of {args.output} are written")
    refuse_mistyped(args.source)
    from ligermodels.hub.gguf import refuse_target

    refuse_target(args.output, args.overwrite)  # before the weights are read
    folder, adapter = resolve_model(args.source, args)
    tokenizer = hub.load_tokenizer(folder, adapter=adapter)
    model = load_with_adapter(folder, adapter)
    hub.export_gguf(model, args.output, gguf_type=args.gguf_type, tokenizer=tokenizer, overwrite=args.overwrite)
    print_line(f"{args.output}: {byte_size(args.output.stat().st_size)}")


def export_to_folder(args: argparse.Namespace) -> None:
    if args.gguf_type:
        raise InputError(f"--gguf-type {args.gguf_type}: is for an output that ends with {SUFFIX}, not {args.output}")
    if args.quantize and args.dtype is not None:
        raise InputError("--quantize and --dtype both say how weights are written; leave one out")
    if args.max_shard_size is not None:
        size_in_bytes(args.max_shard_size)
    refuse_mistyped(args.source)
    from ligermodels.tokenizer.files import has_tokenizer
    from ligermodels.weights.exporting import EXPORTED_FILES, replace_tokenizer
    from ligermodels.weights.writing import refuse_in_use

    refuse_in_use(args.output.absolute(), EXPORTED_FILES if args.overwrite else ())  # before the weights are read
    folder, adapter = resolve_model(args.source, args)
    if args.quantize and adapter:
        raise InputError(
            f"--quantize {args.quantize}: an adapter is merged in full precision: export it merged, then quantise that"
        )
    model = load_with_adapter(folder, adapter, quantize=args.quantize)
    also = functools.partial(replace_tokenizer, adapter) if adapter and has_tokenizer(adapter) else None
    options = {"dtype": args.dtype, "max_shard_size": args.max_shard_size, "overwrite": args.overwrite}
    hub.export(model, args.output, also=also, **options)
    sizes = [file.stat().st_size for file in args.output.glob("*.safetensors")]
    print_line(f"{args.output}: {byte_size(sum(sizes))} of weights in {counted(len(sizes), 'file')}")
