"""References: the models that a policy is compared with. `--reference` names a kind.

    base                 the policy's frozen base: the same weights with the LoRA updates switched off
    adapter              the trained weights as they were at the start, such as an adapter that is continued
    precomputed          the policy as it was at the start: one pass before training, kept in the user's cache
    model, model:FOLDER  weights of their own beside the policy's: those of --model, or those of the folder
    ema:ALPHA/STEPS      trained weights of which every STEPS steps α of the policy's take the place (TR-DPO)

All take the same rows by the same route as the policy, so that a policy that equals its reference has a log-ratio of
exactly 0.
"""

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import ligermodels
from ligermodels import distributed
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.hub import create, quantise_on_meta, resolve
from ligermodels.layers.context_parallel import ContextGroup
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.lora import lora_disabled
from ligermodels.layers.reward_model import RewardModel
from ligermodels.losses.pairs import pair_sums
from ligermodels.memory.model import TrainingMemory, held_bytes, trained_parameters
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.checkpoints.state import fingerprint
from ligermodels.training.data.preferences import PreferenceBatch, PreferenceData, Step
from ligermodels.training.data.preferences.steps import Groups
from ligermodels.training.data.rows.store import cache_folder
from ligermodels.training.data.run_tokenizer import refuse_other_tokens, tokenizer_of
from ligermodels.training.objectives.objective import RunSetup
from ligermodels.training.objectives.preference.groups import GroupObjective
from ligermodels.training.parallel import fsdp
from ligermodels.training.parallel.fsdp import dp_shard_size
from ligermodels.training.planning.defaults import TORCH_DTYPES
from ligermodels.training.settings.config import RunConfig, TrainConfig
from ligermodels.units import counted, duration
from ligermodels.weights.loading import load_weights, shard_and_offset
from ligermodels.weights.mapping import is_lora_parameter
from ligermodels.weights.reading import open_for_reading
from ligermodels.weights.sharding import reshard
from ligermodels.weights.writing import failure, replace_file

EMA_ALPHA, EMA_STEPS = 0.6, 512  # TRL's defaults


class ReferenceSpec(NamedTuple):
    """What --reference says. folder is that of the kind "model", and None for the policy's own weights; alpha and steps
    are those of the kind "ema"."""

    kind: str
    folder: str | None = None
    alpha: float = EMA_ALPHA
    steps: int = EMA_STEPS


def parse_reference(text: str) -> ReferenceSpec:
    """Reads `base`, `adapter`, `precomputed`, `model[:FOLDER]` or `ema[:ALPHA/STEPS]`. Raises InputError."""
    kind, colon, rest = text.partition(":")
    if kind == "model":
        return ReferenceSpec(kind, rest or None)
    if kind == "ema":
        return parse_ema(text, rest) if colon else ReferenceSpec(kind)
    if kind not in ("base", "adapter", "precomputed") or colon:
        raise InputError(
            f"--reference {text}: must be base, adapter, precomputed, model, model:FOLDER or ema:ALPHA/STEPS"
        )
    return ReferenceSpec(kind)


def parse_ema(text: str, rest: str) -> ReferenceSpec:
    alpha, _, steps = rest.partition("/")
    try:
        spec = ReferenceSpec("ema", None, float(alpha), int(steps or EMA_STEPS))
    except ValueError:
        spec = ReferenceSpec("ema", None, 0.0, 0)
    if not (0 < spec.alpha <= 1 and spec.steps >= 1):
        raise InputError(f"--reference {text}: must be like ema:0.6/512, a fraction above 0 and a number of steps")
    return spec


