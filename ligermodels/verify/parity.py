"""Compares logits, loss, gradients and greedy tokens with the reference implementation, on the same token ids.

The truth is the reference implementation in fp64 if that fits into memory, else in fp32. The error against the truth
may be at most

    fp32     FP32_FACTOR times the reference's own error, or FP32_FACTOR roundings (sums may have another order); of a
             gradient also what nine in ten gradients are below, as the reference's own may be small by chance
    bf16     BF16_FACTOR times the reference's own error

If the truth is in fp32, the reference's own error in fp32 is unknown. It is estimated from its error in bf16: scaled by
the ratio of the machine epsilons and by √K, the roundings of a sum of K terms (in bf16, sums are in fp32 too).
In bf16, rounding can flip the choice between two nearly equal experts on either side. For models with experts the
logits' error is therefore the median over tokens. The error of the gradients is the median over tensors. A model with
images gets one in each row. One with images in tiles computes as transformers does, see `as_transformers`. Gradients
that are zero but for rounding, as of the biases of keys without RoPE, are not compared.
"""

import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor, nn

from ligermodels import hub
from ligermodels.errors import CheckpointError
from ligermodels.generation.decoding import generate
from ligermodels.hub import models
from ligermodels.layers.checkpointing.host_memory import available_host_memory
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.moe import MoE
from ligermodels.tokenizer.files import TOKENIZER_FILE
from ligermodels.verify import reference
from ligermodels.verify.certificate import Check, part_of
from ligermodels.verify.round_trip import TEXTS
from ligermodels.vision.multimodal import ImageParts
from ligermodels.vision.tiled_model import TiledVisionLanguageModel
from ligermodels.weights.config_file import CONFIG_FILE, read_config
from ligermodels.weights.mapping import Piece, plan_pieces
from ligermodels.weights.module import assemble

FP32_FACTOR, BF16_FACTOR = 4.0, 1.5
EPS = torch.finfo(torch.float32).eps
BATCH_ROWS, ROW_TOKENS = 2, 64
VANISHING = 1e-7  # of the largest gradient: in fp64 too, the reference computes each softmax in fp32
PROMPT_LENGTH = 16  # tokens of the first row that greedy decoding continues
LOGITS, LOSS = "logits", "loss"
FP64_MEMORY_FRACTION = 0.6  # fraction of the free memory for weights and gradients in fp64

Measured = Iterator[tuple[str, Tensor]]
HubLayout = Mapping[str, Sequence[Piece]]  # the Hub's tensors in each of our parameters


@dataclass
class Errors:
    """The relative errors of one run against the truth.

    of: by measured quantity (logits, loss, gradients by Hub name). tokens: the greedy continuation, in fp32 only.
    token_median: the median over tokens of the logits' error.
    """

    of: dict[str, float] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    token_median: float = 0.0

    @property
    def gradients(self) -> dict[str, float]:
        return {what: error for what, error in self.of.items() if what not in (LOGITS, LOSS)}


def parity_checks(folder: Path, device: str, new_tokens: int) -> list[Check]:
    """Runs all comparisons. Each side is loaded once per dtype."""
    blueprint = blueprint_of(folder)
    layouts = hub_layouts(blueprint)
    example = example_of(blueprint, example_token_ids(folder, blueprint.config.vocab_size).to(device))
    truth_dtype = torch.float64 if fits_fp64(blueprint, device) else torch.float32
    truth: dict[str, Tensor] = {}

    def theirs(dtype: torch.dtype) -> Errors:
        model = reference.load_reference_model(folder, dtype, device, images=bool(example.images))
        count = new_tokens if dtype is torch.float32 else 0
        tokens = reference.greedy_continuation(model, *example.prompt, example.token_types, count)
        inputs = reference.image_inputs(model, example.images, example.token_types(example.ids))
        return compare(measure(model, example, inputs, their_gradients(model, layouts)), truth, tokens)

    def ours(dtype: torch.dtype) -> Errors:
        model = hub.load(folder, dtype=dtype, device=device)
        if isinstance(model, TiledVisionLanguageModel):
            model.as_transformers = True  # where it departs from the models' training
        count, (prompt, images) = new_tokens if dtype is torch.float32 else 0, example.prompt
        (tokens,) = generate(model, prompt, max_new_tokens=count, stop_tokens=(), images=[images or None])
        return compare(measure(model, example, example.our_inputs, our_gradients(model, layouts[0])), truth, tokens)

    exact, plain_bf16 = run_and_free(theirs, truth_dtype), run_and_free(theirs, torch.bfloat16)
    if truth_dtype is torch.float64:
        plain = run_and_free(theirs, torch.float32)
    else:
        plain = estimated_fp32_errors(exact, plain_bf16, blueprint)
    result, result_bf16 = run_and_free(ours, torch.float32), run_and_free(ours, torch.bfloat16)
    routed = any(isinstance(module, MoE) for module in blueprint.modules())
    return [
        *fp32_checks(result, plain, str(truth_dtype).removeprefix("torch.")),
        *bf16_checks(result_bf16, plain_bf16, routed),
        greedy_check(result.tokens, plain.tokens, new_tokens),
    ]


