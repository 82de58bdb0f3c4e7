"""The same training run here and in Hugging Face transformers: do the loss curves lie on each other?

    python -m benchmarks.train_curve --model llama-3.2-1b --steps 300

Every run begins with the same file of random weights and sees the same rows in the same order; AdamW, clipping and a
cosine schedule with warmup are the same too, by torch's code there and ours here; weights and states are bf16. What
is left is the order of sums and where they are rounded, and training multiplies such differences. So the yardstick is
how far Hugging Face's own runs lie apart when only that changes: the order of a batch's rows, two micro-batches for
one, another attention. Rows are stories, one after another, in tokens that do not end with words, so that there are
many; the least loss possible is known.
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
PEAK_LEARNING_RATE, WARMUP, WEIGHT_DECAY, CLIP = 2e-4, 100, 0.1, 1.0
SMOOTHED = 20  # steps
REFERENCE = "hugging face"
MEASURES = ("root mean square over steps", "largest mean of 20 steps", "mean of the last 50 steps")


@dataclass(frozen=True)
class Run:
    """reversed: the rows of a batch in reverse order."""

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
    """[count, length] int64: stories one after another, cut anywhere; and their entropy in nats a token."""
    told = stories(seed=0, count=1 << 30)
    beginning = list(itertools.islice(told, VOCABULARY_STORIES))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((text for text, _ in beginning), trainer)
    tokens: list[int] = []
    total = 0.0
    while len(tokens) < count * length:
        texts, nats = zip(*(beginning or itertools.islice(told, VOCABULARY_STORIES)), strict=True)
        beginning = []
        tokens += [token for encoding in tokenizer.encode_batch_fast(texts) for token in (*encoding.ids, 0)]
        total += math.fsum(nats)
    return torch.tensor(tokens[: count * length]).view(count, length), total / len(tokens)


def learning_rate(step: int, steps: int) -> float:
    """Linear to the peak, then half a cosine to a tenth of it."""
    if step < WARMUP:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP
    progress = (step - WARMUP) / (steps - WARMUP)
    return PEAK_LEARNING_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def groups(model: nn.Module) -> list[dict]:
    """Matrices decay; norms, biases and the embedding, to which the head is tied, do not."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decays: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        decays[parameter.ndim >= 2 and id(parameter) not in embeddings].append(parameter)
    return [{"params": params, "weight_decay": WEIGHT_DECAY * decay} for decay, params in decays.items()]


def hugging_face(folder: Path, run: Run, device: str) -> tuple[nn.Module, Callable[[float], None]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=run.attention)
    model.config.use_cache = False
    nn.Module.to(model, device)  # transformers' own is typed as taking none
    optimizer = torch.optim.AdamW(groups(model), betas=(0.9, 0.95), fused=True)

    def update(rate: float) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()

    return model.train(), update


def ours(folder: Path, run: Run, device: str) -> tuple[nn.Module, Callable[[float], None]]:
    import ligermodels
    from ligermodels.training.optimizers import build_optimizer, clip_and_step, set_learning_rate
    from ligermodels.training.scaling.fsdp import gradient_norm

    model = ligermodels.load(folder, dtype=torch.bfloat16, device=device).train()
    optimizer = build_optimizer(model, weight_decay=WEIGHT_DECAY)
    finite = torch.zeros((), device=device)

    def update(rate: float) -> None:
        set_learning_rate(optimizer, rate)
        clip_and_step(optimizer, finite, gradient_norm(model), CLIP)
        optimizer.zero_grad()

    return model, update


LIBRARIES = {"hugging face": hugging_face, "ligermodels": ours}


def losses(run: Run, folder: Path, rows: Tensor, steps: int, device: str) -> list[float]:
    """The loss of every step, in nats a token."""
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


def smoothed(curve: list[float]) -> list[float]:
    return [statistics.fmean(curve[start : start + SMOOTHED]) for start in range(len(curve) - SMOOTHED + 1)]


