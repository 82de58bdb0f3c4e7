"""Compares the loss curves of the same training run in ligermodels and in Hugging Face transformers.

    python -m benchmarks.train_curve --model llama-3.2-1b --steps 300

Every run starts from the same file of random weights and uses the same data in the same order. The AdamW settings,
gradient clipping and the cosine schedule with warmup are the same; transformers uses torch's implementations and
ligermodels its own. Parameters and optimizer states are bf16. The remaining differences are the order of summation and
the places of rounding, and training amplifies them. The noise level is therefore measured as the distance between
transformers runs that differ only in this respect: reversed order of the sequences in a batch, two micro-batches
instead of one, or another attention implementation.

A sequence is a fixed number of tokens from a stream of generated stories. The tokenizer merges across word boundaries,
because single words would give only a small vocabulary. The entropy of the stories, the lowest possible loss, is known.
"""

import argparse
import gc
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn

from benchmarks import results
from ligermodels.training.data.embedded_stories import stories

MODELS = {
    "llama-3.2-1b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
    },
}  # fmt: skip
VOCABULARY, VOCABULARY_STORIES = 8192, 5000
PEAK_LEARNING_RATE, WARMUP, WEIGHT_DECAY, MAX_GRAD_NORM = 2e-4, 100, 0.1, 1.0
SMOOTHING_STEPS = 20  # length of the moving average
REFERENCE = "hugging face"
MEASURES = ("root mean square over steps", "largest mean of 20 steps", "mean of the last 50 steps")


@dataclass(frozen=True)
class Run:
    """One training run. reversed: whether the sequences of each batch are in reverse order."""

    library: str
    reversed: bool = False
    micro_batches: int = 1
    attention: str = "sdpa"


RUNS = {
    REFERENCE: Run("hugging face"),
    "ligermodels": Run("ligermodels"),
    "hugging face, rows reversed": Run("hugging face", reversed=True),
    "ligermodels, rows reversed": Run("ligermodels", reversed=True),
    "hugging face, two micro-batches": Run("hugging face", micro_batches=2),
    "ligermodels, two micro-batches": Run("ligermodels", micro_batches=2),
    "hugging face, eager attention": Run("hugging face", attention="eager"),
}


def token_rows(count: int, length: int) -> tuple[Tensor, float]:
    """Tokens of concatenated stories, int64 [count, length], cut anywhere; and their entropy in nats per token."""
    generated = stories(seed=0, count=1 << 30)
    first_stories = list(itertools.islice(generated, VOCABULARY_STORIES))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((text for text, _ in first_stories), trainer)
    tokens: list[int] = []
    total = 0.0
    while len(tokens) < count * length:
        texts, nats = zip(*(first_stories or itertools.islice(generated, VOCABULARY_STORIES)), strict=True)
        first_stories = []
        tokens += [token for encoding in tokenizer.encode_batch_fast(texts) for token in (*encoding.ids, 0)]
        total += math.fsum(nats)
    return torch.tensor(tokens[: count * length]).view(count, length), total / len(tokens)


def learning_rate(step: int, steps: int) -> float:
    """Linear warmup to the peak, then cosine decay to a tenth of it."""
    if step < WARMUP:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP
    progress = (step - WARMUP) / (steps - WARMUP)
    return PEAK_LEARNING_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def parameter_groups(model: nn.Module) -> list[dict]:
    """Parameter groups. Weight decay is not applied to norms, biases and the embedding, which is tied to the output."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    by_decay: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        by_decay[parameter.ndim >= 2 and id(parameter) not in embeddings].append(parameter)
    return [{"params": params, "weight_decay": WEIGHT_DECAY * decay} for decay, params in by_decay.items()]


def hugging_face(folder: Path, run: Run, device: str) -> tuple[nn.Module, Callable[[float], None]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=run.attention)
    model.config.use_cache = False
    nn.Module.to(model, device)  # the type annotation of transformers' own method allows no argument
    optimizer = torch.optim.AdamW(parameter_groups(model), betas=(0.9, 0.95), fused=True)

    def update(rate: float) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()

    return model.train(), update


def ours(folder: Path, run: Run, device: str) -> tuple[nn.Module, Callable[[float], None]]:
    import ligermodels
    from ligermodels.training.optimizers import build_optimizer, clip_and_step, set_learning_rate
    from ligermodels.training.parallel.fsdp import gradient_norm

    model = ligermodels.load(folder, dtype=torch.bfloat16, device=device).train()
    optimizer = build_optimizer(model, weight_decay=WEIGHT_DECAY)
    finite = torch.zeros((), device=device)

    def update(rate: float) -> None:
        set_learning_rate(optimizer, rate)
        clip_and_step(optimizer, finite, gradient_norm(model), MAX_GRAD_NORM)
        optimizer.zero_grad()

    return model, update


LIBRARIES = {"hugging face": hugging_face, "ligermodels": ours}


def losses(run: Run, folder: Path, rows: Tensor, steps: int, device: str) -> list[float]:
    """The loss of every step, in nats per token."""
    model, update = LIBRARIES[run.library](folder, run, device)
    batches = rows.to(device).chunk(steps)
    found = []
    for step, batch in enumerate(batches):
        predicted = batch[:, 1:].numel()
        loss = torch.zeros((), device=device)
        for part in (batch.flip(0) if run.reversed else batch).chunk(run.micro_batches):
            share = model(input_ids=part, labels=part, num_items_in_batch=predicted).loss
            share.backward()
            loss += share.detach()
        update(learning_rate(step, steps))
        found.append(loss)
    return torch.stack(found).tolist()


def moving_average(curve: list[float]) -> list[float]:
    starts = range(len(curve) - SMOOTHING_STEPS + 1)
    return [statistics.fmean(curve[start : start + SMOOTHING_STEPS]) for start in starts]


def distance(a: list[float], b: list[float]) -> dict[str, float]:
    """The distances between two curves, in nats per token, one per name in MEASURES."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    rms = math.sqrt(statistics.fmean(x * x for x in differences))
    largest, final = max(map(abs, moving_average(differences))), abs(statistics.fmean(differences[-50:]))
    return dict(zip(MEASURES, (rms, largest, final), strict=True))


