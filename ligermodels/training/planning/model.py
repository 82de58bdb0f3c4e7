"""The model of a run on the meta device: its family or checkpoint, its LoRA, and which of its parts are trained."""

from pathlib import Path

import torch

from ligermodels.adapters.lora_targets import add_lora
from ligermodels.aliases import flag_of
from ligermodels.errors import InputError
from ligermodels.hub import add_lora_of_adapter, create, quantise_on_meta
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.reward_model import RewardModel
from ligermodels.training.data.run_tokenizer import GENERATION_CONFIG, SPECIAL_IDS
from ligermodels.training.planning.defaults import TORCH_DTYPES
from ligermodels.training.settings.config import RunConfig, TrainConfig
from ligermodels.vision.multimodal import ImageParts

# The setting of the learning rate of each part that may have its own.
PART_RATES = {"vision": "vision_learning_rate", "projector": "projector_learning_rate"}


def build_model(config: TrainConfig, pretrained: Path | None, adapter: Path | None) -> CausalLM:
    """Builds the model without its weights. Frozen weights are stored in the compute dtype.

    config: with the dtypes chosen. pretrained, adapter: the folders of the weights to start from and of the adapter to
    continue. Raises InputError for settings that do not fit the model.
    """
    compute_dtype, param_dtype = TORCH_DTYPES[str(config.dtype)], TORCH_DTYPES[str(config.param_dtype)]
    size = config.size if config.has_new_weights else None
    dtype = compute_dtype if config.with_lora else param_dtype
    scores = config.objective == "reward"
    model = create(pretrained or str(config.model), size=size, dtype=dtype, device="meta", reward_model=scores)
    if isinstance(model, RewardModel) and not scores:
        raise InputError(f"--model {config.model}: is a reward model, which --objective reward trains")
    if pretrained is not None:
        quantise_base(model, pretrained, config)
    if adapter is not None:
        add_lora_of_adapter(model, adapter, param_dtype)
    elif config.lora_rank:
        add_lora(
            model, rank=config.lora_rank, alpha=config.lora_alpha, dropout=config.lora_dropout,
            targets=config.lora_targets, modules_to_save=modules_to_save(config), dtype=param_dtype,
        )  # fmt: skip
    train_parts(model, config, compute_dtype)
    if config.low_memory_loss:
        model.lm_head.low_memory_loss = True
    return model


def quantise_base(model: CausalLM, folder: Path, config: TrainConfig) -> None:
    """Quantises the frozen linears, as --quantize says or as the checkpoint stores them. Raises InputError."""
    if quantise_on_meta(model, folder, config.quantize, float8=config.float8) and not config.with_lora:
        raise InputError(
            f"--model {config.model}: its weights are stored in 4 bits, which cannot be trained in full: add "
            "--lora-rank 16, or name the original model"
        )


def modules_to_save(config: TrainConfig) -> tuple[str, ...]:
    """The modules that are given. A reward model trains its head too, which is new, or would not follow the rest."""
    return config.modules_to_save if config.objective != "reward" else tuple({*config.modules_to_save, "score"})


def take_special_ids(model: CausalLM) -> None:
    """Gives the model the special tokens of a new tokenizer, in place of those that its configuration has."""
    model.generation_config = GENERATION_CONFIG
    model.config.raw = {**model.config.raw, **SPECIAL_IDS}
    model.config.pad_token_id = None
    for module in model.model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None


def train_parts(model: CausalLM, config: TrainConfig, frozen_dtype: torch.dtype) -> None:
    """Freezes the parts that --train-parts does not name, and stores them in `frozen_dtype`.

    model: on the meta device. Raises InputError for settings of parts that the model does not have, or does not train.
    """
    settings = [name for name in ("train_parts", *PART_RATES.values()) if getattr(config, name) is not None]
    if not settings:
        return
    if not isinstance(model, ImageParts):
        raise InputError(f"{flag_of(settings[0])}: {config.model} is a model of text alone; leave it out")
    if config.train_parts is not None:
        model.train_parts(config.train_parts)
        fp32 = set(model.fp32_parameters())
        for parameter in model.parameters():
            if not parameter.requires_grad and parameter not in fp32:
                parameter.data = parameter.data.to(frozen_dtype)
    for part, setting in PART_RATES.items():
        if setting in settings and not any(parameter.requires_grad for parameter in model.parts()[part]):
            raise InputError(f"{flag_of(setting)}: the {part} is not trained; leave it out, or train that part")


def refuse_parts_without_images(model: CausalLM, config: RunConfig, image_tokens: int) -> None:
    """Raises InputError for rows without images where they alone would train what is trained, or has a rate of its own,
    and for limits of images that there are not.

    image_tokens: those of all rows.
    """
    if image_tokens:
        return
    if config.image_tokens is not None:
        raise InputError(f"--image-tokens {config.image_tokens}: the data have no images; leave it out")
    if not isinstance(model, ImageParts):
        return
    if model.trains_images_alone:
        raise InputError("--data: has no images, which alone reach what is trained; name data with images")
    for part, setting in PART_RATES.items():
        if getattr(config, setting) is not None:
            raise InputError(f"{flag_of(setting)}: the data have no images, which alone train the {part}; leave it out")


def part_scales(config: RunConfig) -> dict[str, float]:
    """The learning rate of each part that has its own, as a multiple of the run's."""
    rates = {part: getattr(config, setting) for part, setting in PART_RATES.items()}
    return {part: rate / config.learning_rate for part, rate in rates.items() if rate is not None}