def distance(a: list[float], b: list[float]) -> dict[str, float]:
    """MEASURES between two curves, in nats a token."""
    apart = [x - y for x, y in zip(a, b, strict=True)]
    rms = math.sqrt(statistics.fmean(x * x for x in apart))
    return dict(zip(MEASURES, (rms, max(map(abs, smoothed(apart))), abs(statistics.fmean(apart[-50:]))), strict=True))


def verdict(curves: dict[str, list[float]]) -> dict:
    """The noise: how far two runs of Hugging Face lie apart at most. Ours: how far from its runs, on average."""
    of_library = {library: [n for n in curves if RUNS[n].library == library] for library in LIBRARIES}
    theirs, mine = of_library["hugging face"], of_library["ligermodels"]
    pairs = [distance(curves[a], curves[b]) for a, b in itertools.combinations(theirs, 2)]
    noise = {measure: max(pair[measure] for pair in pairs) for measure in MEASURES} if pairs else {}
    apart = {}
    for name in mine:
        distances = [distance(curves[name], curves[other]) for other in theirs]
        apart[name] = {measure: statistics.fmean(d[measure] for d in distances) for measure in MEASURES}
    within = all(apart[name][measure] <= noise[measure] for name in apart for measure in noise)
    return {"noise": noise, "ours_from_theirs": apart, "ours_within_noise": within}


def draw(report: dict, path: Path) -> None:
    """The curves, and how far each is from the mean of Hugging Face's, which are grey."""
    from matplotlib.figure import Figure

    curves = report["losses"]
    theirs = [curve for name, curve in curves.items() if RUNS[name].library == "hugging face"]
    mean = [statistics.fmean(step) for step in zip(*theirs, strict=True)]
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    whole, apart = figure.subplots(1, 2)
    for index, (name, curve) in enumerate(curves.items()):
        grey = RUNS[name].library == "hugging face"
        style = {"label": name, "color": str(0.3 + 0.08 * index) if grey else f"C{index // 2}", "linewidth": 0.9}
        style["linestyle"] = ("-", "--", ":", "-.")[index // 2] if grey else "-"
        whole.plot(curve, **style)
        difference = smoothed([a - b for a, b in zip(curve, mean, strict=True)])
        apart.plot(range(SMOOTHED // 2, SMOOTHED // 2 + len(difference)), difference, **style)
    whole.axhline(report["floor"], color="black", linestyle=":", linewidth=0.8, label="entropy of the stories")
    whole.set_title("loss, nats/token", fontsize=9)
    apart.set_title(f"difference from the mean of Hugging Face's runs, over {SMOOTHED} steps", fontsize=9)
    for axes in (whole, apart):
        axes.set_xlabel("step", fontsize=8)
        axes.grid(alpha=0.3)
    whole.legend(fontsize=7)
    shape = f"{report['model']}, weights and states in bf16, {report['batch']}x{report['length']} tokens a step"
    figure.suptitle(f"{shape} ({report['gpu']}, {report['date'][:10]})", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def curves_of(
    names: list[str], raw: dict, rows: Tensor, steps: int, device: str
) -> Iterator[tuple[str, list[float], float]]:
    """(name, losses, seconds) of one run after another, all from the same file of weights."""
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
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder for the dated JSON file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    rows, floor = token_rows(args.steps * args.batch, args.length)
    report = results.environment() | {"learning_rate": PEAK_LEARNING_RATE, "floor": floor, "losses": {}}
    report |= {name: getattr(args, name) for name in ("model", "steps", "batch", "length")}
    for name, curve, seconds in curves_of(args.runs, MODELS[args.model], rows, args.steps, device):
        report["losses"][name] = [round(loss, 5) for loss in curve]
        print(f"{name:32} loss {curve[0]:.4f} -> {statistics.fmean(curve[-50:]):.4f}, {seconds:.1f} s", flush=True)
    report |= verdict(report["losses"])
    print(json.dumps({key: report[key] for key in ("noise", "ours_from_theirs", "ours_within_noise")}, indent=1))
    print(results.save(args.output, f"train-curve-{args.model}", report))
    draw(report, args.output / "plots" / f"train-curve-{args.model}.png")


if __name__ == "__main__":
    main()
