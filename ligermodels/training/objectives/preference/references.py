"""References: the models that a policy is compared with. `--reference` names a kind.

    base                 the policy's frozen base: the same weights with the LoRA updates switched off
    adapter              the trained weights as they were at the start, such as an adapter that is continued
    precomputed          the policy as it was at the start: one pass before training, kept in the user's cache
    model, model:FOLDER  weights of their own beside the policy's: those of --model, or those of the folder
    ema:ALPHA/STEPS      trained weights of which every STEPS steps α of the policy's take the place (TR-DPO)

All take the same rows by the same route as the policy, so that a policy that equals its reference has a log-ratio of
exactly 0. Must not know losses.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.hub import create, quantise_on_meta, resolve
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.lora import lora_disabled
from ligermodels.losses.pairs import pair_sums
from ligermodels.memory.model import held_bytes, trained_parameters
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data.preferences import PreferenceBatch
from ligermodels.training.objectives.vocabulary import refuse_other_tokens, tokenizer_of
from ligermodels.training.parallel import fsdp
from ligermodels.training.planning.defaults import TORCH_DTYPES
from ligermodels.training.settings.config import TrainConfig
from ligermodels.weights.loading import load_weights, shard_and_offset
from ligermodels.weights.mapping import is_lora_parameter
from ligermodels.weights.sharding import reshard

EMA_ALPHA, EMA_STEPS = 0.6, 512  # TRL's defaults


class ReferenceSpec(NamedTuple):
    """What --reference says. folder: of kind "model"; None for the policy's own. alpha, steps: of kind "ema"."""

    kind: str
    folder: str | None = None
    alpha: float = EMA_ALPHA
    steps: int = EMA_STEPS


def parse_reference(text: str) -> ReferenceSpec:
    """`base`, `adapter`, `precomputed`, `model`, `model:FOLDER`, `ema` or `ema:ALPHA/STEPS`. Raises InputError."""
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
    """A model whose log-probabilities a loss reads beside the policy's. Every rank calls the same methods.

    temperature: divides the logits, as the policy's.
    """

    temperature = 1.0

    def prepare(self, model: CausalLM, say: Callable[[str], Any]) -> None:  # noqa: B027
        """model: the policy, sharded, with the weights that the run begins with."""

    @abstractmethod
    def logprobs(self, model: CausalLM, batch: PreferenceBatch) -> Tensor:
        """Of the supervised tokens of a row, fp32 [M], without a gradient. model: the policy."""

    def sums(self, model: CausalLM, batch: PreferenceBatch, ld_alpha: float | None) -> Tensor:
        """Of the completions of a row, float64 [S]: `losses.pair_sums`."""
        return pair_sums(self.logprobs(model, batch), batch.completions, ld_alpha)

    def finish_step(self, model: CausalLM, step: int) -> None:  # noqa: B027
        """Called after the update of step number `step`, from 1; not after a step without an update."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint saves of it."""
        return {}

    def bytes_beside(self, model: CausalLM, shards: int) -> int:
        """Bytes of a rank beside those of a training step. model: the policy, on the meta device."""
        return 0


@torch.no_grad()
def row_logprobs(model: CausalLM, batch: PreferenceBatch, temperature: float = 1.0) -> Tensor:
    """The log-probabilities of a row's supervised tokens, [M], without dropout."""
    training = model.training
    model.eval()
    found = model(**batch.model_inputs, logprobs={"temperature": temperature}).logprobs.logprobs[: batch.supervised]
    model.train(training)
    return found


class BaseReference(Reference):
    """The base of a policy with LoRA: no memory, and no weights to gather again."""

    def logprobs(self, model: CausalLM, batch: PreferenceBatch) -> Tensor:
        with lora_disabled(model):
            return row_logprobs(model, batch, self.temperature)


class SnapshotReference(Reference):
    """The trained weights as they were at the start, exchanged with the policy's for each pass.

    alpha, steps: every `steps` steps, alpha of the policy's weights is mixed into them; None for never.
    """

    def __init__(self, alpha: float | None = None, steps: int = 1) -> None:
        self.alpha, self.steps = alpha, steps
        self.weights: dict[str, Tensor] = {}

    def prepare(self, model: CausalLM, say: Callable[[str], Any]) -> None:
        reshard(model)
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    def logprobs(self, model: CausalLM, batch: PreferenceBatch) -> Tensor:
        with exchanged(model, self.weights):
            return row_logprobs(model, batch, self.temperature)

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
        """On the meta device. Raises InputError where it has another vocabulary than the policy."""
        config = self.config
        source = self.folder or (str(config.model) if config.has_new_weights else resolve(str(config.model),
            revision=config.revision))  # fmt: skip
        size = config.size if self.folder is None and config.has_new_weights else None
        model = create(source, size=size, dtype=TORCH_DTYPES[str(config.dtype)], device="meta").requires_grad_(False)
        if isinstance(source, Path):
            quantise_on_meta(model, source, None if self.folder else config.quantize)
        if model.config.vocab_size != policy.config.vocab_size:
            raise InputError(
                f"--reference model:{self.folder}: has a vocabulary of {model.config.vocab_size:,} tokens, the policy "
                f"{policy.config.vocab_size:,}; take a model with the same tokenizer"
            )
        other = None if self.folder is None else tokenizer_of(self.folder)
        if self.tokenizer is not None and other is not None:
            refuse_other_tokens(self.tokenizer, other, config.title, f"--reference model:{self.folder}")
        return model

    def prepare(self, model: CausalLM, say: Callable[[str], Any]) -> None:
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

    def logprobs(self, model: CausalLM, batch: PreferenceBatch) -> Tensor:
        assert self.model is not None  # `prepare` came first
        return row_logprobs(self.model, batch, self.temperature)

    def bytes_beside(self, model: CausalLM, shards: int) -> int:
        reference = self.build(model)
        return held_bytes(reference.parameters(), shards, set(reference.replicated_parameters()))


def default_reference(config: TrainConfig) -> str:
    return "adapter" if config.adapter else "base" if config.with_lora else "precomputed"


def make_live_reference(
    spec: ReferenceSpec, config: TrainConfig, world: World, tokenizer: Tokenizer | None = None
) -> Reference:
    """A reference that computes log-probabilities of any row: all kinds but "precomputed". Raises InputError.

    tokenizer: as for `ModelReference`.
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