def verdict(curves: dict[str, list[float]]) -> dict:
    """Compares each ligermodels run with the noise.

    noise: the largest distance between two transformers runs. ours_from_theirs: the mean distance of each ligermodels
    run from the transformers runs. ours_within_noise: whether no such distance exceeds the noise.
    """
    runs_by_library = {library: [n for n in curves if RUNS[n].library == library] for library in LIBRARIES}
    hugging_face_runs, our_runs = runs_by_library["hugging face"], runs_by_library["ligermodels"]
    pairs = [distance(curves[a], curves[b]) for a, b in itertools.combinations(hugging_face_runs, 2)]
    noise = {measure: max(pair[measure] for pair in pairs) for measure in MEASURES} if pairs else {}
    distances_of_ours = {}
    for name in our_runs:
        distances = [distance(curves[name], curves[other]) for other in hugging_face_runs]
        distances_of_ours[name] = {measure: statistics.fmean(d[measure] for d in distances) for measure in MEASURES}
    within = all(distances_of_ours[name][measure] <= noise[measure] for name in distances_of_ours for measure in noise)
    return {"noise": noise, "ours_from_theirs": distances_of_ours, "ours_within_noise": within}


def draw(report: dict, path: Path) -> None:
    """Plots the curves and their differences from the mean of the transformers curves, which are grey."""
    from matplotlib.figure import Figure

    curves = report["losses"]
    theirs = [curve for name, curve in curves.items() if RUNS[name].library == "hugging face"]
    mean = [statistics.fmean(step) for step in zip(*theirs, strict=True)]
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    loss_axes, difference_axes = figure.subplots(1, 2)
    for index, (name, curve) in enumerate(curves.items()):
        grey = RUNS[name].library == "hugging face"
        style = {"label": name, "color": str(0.3 + 0.08 * index) if grey else f"C{index // 2}", "linewidth": 0.9}
        style["linestyle"] = ("-", "--", ":", "-.")[index // 2] if grey else "-"
        loss_axes.plot(curve, **style)
        difference = moving_average([a - b for a, b in zip(curve, mean, strict=True)])
        difference_axes.plot(range(SMOOTHING_STEPS // 2, SMOOTHING_STEPS // 2 + len(difference)), difference, **style)
    loss_axes.axhline(report["floor"], color="black", linestyle=":", linewidth=0.8, label="entropy of the stories")
    loss_axes.set_title("loss, nats/token", fontsize=9)
    difference_axes.set_title(
        f"difference from the mean of the Hugging Face runs, {SMOOTHING_STEPS}-step average", fontsize=9
    )
    for axes in (loss_axes, difference_axes):
        axes.set_xlabel("step", fontsize=8)
        axes.grid(alpha=0.3)
    loss_axes.legend(fontsize=7)
    tokens = f"{report['batch']}x{report['length']} tokens per step"
    shape = f"{report['model']}, parameters and optimizer states in bf16, {tokens}"
    figure.suptitle(f"{shape} ({report['gpu']}, {report['date'][:10]})", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def run_all(
    names: list[str], raw: dict, rows: Tensor, steps: int, device: str
) -> Iterator[tuple[str, list[float], float]]:
    """Yields (name, losses, seconds) for each run. All runs start from the same file of weights."""
    import ligermodels

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        ligermodels.export(ligermodels.create(raw, dtype=torch.bfloat16, device=device, seed=0), folder)
        for name in names:
            start = time.perf_counter()
            curve = losses(RUNS[name], folder, rows, steps, device)
            yield name, curve, time.perf_counter() - start
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3.2-1b")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder for the dated JSON file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    rows, floor = token_rows(args.steps * args.batch, args.length)
    report = results.environment() | {"learning_rate": PEAK_LEARNING_RATE, "floor": floor, "losses": {}}
    report |= {name: getattr(args, name) for name in ("model", "steps", "batch", "length")}
    for name, curve, seconds in run_all(args.runs, MODELS[args.model], rows, args.steps, device):
        report["losses"][name] = [round(loss, 5) for loss in curve]
        print(f"{name:32} loss {curve[0]:.4f} -> {statistics.fmean(curve[-50:]):.4f}, {seconds:.1f} s", flush=True)
    report |= verdict(report["losses"])
    print(json.dumps({key: report[key] for key in ("noise", "ours_from_theirs", "ours_within_noise")}, indent=1))
    print(results.save(args.output, f"train-curve-{args.model}", report))
    draw(report, args.output / "plots" / f"train-curve-{args.model}.png")


if __name__ == "__main__":
    main()
