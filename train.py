"""Trains a decoder language model.

    python train.py --model qwen2                         the tiny preset on the embedded stories, on a CPU in minutes
    python train.py --model llama --size 8b --dtype bfloat16 --steps 10 --no-export          only speed and memory
    torchrun --nproc-per-node 8 train.py --model meta-llama/Meta-Llama-3-8B --data my.jsonl --dtype bfloat16

--dtype is what is computed in. One process also keeps weights and AdamW states in it; under torchrun they are fp32 and
sharded over the ranks. Which rows a step takes depends on --seed and their number, not on how many ranks share them.
"""

import argparse
import itertools
import math
import os
import shlex
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

import ligermodels
from ligermodels.errors import InputError
from ligermodels.hub import resolve
from ligermodels.layers.decoder import CausalLM
from ligermodels.training import data as datasets
from ligermodels.training import optimizers as optim
from ligermodels.training import parallel, schedules
from ligermodels.training.metrics import Metrics
from ligermodels.training.tokens import END_OF_TEXT_ID, save_tokenizer
from ligermodels.weights.loading import load_weights


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="an architecture (new weights), a Hub id or a folder")
    add("--size", default="tiny", help="preset of the architecture (default: tiny)")
    add("--data", help=".txt, or .jsonl with a field text (default: the embedded stories, or random tokens)")
    add("--output", type=Path, help="a new folder for the model (default: runs/<model>, numbered if it exists)")
    add("--steps", type=int, default=2200, help="(default: 2200)")
    add("--batch-size", type=int, default=4, help="rows a rank takes at a time (default: 4)")
    add("--accumulate", type=int, default=1, help="such batches a step (default: 1)")
    add("--sequence-length", type=int, default=256, help="tokens a row (default: 256)")
    add("--learning-rate", type=float, help="the peak (default: 1e-5; new weights: 4.5e-3 at width 128, 1 / width)")
    add("--warmup", type=int, default=30, help="steps to the peak (default: 30)")
    add("--weight-decay", type=float, default=0.1, help="of matrices (default: 0.1)")
    add("--clip", type=float, default=1.0, help="largest gradient norm (default: 1.0)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--recompute", choices=["none", "full"], default="none", help="full: keep only each block's input for backward")
    add("--seed", type=int, default=0)
    add("--eval-every", type=int, default=550, help="steps between validations (default: 550)")
    add("--no-export", action="store_true", help="write no model")
    return parser.parse_args()


