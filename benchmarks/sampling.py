"""Drawing one token per row of logits under a CUDA graph, beside PyTorch and FlashInfer.

    python -m benchmarks.sampling
    python -m benchmarks.sampling --rows 1 --spread 6 --variants

A time is that of one replay of a graph that holds the call alone, on the same logits each time, as in decoding, where
the output projection has just written them. Every provider returns tokens; ours returns log-probabilities too. Logits
are bf16, normally distributed: a spread of 3 leaves thousands of tokens in the top 90 %, a spread of 6 tens, as a
language model does in most places. The worst rows for our filters are of the former kind.
PyTorch's top-p sorts the vocabulary. Its multinomial waits for the device, which a graph cannot capture: it draws by
exponential noise, as vLLM does. FlashInfer takes probabilities; the softmax is part of its time.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import results, suite, timing
from ligermodels.kernels.decoding import sample as ours

ROWS, VOCABULARIES = (1, 64, 256), (128256, 151936)
SETTINGS = {  # temperature, top_k, top_p
    "greedy": (0.0, 0, 1.0),
    "temperature": (0.8, 0, 1.0),
    "top-k 50": (0.8, 50, 1.0),
    "top-p 0.9": (0.8, 0, 0.9),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9),
}
VARIANTS: dict[str, dict] = {
    "blocks of 128": {"BLOCK": 128, "GROUP": 32},
    "blocks of 512": {"BLOCK": 512, "GROUP": 8},
    "8 blocks a step": {"GROUP": 8},
    "32 blocks a step": {"GROUP": 32},
    "8 warps a block program": {"BLOCKS_WARPS": 8},
    "8 warps a row": {"DRAW_WARPS": {False: 8, True: 8}},
    "32 warps a row": {"DRAW_WARPS": {False: 2, True: 32}},
}
CALLS = 100
COLUMNS = "{:>5} {:>7}  {:22} {:32} {:>9} {:>17}  {}"


def ligermodels_call(logits: Tensor, temperature: float, top_k: int, top_p: float, **constants) -> Callable[[], object]:
    """constants: those of the kernels' module to replace until the call is captured."""
    rows = logits.shape[0]
    filters = (
        [torch.full((rows,), top_k, dtype=torch.int32), torch.full((rows,), top_p), torch.zeros(rows)]
        if top_k or top_p < 1
        else [None] * 3
    )
    seeds, counters = torch.zeros(rows, dtype=torch.int64), torch.arange(2 * rows).view(rows, 2)
    arguments = torch.full((rows,), temperature), *filters, seeds, counters

    def call():
        saved = {name: getattr(ours, name) for name in constants}
        set_constants(constants)
        tokens = ours.sample(logits, *arguments)
        set_constants(saved)
        return tokens

    return call


def set_constants(constants: dict) -> None:
    for name, value in constants.items():
        setattr(ours, name, value)
    ours._launchers.cache_clear()


def pytorch_call(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Callable[[], object]:
    if temperature == 0:
        return lambda: logits.argmax(-1)

    def call():
        scores = logits.float() / temperature
        if top_k:
            scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], -torch.inf)
        if top_p < 1:
            probability, order = scores.softmax(-1).sort(descending=True)
            removed = probability.cumsum(-1) - probability >= top_p
            scores = scores.masked_fill(torch.zeros_like(removed).scatter_(1, order, removed), -torch.inf)
        probability = scores.softmax(-1)
        return (probability / torch.empty_like(probability).exponential_()).argmax(-1)

    return call


def flashinfer_call(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Callable[[], object]:
    from flashinfer import sampling

    def draw(probability: Tensor) -> Tensor:
        if top_k and top_p < 1:
            return sampling.top_k_top_p_sampling_from_probs(probability, top_k, top_p)
        if top_k:
            return sampling.top_k_sampling_from_probs(probability, top_k)
        return (
            sampling.top_p_sampling_from_probs(probability, top_p)
            if top_p < 1
            else sampling.sampling_from_probs(probability)
        )

    if temperature == 0:
        raise NotImplementedError("no greedy function")
    return lambda: draw((logits.float() / temperature).softmax(-1))


def providers(variants: bool) -> dict[str, Callable]:
    found: dict[str, Callable] = {
        "pytorch": pytorch_call,
        "flashinfer": flashinfer_call,
        "ligermodels": ligermodels_call,
    }
    if variants:
        for name, constants in VARIANTS.items():
            found[f"ligermodels, {name}"] = partial(ligermodels_call, **constants)
    return found


def capture(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph; returns what replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay():
        graph.replay()
        return kept

    return replay


def time_replays(replay: Callable[[], object]) -> dict:
    def call(begin, end):
        begin.record()
        replay()
        end.record()

    for _ in range(10):
        replay()
    times, _ = timing.device_times(call, CALLS, timing.MAX_SLEEP_MS / timing.CALLS_PER_BATCH)
    us, us_20, us_80 = (1e3 * ms for ms in timing.median_and_spread(times))
    return {"status": "ok", "us": us, "us_20": us_20, "us_80": us_80}


def measure(make: Callable, logits: Tensor, setting: str) -> Iterator[dict]:
    yield time_replays(capture(make(logits, *SETTINGS[setting])))


def format_row(row: dict) -> str:
    figures = [f"{row['us']:.1f}", f"{row['us_20']:.1f}-{row['us_80']:.1f}"] if row["status"] == "ok" else ["", ""]
    reason = "" if row["status"] == "ok" else f"{row['status']}: {row['reason']}"
    return COLUMNS.format(row["rows"], row["vocabulary"], row["setting"], row["provider"], *figures, reason).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of the logits (default: 3)")
    parser.add_argument("--variants", action="store_true", help="time other tiles and warps of our kernels too")
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder for the dated JSON file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a GPU is needed, and torch finds none")
    torch.set_default_device("cuda")
    print(COLUMNS.format("rows", "tokens", "setting", "provider", "us", "20 to 80 %", "").rstrip())
    rows = []
    for batch in args.rows:
        for vocabulary in args.vocabulary:
            logits = (args.spread * torch.randn(batch, vocabulary)).bfloat16()
            for setting in args.setting:
                for name, make in providers(args.variants).items():
                    where = {"rows": batch, "vocabulary": vocabulary, "setting": setting, "provider": name}
                    (found,) = suite.rows_or_failure(partial(measure, make, logits, setting))
                    rows.append(where | suite.round_figures(found))
                    print(format_row(rows[-1]), flush=True)
    report = results.environment() | {"spread": args.spread, "rows_of": {"sampling": rows}}
    print(results.save(args.output, "sampling", report))


if __name__ == "__main__":
    main()