def blueprint_of(folder: Path) -> CausalLM:
    """The checkpoint's model without its weights."""
    return models.build_on_meta(*models.select_architecture(read_config(folder), folder / CONFIG_FILE))


def scope(folder: Path) -> dict[str, str]:
    """What `parity_checks` compares of images, and how it computes where that is not the default: a line for each."""
    model = blueprint_of(folder)
    if not isinstance(model, ImageParts):
        return {"images": "not compared: of text alone"}
    videos = "" if model.config.video_token_id is None else "; videos were not compared"
    found = {"images": f"compared on random pixels, an image a row; its image processor was not compared{videos}"}
    if isinstance(model, TiledVisionLanguageModel):
        found["computation"] = "with model.as_transformers = True, as transformers computes; it is not the default"
    return found


def run_and_free(run: Callable[[torch.dtype], Errors], dtype: torch.dtype) -> Errors:
    """Calls `run`, then frees the memory of its model."""
    errors = run(dtype)
    gc.collect()
    torch.cuda.empty_cache()
    return errors


def fits_fp64(model: nn.Module, device: str) -> bool:
    """Whether weights and gradients in fp64 fit into the free memory of device and host."""
    count = sum(parameter.numel() for parameter in model.parameters())
    host = available_host_memory()
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return 16 * count < FP64_MEMORY_FRACTION * free and 8 * count < FP64_MEMORY_FRACTION * host
    return 24 * count < FP64_MEMORY_FRACTION * host  # the truth keeps a copy of the gradients


def example_token_ids(folder: Path, vocab_size: int) -> Tensor:
    """Token ids [BATCH_ROWS, ROW_TOKENS] of texts in many languages; random ids if there is no tokenizer."""
    count = BATCH_ROWS * ROW_TOKENS
    if not (folder / TOKENIZER_FILE).exists():
        return torch.randint(vocab_size, (BATCH_ROWS, ROW_TOKENS), generator=torch.Generator().manual_seed(0))
    tokenizer = hub.load_tokenizer(folder)
    ids = [token for text in TEXTS for token in tokenizer.encode(text)]
    return torch.tensor((ids * count)[:count]).view(BATCH_ROWS, ROW_TOKENS)