def main(args: argparse.Namespace, world: parallel.World) -> None:
    output = args.output or unused_folder(Path("runs") / Path(args.model).name)
    if output.exists() and not args.no_export:
        raise InputError(f"{output}: exists already; give another --output")

    # The model, without its weights yet.
    dtype = getattr(torch, args.dtype)
    stored = dtype if world.size == 1 else torch.float32
    folder = None if args.model in ligermodels.list_architectures() else resolve(args.model)
    size = args.size if folder is None else None
    model = ligermodels.create(folder or args.model, size=size, dtype=stored, device="meta")

    # Data: the file asked for; else the stories, if the vocabulary is theirs; else random tokens.
    vocab_size = model.config.vocab_size
    if args.data:
        data = datasets.text_file(args.data, folder, vocab_size, args.sequence_length)
    elif vocab_size == datasets.CORPUS_VOCABULARY:
        data = datasets.corpus(args.sequence_length)
    else:
        data = datasets.synthetic(vocab_size, args.sequence_length)

    # Recompute, shard, then give each rank's share of the weights its memory and its values.
    if args.recompute == "full":
        model.recompute_in_backward()
    parallel.shard(model, world, dtype)
    model.to_empty(device=world.device)
    if folder is None:
        model.initialize(args.seed)
    else:
        load_weights(model, folder)
        model.source = folder
    model.train()

    optimizer = optim.build_optimizer(model, weight_decay=args.weight_decay)
    default = schedules.default_peak(model.config.hidden_size, pretrained=folder is not None, lora=False)
    peak = args.learning_rate or default
    tokens_per_step = args.accumulate * world.size * args.batch_size * args.sequence_length
    log = Path(f"{output}.metrics.jsonl")
    with Metrics(log, args.steps, tokens_per_step, world.device, enabled=world.is_first) as metrics:
        metrics.say(
            f"{args.model}: {sum(p.numel() for p in model.parameters()):,} parameters; {data.description}: "
            f"{len(data.training):,} rows; {tokens_per_step:,} tokens a step = {args.accumulate} batches of "
            f"{args.batch_size} x {args.sequence_length} on {world.size} x {world.device.type}"
        )
        for step in range(args.steps):
            # The loss is the sum over all supervised tokens of the step, on all ranks, divided by their number.
            batches = datasets.micro_batches(data.training, args.seed, step, args.accumulate, args.batch_size, world)
            count = parallel.total(torch.stack([datasets.supervised(labels) for _, labels in batches]).sum())
            loss = torch.zeros((), device=world.device)
            for number, (input_ids, labels) in enumerate(batches, 1):
                parallel.reduce_gradients(model, now=number == args.accumulate)
                share = model(input_ids, labels, num_items_in_batch=count.clamp_min(1)).loss
                share.backward()
                loss += share.detach()

            # Nothing is updated from a loss or gradient that is not finite; the host reads them while the update runs.
            loss, norm = parallel.total(loss), parallel.gradient_norm(model)
            read = parallel.read_later(torch.stack([loss, norm]))
            learning_rate = schedules.learning_rate("cosine", step, args.steps, args.warmup, peak)
            optim.set_learning_rate(optimizer, learning_rate)
            optim.clipped_step(optimizer, loss, norm, args.clip)
            optimizer.zero_grad()
            loss_value, norm_value = read()
            if not math.isfinite(loss_value) or not math.isfinite(norm_value):
                raise InputError(
                    f"step {step}: loss {loss_value}, gradient norm {norm_value}: stopped before the update"
                )

            metrics.step(step, loss_value, norm_value, learning_rate)
            if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
                metrics.validation(step + 1, validate(model, data.validation, args.batch_size, world), data.floor)

    if data.prompt and data.new_tokenizer:
        continuation = sample(model.eval(), data.new_tokenizer, data.prompt)
        metrics.say(f"\nAn unseen story, to be continued from its sum on:\n{data.prompt} |{continuation}\n")
    metrics.say(metrics.summary())
    if not args.no_export:
        ligermodels.export(model.to(dtype), output)
        if world.is_first and data.new_tokenizer:
            save_tokenizer(data.new_tokenizer, output)
        metrics.say(f"Saved {output}. To generate from it, and to train the same on two devices:")
        metrics.say(f'  ligermodels generate {shlex.quote(str(output))} --prompt "Once upon a time"')
        metrics.say(f"  torchrun --nproc-per-node 2 train.py {shlex.join(sys.argv[1:])}")
    parallel.wait_for_all()


def unused_folder(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, … that does not exist."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([path], numbered) if not folder.exists())


@torch.no_grad()
def validate(model: CausalLM, rows: datasets.Rows, batch_size: int, world: parallel.World) -> float:
    """Nats per predicted token, over all rows and ranks."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    for input_ids, labels in datasets.validation_batches(rows, batch_size, world):
        totals[0] += model(input_ids, labels, num_items_in_batch=1).loss
        totals[1] += datasets.supervised(labels)
    model.train()
    loss, count = parallel.total(totals).tolist()
    return loss / count


def sample(model: CausalLM, tokenizer: Tokenizer, prompt: str) -> str:
    """The likeliest continuation of the prompt."""
    prompt_ids = tokenizer.encode(prompt).ids
    new = ligermodels.generate(model, [prompt_ids], max_new_tokens=40, stop_tokens=[END_OF_TEXT_ID])[0]
    return tokenizer.decode(new)


if __name__ == "__main__":
    args = arguments()
    try:
        main(args, parallel.start())
    except InputError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)
    except torch.OutOfMemoryError as error:
        print(
            f"train.py: out of GPU memory with --batch-size {args.batch_size} "
            f"--sequence-length {args.sequence_length}: "
            f"lower them (--accumulate makes up for it), or add --dtype bfloat16 or --recompute full. {error}",
            file=sys.stderr,
        )
        sys.exit(2)
    finally:
        parallel.stop()