class Reference(ABC):
    """A model whose log-probabilities a loss reads beside the policy's. Every rank calls the same methods."""

    context: ContextGroup | None = None  # the ranks that share this rank's rows, where there are others

    def prepare(self, model: CausalLM, run: RunSetup) -> None:
        """Makes it from the policy, which is sharded and has the weights that the run begins with."""
        self.context = run.context

    @abstractmethod
    def logprobs(self, model: CausalLM, batch: PreferenceBatch, temperature: float = 1.0) -> Tensor:
        """The log-probabilities of the supervised tokens of a row, fp32 [M], without a gradient.

        The model is the policy. The temperature divides the logits, as it divides the policy's.
        """

    def sums(self, model: CausalLM, batch: PreferenceBatch, ld_alpha: float | None) -> Tensor:
        """The sums over the completions of a row, float64 [S], as `losses.pair_sums` has them."""
        return pair_sums(self.logprobs(model, batch), batch.completions, ld_alpha)

    def finish_step(self, model: CausalLM, step: int) -> None:  # noqa: B027
        """Called after the update of step number `step`, from 1; not after a step without an update."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint saves of it."""
        return {}

    def bytes_beside(self, model: CausalLM, shards: int) -> int:
        """The bytes of a rank beside those of a training step. The model is the policy, on the meta device."""
        return 0


@torch.no_grad()
def row_logprobs(
    model: CausalLM, batch: PreferenceBatch, temperature: float = 1.0, context: ContextGroup | None = None
) -> Tensor:
    """Computes the log-probabilities of a row's supervised tokens, [M], without dropout.

    context: the ranks that share the row, if any.
    """
    training = model.training
    model.eval()
    found = model(**batch.model_inputs, logprobs={"temperature": temperature}, context=context).logprobs.logprobs
    model.train(training)
    return batch.of_all_rows(found, context)[: batch.supervised]


class BaseReference(Reference):
    """The base of a policy with LoRA: no memory, and no weights to gather again."""

    def logprobs(self, model: CausalLM, batch: PreferenceBatch, temperature: float = 1.0) -> Tensor:
        with lora_disabled(model):
            return row_logprobs(model, batch, temperature, self.context)