@dataclass(frozen=True)
class Example:
    """What both sides compute. ids: [BATCH_ROWS, ROW_TOKENS or more]. images: pixel inputs, one image a row; empty for
    none. token: of the images, at the start of each row; -1 without. prompt_length: the first tokens of a row, which
    greedy decoding continues. sees_prompt_ahead: whether they see all of themselves."""

    ids: Tensor
    images: dict[str, Tensor] = field(default_factory=dict)
    token: int = -1
    prompt_length: int = PROMPT_LENGTH
    sees_prompt_ahead: bool = False

    def token_types(self, ids: Tensor) -> Tensor:
        """1 at the tokens of images, or behind the prompts that see all of themselves, as transformers takes them."""
        if self.sees_prompt_ahead:
            return (torch.arange(ids.shape[1], device=ids.device) >= self.prompt_length).long().expand_as(ids)
        return (ids == self.token).long()

    @property
    def labels(self) -> Tensor:
        return self.ids.masked_fill(self.token_types(self.ids) != self.sees_prompt_ahead, -100)

    @property
    def our_inputs(self) -> dict[str, Tensor]:
        return self.images | ({"token_type_ids": self.token_types(self.ids)} if self.sees_prompt_ahead else {})

    @property
    def prompt(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The ids [1, T] of the first row's prompt, and its pixel inputs."""
        images = {name: values[: len(values) // BATCH_ROWS] for name, values in self.images.items()}
        return self.ids[:1, : self.prompt_length], images


def example_of(model: CausalLM, ids: Tensor) -> Example:
    """The ids, behind an image in each row if the model takes images; none of them stands for an image elsewhere."""
    if not isinstance(model, ImageParts):
        return Example(ids)
    token, video = model.config.image_token_id, model.config.video_token_id
    count, images = model.example_images(BATCH_ROWS)
    text = ids.masked_fill((ids == token) | (ids == (token if video is None else video)), 0)
    ids = torch.cat([ids.new_full((BATCH_ROWS, count), token), text], 1)
    images = {name: values.to(ids.device) for name, values in images.items()}
    return Example(ids, images, token, count + PROMPT_LENGTH, model.sees_prompt_ahead)


def measure(model: nn.Module, example: Example, inputs: Mapping[str, Tensor], gradients: Measured) -> Measured:
    """The logits, the loss and the gradients by Hub name, which are read once they are computed."""
    with torch.no_grad():
        yield LOGITS, model(example.ids, **inputs).logits
    loss = model(input_ids=example.ids, labels=example.labels, **inputs).loss
    yield LOSS, loss.detach()
    loss.backward()
    yield from gradients


def hub_layouts(model: CausalLM) -> list[HubLayout]:
    """The layouts of the family's tensors, the Hub's own first."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    planned = (plan_pieces(shapes, rules) for rules in (model.weight_rules(), *model.other_weight_rules()))
    grouped = (itertools.groupby(pieces, key=lambda piece: piece.parameter) for pieces in planned)
    return [{name: list(pieces) for name, pieces in groups} for groups in grouped]


def our_gradients(model: nn.Module, layout: HubLayout) -> Measured:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield from split(parameter.grad, layout[name])


def their_gradients(model: nn.Module, layouts: Sequence[HubLayout]) -> Measured:
    """The gradients of the reference, by Hub name. Raises CheckpointError if its parameters fit no layout."""
    known = dict(model.named_parameters())
    missing = [[p.tensor for pieces in layout.values() for p in pieces if p.tensor not in known] for layout in layouts]
    if all(missing):
        raise CheckpointError(f"transformers {reference.version()} has no parameter {missing[-1][0]} in memory")
    gradients = {name: parameter.grad for name, parameter in known.items() if parameter.grad is not None}
    for name, pieces in layouts[missing.index([])].items():
        if all(piece.tensor in gradients for piece in pieces):
            yield from split(assemble([(piece, gradients[piece.tensor]) for piece in pieces]), layouts[0][name])


def split(gradient: Tensor, pieces: Sequence[Piece]) -> Measured:
    """The parts of a parameter's gradient that are of the Hub's tensors."""
    for piece in pieces:
        yield piece.tensor, piece.from_box(gradient[piece.index])


def compare(measured: Measured, truth: dict[str, Tensor], tokens: list[int]) -> Errors:
    """The errors of a run. The first run fills `truth`. A quantity that only one side has gets an infinite error."""
    if not truth:
        truth |= {what: value.to("cpu", copy=True) for what, value in measured}
        return Errors(tokens=tokens)
    vanishing = vanishing_gradients(truth)
    errors = Errors(dict.fromkeys(truth, math.inf), tokens)
    for what, value in measured:
        if what in vanishing:
            del errors.of[what]
            continue
        errors.of[what] = relative_error(value, truth[what]) if what in truth else math.inf
        if what == LOGITS:
            rows = zip(value.flatten(0, 1), truth[what].flatten(0, 1), strict=True)
            errors.token_median = median(relative_error(row, expected) for row, expected in rows)
    return errors


def vanishing_gradients(truth: Mapping[str, Tensor]) -> set[str]:
    """The names of the gradients that are zero but for rounding."""
    sizes = {what: value.double().norm().item() for what, value in truth.items() if what not in (LOGITS, LOSS)}
    smallest = VANISHING * max(sizes.values())
    return {what for what, size in sizes.items() if size < smallest}


def relative_error(value: Tensor, truth: Tensor) -> float:
    """‖value − truth‖ / ‖truth‖, in fp64."""
    expected = truth.to(value.device).double()
    return ((value.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def estimated_fp32_errors(exact: Errors, plain_bf16: Errors, model: CausalLM) -> Errors:
    """The reference's error in fp32, estimated from its error in bf16."""
    longest_sum = max(max(parameter.shape) for parameter in model.model.layers.parameters())
    ratio = EPS / torch.finfo(torch.bfloat16).eps * math.sqrt(longest_sum)
    return Errors({what: error * ratio for what, error in plain_bf16.of.items()}, exact.tokens)


def fp32_checks(ours: Errors, plain: Errors, truth: str) -> Iterator[Check]:
    """The checks of logits, loss and gradients in fp32. plain: the reference's own errors. truth: the truth's dtype."""
    allowed = {what: FP32_FACTOR * max(plain.of.get(what, 0.0), EPS) for what in ours.of}
    worst_tenth = quantiles((allowed[what] for what in ours.gradients), n=10)[-1]
    allowed |= {what: max(allowed[what], worst_tenth) for what in ours.gradients}  # one may be exact by chance
    allowed[LOSS] = max(allowed[LOSS], allowed[LOGITS])  # a scalar's error may be 0 by chance
    criterion = f"against the reference in {truth}, at most {FP32_FACTOR:g} times its own error in fp32"
    result = "error {error:.1e}, allowed {allowed:.1e}"
    pairs = {what: {"error": error, "allowed": allowed[what]} for what, error in ours.of.items()}
    for what in (LOGITS, LOSS):
        pair = pairs.pop(what)
        yield Check(f"fp32 {what}", pair["error"] <= pair["allowed"], result.format(**pair), criterion, pair)
    worst = max(pairs, key=lambda what: part_of(**pairs[what]))
    wrong = sum(not pair["error"] <= pair["allowed"] for pair in pairs.values())
    count = f"{wrong} of {len(pairs)} beyond" if wrong else f"all {len(pairs)} within"
    result = f"{count} the limit; the worst is {worst}: {result.format(**pairs[worst])}"
    yield Check("fp32 gradients", not wrong, result, f"{criterion}, for every tensor", pairs)


def bf16_checks(ours: Errors, plain: Errors, routed: bool) -> Iterator[Check]:
    """The checks of logits and gradients in bf16. routed: whether the model has routed experts."""
    logits = (ours.token_median, plain.token_median) if routed else (ours.of[LOGITS], plain.of[LOGITS])
    gradients = tuple(median(errors.gradients.values()) for errors in (ours, plain))
    where = {LOGITS: "median over tokens" if routed else "over all tokens", "gradients": "median over tensors"}
    for what, (error, own) in ((LOGITS, logits), ("gradients", gradients)):
        yield Check(
            f"bf16 {what}", error <= BF16_FACTOR * own, f"error {error:.1e}, the reference's {own:.1e}",
            f"{where[what]}: at most {BF16_FACTOR:g} times the reference's own error in bf16",
            {"error": error, "reference": own, "allowed": BF16_FACTOR * own},
        )  # fmt: skip


def greedy_check(ours: list[int], theirs: list[int], new_tokens: int) -> Check:
    equal = next((place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), new_tokens)
    return Check(
        "greedy tokens", equal == new_tokens, f"the first {equal} of {new_tokens} are equal",
        "all equal in fp32, ours with a cache and the reference's without", {"ours": ours, "reference": theirs},
    )  # fmt: skip