class SnapshotReference(Reference):
    """The trained weights as they were at the start, exchanged with the policy's for each pass.

    alpha, steps: every `steps` steps, alpha of the policy's weights is mixed into them; None for never.
    """

    def __init__(self, alpha: float | None = None, steps: int = 1) -> None:
        self.alpha, self.steps = alpha, steps
        self.weights: dict[str, Tensor] = {}

    def prepare(self, model: CausalLM, run: RunSetup) -> None:
        super().prepare(model, run)
        reshard(model)
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    def logprobs(self, model: CausalLM, batch: PreferenceBatch, temperature: float = 1.0) -> Tensor:
        with exchanged(model, self.weights):
            return row_logprobs(model, batch, temperature, self.context)

    @torch.no_grad()
    def finish_step(self, model: CausalLM, step: int) -> None:
        if self.alpha is None or step % self.steps:
            return
        reshard(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                local_part(self.weights[name]).lerp_(local_part(parameter), self.alpha)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.alpha is None else {f"reference.{name}": weight for name, weight in self.weights.items()}

    def bytes_beside(self, model: CausalLM, shards: int) -> int:
        return held_bytes(trained_parameters(model), shards, set(model.replicated_parameters()))


@contextmanager
def exchanged(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it the trained parameters have the values of `weights`, and those have the parameters'."""
    exchange_weights(model, weights)
    try:
        yield
    finally:
        exchange_weights(model, weights)


@torch.no_grad()
def exchange_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    reshard(model)
    for name, parameter in model.named_parameters():
        if name in weights:
            here, there = local_part(parameter), local_part(weights[name])
            value = here.clone()
            here.copy_(there)
            there.copy_(value)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of it."""
    return shard_and_offset(tensor.detach())[0]


class ModelReference(Reference):
    """A model of its own, frozen, in the compute dtype, sharded as the policy.

    folder: of its weights; None for the policy's, as they are at the start. tokenizer: that of the policy's data; None
    before they are opened.
    """

    def __init__(self, config: TrainConfig, world: World, folder: str | None, tokenizer: Tokenizer | None) -> None:
        self.config, self.world, self.tokenizer = config, world, tokenizer
        self.folder = None if folder is None else resolve(folder)
        self.model: CausalLM | None = None

    def build(self, policy: CausalLM) -> CausalLM:
        """Builds it on the meta device. Raises InputError where it has another vocabulary than the policy."""
        config = self.config
        source = self.folder or (str(config.model) if config.has_new_weights else resolve(str(config.model),
            revision=config.revision))  # fmt: skip
        size = config.size if self.folder is None and config.has_new_weights else None
        model = create(source, size=size, dtype=TORCH_DTYPES[str(config.dtype)], device="meta").requires_grad_(False)
        if isinstance(model, RewardModel):
            raise InputError(
                f"--reference model:{self.folder}: is a reward model, without logits of tokens; name a language model"
            )
        if isinstance(source, Path):
            quantise_on_meta(model, source, None if self.folder else config.quantize, float8=config.float8)
        if model.config.vocab_size != policy.config.vocab_size:
            raise InputError(
                f"--reference model:{self.folder}: has a vocabulary of {model.config.vocab_size:,} tokens, the policy "
                f"{policy.config.vocab_size:,}; take a model with the same tokenizer"
            )
        other = None if self.folder is None else tokenizer_of(self.folder)
        if self.tokenizer is not None and other is not None:
            refuse_other_tokens(self.tokenizer, other, config.title, f"--reference model:{self.folder}")
        return model

    def prepare(self, model: CausalLM, run: RunSetup) -> None:
        super().prepare(model, run)
        self.model = reference = self.build(model)
        dtype, replicas = TORCH_DTYPES[str(self.config.dtype)], self.config.dp_replicate
        fsdp.shard(reference, self.world, dtype, dp_replicate=replicas)
        reference.to_empty(device=self.world.device)
        source = self.folder or model.source
        if source is not None:
            load_weights(reference, source)
        else:
            reference.initialize(self.config.seed)
        reference.eval()

    def logprobs(self, model: CausalLM, batch: PreferenceBatch, temperature: float = 1.0) -> Tensor:
        assert self.model is not None  # `prepare` came first
        return row_logprobs(self.model, batch, temperature, self.context)

    def bytes_beside(self, model: CausalLM, shards: int) -> int:
        reference = self.build(model)
        return held_bytes(reference.parameters(), shards, set(reference.replicated_parameters()))


class PrecomputedReference(Reference):
    """The policy's log-probabilities as they were at the start, computed in one pass before training.

    The pass takes the rows that training will take, in the same order, so that the first step's log-ratios are exactly
    0. Sums of completions are kept in the user's cache, in a file named by a hash of the model, the data, the
    settings that shape rows, and the code; the next run with the same starts at once. A run that is lengthened adds
    what is missing.

    found: float64 [completions], their sums by their numbers in the data; NaN for those that are not known.
    """

    def __init__(self, config: RunConfig, world: World, data: PreferenceData, ld_alpha: float | None) -> None:
        self.config, self.world, self.data, self.ld_alpha = config, world, data, ld_alpha
        parts = [*data.training.groups.parts, *data.validation.groups.parts]
        self.found = np.full(max(part.first + len(part.store.tokens) for part in parts), np.nan)

    def logprobs(self, model: CausalLM, batch: PreferenceBatch, temperature: float = 1.0) -> Tensor:
        raise InputError("--reference precomputed: has sums of completions, not their tokens; take --reference model")

    def sums(self, model: CausalLM, batch: PreferenceBatch, ld_alpha: float | None) -> Tensor:
        found = torch.from_numpy(self.found[batch.numbers])
        device = batch.completions.device
        return (found.pin_memory() if device.type == "cuda" else found).to(device, non_blocking=True)

    def prepare(self, model: CausalLM, run: RunSetup) -> None:
        super().prepare(model, run)
        file = cache_folder() / f"reference-{self.key(model)}.f64"
        self.found = distributed.from_first(self.read(file) if self.world.is_first else self.found)
        known = int(np.isfinite(self.found).sum())
        start = time.perf_counter()
        computed = self.compute(model)
        if not computed:
            run.say(f"reference: log-probabilities of {counted(known, 'completion')}, from {file}")
            return
        taken = duration(time.perf_counter() - start)
        completions = counted(computed, "completion")
        run.say(f"reference: log-probabilities of {completions} precomputed in {taken}, kept in {file}")
        error = failure(self.write, file) if self.world.is_first else None
        if error is not None:  # the cache only saves time
            run.say(f"warning: {error}")

    def compute(self, model: CausalLM) -> int:
        """Fills in what the run needs and is missing. Returns how many completions that were."""
        missing = np.isnan(self.found) & self.needed()
        sums = torch.zeros(len(self.found), dtype=torch.float64, device=self.world.device)
        for step in self.steps_with(missing):
            for batch in step.batches:
                numbers = torch.from_numpy(batch.numbers).to(sums.device)
                logprobs = row_logprobs(model, batch, context=self.context)
                sums[numbers] = pair_sums(logprobs, batch.completions, self.ld_alpha)
        totals = distributed.total(sums) / self.world.context  # ranks that share rows have the same sums
        self.found[missing] = totals.cpu().numpy()[missing]
        return int(missing.sum())

    @property
    def cursors(self) -> range:
        """Where the steps of the run begin in its training data."""
        return range(0, self.config.steps * self.config.units, self.config.units)

    def trained(self, cursor: int) -> np.ndarray:
        """The numbers of the completions of the step that begins at `cursor`."""
        training = self.data.training
        return numbers_of(training.groups, training.numbers(cursor, self.config.units))

    @property
    def held_out(self) -> np.ndarray:
        """The numbers of the completions of the validation."""
        return numbers_of(self.data.validation.groups, range(len(self.data.validation)))

    def needed(self) -> np.ndarray:
        """Whether the run reads each completion, bool [completions]."""
        needed = np.zeros(len(self.found), bool)
        for cursor in self.cursors:
            needed[self.trained(cursor)] = True
        needed[self.held_out] = True
        return needed

    def steps_with(self, missing: np.ndarray) -> Iterator[Step]:
        """The steps of the run's first pass over the data, and of the validation, that have missing completions."""
        left = missing.copy()
        for cursor in self.cursors:
            numbers = self.trained(cursor)
            if left[numbers].any():
                yield self.data.training.collated(cursor, self.config.units, self.world)
            left[numbers] = False
        if missing[self.held_out].any():
            yield from self.data.validation.steps(self.config.units, self.world)

    def key(self, model: CausalLM) -> str:
        config, data = self.config, self.data
        described = {
            "weights": {name: fingerprint(x) for name, x in (*model.named_parameters(), *model.named_buffers())},
            "forward": forward_constants(model),
            "data": data.training.fingerprint,
            "validation": [part.fingerprint for part in data.validation.groups.parts],
            "rows": [config.units, config.sequence_length, config.share_prompts, config.seed],
            "ranks": [self.world.size, self.world.context],
            "dtype": [config.dtype, str(self.world.device.type)],
            "ld_alpha": self.ld_alpha,
            "images": self.image_versions(),
            "code": package_hash(),
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]

    def image_versions(self) -> list[str]:
        """What decides about the pixels of images beside their names."""
        if self.data.processor is None:
            return []
        parts = (*self.data.training.groups.parts, *self.data.validation.groups.parts)
        images = (part.store.tokens.images for part in parts)
        return [repr(self.data.processor.images), *(found.file_versions for found in images if found is not None)]

    def read(self, file: Path) -> np.ndarray:
        """The sums in the cache; as they are where it has none, or a damaged file."""
        if not file.is_file():
            return self.found
        with open_for_reading(file) as stream:
            found = np.frombuffer(stream.read(), np.float64)
        return found.copy() if found.shape == self.found.shape else self.found

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, self.found.tobytes())


def numbers_of(groups: Groups, numbers: Any) -> np.ndarray:
    """The numbers that the completions of these groups have in the data, as in `PreferenceBatch.numbers`."""
    return np.concatenate([groups.completion_numbers(number) for number in numbers])


def forward_constants(model: CausalLM) -> list[str]:
    """What a forward pass reads beside weights, as text: the configuration, and the numbers of every module, such as
    scales, softcaps, windows and the alpha of LoRA."""
    constants = [
        f"{name}.{key}={value}" for name, module in model.named_modules() for key, value in vars(module).items()
        if key != "training" and isinstance(value, bool | int | float | str | tuple)
    ]  # fmt: skip
    return [repr(model.config), json.dumps(dict(model.config.raw), sort_keys=True), *constants]


def package_hash() -> str:
    """A hash of this package's code."""
    files = sorted(Path(ligermodels.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def default_reference(config: TrainConfig) -> str:
    return "adapter" if config.adapter else "base" if config.with_lora else "precomputed"


def make_reference(
    spec: ReferenceSpec, config: TrainConfig, world: World, tokenizer: Tokenizer | None = None
) -> Reference:
    """Makes a reference that computes log-probabilities of any row: all kinds but "precomputed". Raises InputError.

    tokenizer is that of the policy's data, and None before they are opened.
    """
    if spec.kind == "base" and not config.with_lora:
        raise InputError("--reference base goes with --lora-rank, which is missing; take precomputed or model")
    if spec.kind == "base" and config.modules_to_save:
        raise InputError(
            f"--reference base: --modules-to-save {' '.join(config.modules_to_save)} trains weights of the base "
            "itself; take --reference precomputed or model"
        )
    if spec.kind == "adapter" and not config.adapter:
        raise InputError("--reference adapter goes with --adapter, which is missing; take base, precomputed or model")
    if spec.kind == "model" and spec.folder is None and config.adapter:
        raise InputError("--reference model: the base model without the adapter is --reference base; take that")
    match spec.kind:
        case "base":
            return BaseReference()
        case "adapter":
            return SnapshotReference()
        case "ema":
            return SnapshotReference(spec.alpha, spec.steps)
        case _:
            return ModelReference(config, world, spec.folder, tokenizer)


def refuse_base_that_is_trained(model: CausalLM) -> None:
    """Raises InputError where a continued adapter trains modules of the base as a whole."""
    trained = [n for n, p in model.named_parameters() if p.requires_grad and not is_lora_parameter(n)]
    if trained:
        raise InputError(
            f"--reference base: the adapter trains {trained[0]} of the base itself; take --reference adapter"
        )


class ReferenceObjective(GroupObjective):
    """An objective on groups with a reference."""

    reference: Reference

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        self.spec = parse_reference(config.reference or self.default_reference())
        if self.spec.kind != "precomputed":
            make_reference(self.spec, config, world)

    @property
    def passes_beside(self) -> float:
        return int(self.spec.kind != "precomputed")

    @property
    def ld_alpha(self) -> float | None:
        """The weight of the tokens beyond the shorter side, in the reference's sums as in the policy's; None for 1."""
        return None

    def default_reference(self) -> str:
        return default_reference(self.config)

    def open(self, folder: Path | None, model: CausalLM, adapter: Path | None) -> None:
        if self.spec.kind == "base":
            refuse_base_that_is_trained(model)
        super().open(folder, model, adapter)

    def complete(self, config: RunConfig) -> None:
        super().complete(config)
        if self.spec.kind == "precomputed":
            self.reference = PrecomputedReference(config, self.world, self.data, self.ld_alpha)
        else:
            self.reference = make_reference(self.spec, config, self.world, self.data.tokenizer)

    def bytes_beside(self, model: CausalLM) -> int:
        return self.reference.bytes_beside(model, dp_shard_size(self.world, self.config.dp_replicate))

    def phases(self, model: CausalLM, train: TrainingMemory) -> Mapping[str, int]:
        first = {"precompute": train.forward_peak} if self.spec.kind == "precomputed" else {}
        return {**first, **super().phases(model, train)}

    def prepare(self, model: CausalLM, run: RunSetup) -> None:
        super().prepare(model, run)
        self.reference.prepare(model, run)

    def finish_step(self, model: CausalLM, step: int) -> None:
        self.reference.finish_step(model, step)

    def tensors(self) -> dict[str, Tensor]:
        return self.reference.tensors()
