"""A model of ours as a `PreTrainedModel` of transformers: for its Trainer, its `generate`, TRL, PEFT, pipelines.

`TransformersModel` is the bare model with another face. Both share their submodules and parameters; only the face has
the configuration class of transformers. Every family has one subclass, under the name of the class in transformers that
it replaces. Nothing else in the package imports this module.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

from ligermodels.architectures import ARCHITECTURES
from ligermodels.distributed import is_first
from ligermodels.errors import InputError
from ligermodels.generation.kv_cache import KVCache, StateLayer
from ligermodels.hub.adapters import base_model_name
from ligermodels.hub.models import create, load_folder, resolve
from ligermodels.layers.decoder import IGNORE_INDEX, CausalLM
from ligermodels.layers.hub_interface import AdaptableModule, take_documents
from ligermodels.layers.inputs import Inputs
from ligermodels.layers.lm_head import LMHead
from ligermodels.weights.config_file import GENERATION_CONFIG_FILE, read_config
from ligermodels.weights.exporting import export_weights
from ligermodels.weights.files import INDEX_FILE, SINGLE_FILE
from ligermodels.weights.loading import float_dtype
from ligermodels.weights.module import accept_hub_names, pack_some, remove_tied_copies

CACHES_OF_OTHER_NUMBERS = ("offloaded", "offloaded_static", "quantized")


class GenerationCache(Cache):
    """Our key-value cache under the interface of transformers. It grows when it is full.

    length: the number of columns of the batch that it has seen, padding included.
    """

    def __init__(self, max_length: int = 0) -> None:
        super().__init__(layers=[])
        self.max_length = max_length
        self.length = 0
        self.kv: KVCache | None = None

    def extend(self, model: CausalLM, batch: int, length: int) -> KVCache:
        """The cache with room for `length` more columns, which now count as seen."""
        self.length += length
        if self.kv is None:
            self.kv = KVCache(model.kept_by_layers(), batch, self.max_length, model.device)
        if self.length > self.max_length:
            self.max_length = max(self.length, 2 * self.max_length)
            self.kv.reserve(self.max_length)
        return self.kv

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    @property
    def batch_size(self) -> int:
        return -1 if self.kv is None else len(self.kv.lengths)

    def reset(self) -> None:
        self.kv, self.length = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove columns."""
        if tokens_to_remove > 0:
            raise ValueError("crop: pass the number of tokens to remove as a negative number")
        if self.kv is not None:
            if any(isinstance(layer, StateLayer) for layer in self.kv.layers):
                raise ValueError("crop: the states of this model cannot go back to an earlier token")
            self.length += tokens_to_remove
            self.kv.lengths += tokens_to_remove

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.kv is not None:
            self.kv.select_rows(indices.to(self.kv.lengths.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.kv is not None:
            self.kv.select_rows(torch.arange(self.batch_size, device=self.kv.lengths.device).repeat_interleave(repeats))


def refuse_other_caches(generation_config: GenerationConfig) -> None:
    """Raises InputError for a cache that would not hold the numbers that ours holds."""
    implementation = generation_config.cache_implementation
    if implementation in CACHES_OF_OTHER_NUMBERS:
        raise InputError(f"generate: cache_implementation {implementation!r} is not supported; leave it out")


def refuse_other_positions(
    position_ids: Tensor | None, cache: KVCache, attention_mask: Tensor | None, length: int
) -> None:
    """Raises ValueError if the positions of the tokens are not those with which they continue the cache."""
    if position_ids is None:
        return
    expected, tokens = cache.next_positions(length), torch.ones_like(position_ids, dtype=torch.bool)
    if attention_mask is not None:
        tokens = attention_mask[:, -length:].bool()
        expected = cache.lengths[:, None] + tokens.cumsum(1) - 1
    if ((position_ids != expected) & tokens).any():
        raise ValueError("forward: position_ids do not continue those of the cache; leave them out")


# Fields of a configuration that say nothing about the model: they change whenever one is made.
BOOKKEEPING = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
# The old fields that `rope_parameters` replaces.
OLD_ROPE_FIELDS = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq")
# Arguments of transformers with the only value, besides None and False, that they can have: what is done anyway.
FIXED_ARGUMENTS = {
    "attn_implementation": "sdpa",
    "low_cpu_mem_usage": True,
    "use_safetensors": True,
    "safe_serialization": True,
    "save_peft_format": True,
    "save_original_format": True,
    "trust_remote_code": True,  # a permission; there is no code to run
    "_from_auto": True,
}


class Backbone:
    """The model without its head, as transformers' `base_model`: a call returns hidden states. Else it is `model`."""

    def __init__(self, owner: "TransformersModel") -> None:
        self.owner = owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.owner.model, name)

    def __call__(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None, output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None, **options: Any,
    ) -> MoeModelOutputWithPast:  # fmt: skip
        """Arguments as those of `CausalLM.forward`."""
        cu_seqlens, max_seqlen = take_documents(options, None, None)
        inputs = Inputs(
            input_ids=input_ids, inputs_embeds=inputs_embeds, attention_mask=attention_mask, position_ids=position_ids,
            cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
        )  # fmt: skip
        decoded = self.owner.bare.decode(inputs, output_hidden_states=bool(output_hidden_states))
        hidden, states = decoded.unpack(decoded.output.hidden), map(decoded.unpack, decoded.output.hidden_states)
        routers = decoded.router_logits() if output_router_logits else None
        return MoeModelOutputWithPast(hidden, hidden_states=tuple(states) or None, router_logits=routers)


class TransformersModel(AdaptableModule, PreTrainedModel, GenerationMixin):
    """A bare model, `bare`, as a `PreTrainedModel`. `from_pretrained` and `from_config` make one of any family.

    Parameters have the names and shapes of the bare model; `load_state_dict` also takes the Hub's, and
    `save_pretrained` writes the Hub's.
    """

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # Trainer then passes num_items_in_batch
    _supports_sdpa = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    bare: CausalLM
    config: PreTrainedConfig
    generation_config: GenerationConfig

    def __init__(self, config: PreTrainedConfig, model: CausalLM | None = None) -> None:
        """A model with random weights, of torch's default dtype and on its default device; or the face of `model`."""
        super().__init__(config)
        if model is None:
            seed = int(torch.randint(2**31, (), device="cpu"))  # from torch's generator, which the user may have seeded
            dtype, device = torch.get_default_dtype(), torch.get_default_device()
            model = create(config.to_dict(), dtype=dtype, device=device, seed=seed)
        self.__dict__["bare"] = model  # not a submodule: it has the same submodules
        self._modules = model._modules
        self.initial_config, self.initial_generation_config = config.to_dict(), {}
        if model.generation_config:
            self.generation_config = GenerationConfig.from_dict(model.generation_config)
            self.initial_generation_config = self.generation_config.to_dict()
        self._no_split_modules = sorted({type(block).__name__ for block in model.model.layers})
        self.register_state_dict_post_hook(remove_tied_copies)
        self.register_load_state_dict_pre_hook(accept_names_of_bare)
        self.post_init()
        self.train(model.training)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike, *, config: PreTrainedConfig | None = None,
        dtype: torch.dtype | str | None = None, torch_dtype: torch.dtype | str | None = None,
        device_map: str | int | torch.device | Mapping[str, Any] | None = None, revision: str | None = None,
        token: str | None = None, **options: Any,
    ) -> "TransformersModel":  # fmt: skip
        """Loads a model with the weights of a Hub repository or a folder, as `ligermodels.load` does.

        config: instead of that of the folder. dtype: None or "auto" for that of the configuration or of the weights.
        device_map: one device, as a name or as {"": device}; "auto" if there are not several.
        options: fields of the configuration to change; of the other arguments in transformers those that ask for
        nothing else than what is done.
        Raises InputError, besides the errors of `ligermodels.load`, for an argument that is not supported.
        """
        device, adapter = single_device(device_map), options.pop("adapter_kwargs", None) or {}
        if "_adapter_model_path" in adapter:
            raise InputError(
                f"{adapter['_adapter_model_path']}: contains an adapter; load its base model, then call "
                "peft.PeftModel.from_pretrained"
            )
        token = None if isinstance(token, bool) else token  # True means the login token, which is the default
        folder = resolve(os.fspath(pretrained_model_name_or_path), revision=revision, token=token)
        raw = read_config(folder)
        stored = AutoConfig.from_pretrained(folder)
        initial = stored.to_dict()
        config = stored if config is None else config
        for name, value in options.items():
            if hasattr(config, name) and name not in FIXED_ARGUMENTS:
                setattr(config, name, value)
            else:
                refuse_argument("from_pretrained", name, value)
        dtype = dtype or torch_dtype or config.dtype
        wanted = None if dtype in (None, "auto") else float_dtype(dtype)
        bare = load_folder(folder, with_changes(raw, changed_fields(initial, config)), wanted, device)
        config.dtype, config.name_or_path = bare.dtype, base_model_name(folder)
        return MODEL_CLASSES[config.model_type](config, bare)

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **options: Any) -> "TransformersModel":
        """A model with random weights. options: dtype."""
        return MODEL_CLASSES[config.model_type]._from_config(config, **options)

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: GenerationCache | None = None, inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None, use_cache: bool | None = None, logits_to_keep: int = 0,
        output_router_logits: bool | None = None, return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None, **options: Any,
    ) -> MoeCausalLMOutputWithPast:  # fmt: skip
        """Arguments and options as those of `CausalLM.forward`; there are no logits in training mode with labels.

        past_key_values: a cache that an earlier call returned. use_cache: return a cache; only if True is passed.
        num_items_in_batch: Trainer's count, see `predicted_items`.
        """
        if not (num_items_in_batch is None or labels is None or attention_mask is None):
            num_items_in_batch = predicted_items(num_items_in_batch, labels, attention_mask)
        if past_key_values is None and use_cache:
            past_key_values = GenerationCache()
        cache = None
        if past_key_values is not None:
            batch, length = Inputs(input_ids, inputs_embeds).tokens.shape[:2]
            cache = past_key_values.extend(self.bare, batch, length)
            refuse_other_positions(position_ids, cache, attention_mask, length)
            position_ids = None
        if output_router_logits is None:
            output_router_logits = getattr(self.config, "output_router_logits", None)
        out = self.bare(
            input_ids, labels, attention_mask=attention_mask, position_ids=position_ids, cache=cache,
            inputs_embeds=inputs_embeds, logits_to_keep=logits_to_keep, output_router_logits=output_router_logits,
            num_items_in_batch=num_items_in_batch, **options,
        )  # fmt: skip
        named = MoeCausalLMOutputWithPast(
            loss=out.loss, aux_loss=out.aux_loss, logits=out.logits, past_key_values=past_key_values,
            hidden_states=out.hidden_states,
        )  # fmt: skip
        return named.to_tuple() if return_dict is False else named

    def train(self, mode: bool = True) -> Self:
        self.bare.training = mode
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.bare.tie_weights()  # to_empty() from the meta device separates them
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads as nn.Module does, but also takes the Hub's names; if not strict, also some of them, of any part."""
        if not strict:
            pack_some(self.bare, state_dict := dict(state_dict))
        result = super().load_state_dict(state_dict, strict, assign)
        self.bare.tie_weights()
        return result

    def init_weights(self) -> None:
        """Does nothing: the bare model has its weights."""

    def tie_weights(self, missing_keys: set[str] | None = None, recompute_mapping: bool = True) -> None:
        self.bare.tie_weights()

    @property
    def base_model(self) -> Backbone:
        return Backbone(self)

    def get_input_embeddings(self) -> nn.Module:
        return self.bare.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.bare.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.bare.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.bare.set_output_embeddings(as_fused_head(new_embeddings))

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> nn.Embedding:
        """Resizes as transformers does. The configuration and what `save_pretrained` writes have the new size."""
        embeddings = super().resize_token_embeddings(*arguments, **options)
        self.update_bare_config()
        return embeddings

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Does what `CausalLM.activation_checkpointing_enable` does."""
        self.bare.activation_checkpointing_enable(activation_checkpointing_kwargs, **options)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def activation_checkpointing_disable(self) -> None:
        self.bare.activation_checkpointing_disable()

    @property
    def is_activation_checkpointing(self) -> bool:
        return any(block.activation_checkpointing for block in self.bare.model.layers)

    gradient_checkpointing_disable = activation_checkpointing_disable
    is_gradient_checkpointing = is_activation_checkpointing

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None,
        past_key_values: GenerationCache | None = None, **kwargs: Any,
    ) -> dict[str, Any]:  # fmt: skip
        switch = self.bare.config.longrope_switch_length
        if past_key_values is not None and switch and past_key_values.length <= switch < input_ids.shape[1]:
            past_key_values.reset()  # the frequencies of all positions change
            next_sequence_length = None
        inputs = super().prepare_inputs_for_generation(input_ids, next_sequence_length, past_key_values, **kwargs)
        if past_key_values is not None:
            inputs.pop("position_ids", None)  # the cache knows them
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int,
        max_cache_length: int,
    ) -> None:  # fmt: skip
        refuse_other_caches(generation_config)
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = GenerationCache(max_cache_length)

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None, max_shard_size: int | str = "50GB", **options: Any,
    ) -> None:  # fmt: skip
        """Writes weights, config.json and generation_config.json with the Hub's names, over those in the folder.

        If parameters are sharded by FSDP2 and no state dict is passed, every rank must call.
        state_dict: the values to write, under the names of `state_dict()` or the Hub's.
        Raises CheckpointError if the folder cannot be written, InputError for an argument that is not supported.
        """
        for name, value in options.items():
            refuse_argument("save_pretrained", name, value)
        if not is_main_process and state_dict is not None:
            return
        self.update_bare_config()
        folder = Path(save_directory)
        temporary = folder / f".tmp-{os.getpid()}"
        values = None if state_dict is None else self.values_of(state_dict)
        changed = self.generation_config.to_dict() != self.initial_generation_config
        export_weights(
            self.bare, temporary, source=self.bare.source, max_shard_size=max_shard_size, values=values,
            also=self.generation_config.save_pretrained if changed else None, copied_files=(GENERATION_CONFIG_FILE,),
        )  # fmt: skip
        if is_first():
            replace_weights(folder, temporary)

    def values_of(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state dict by names of parameters. Raises InputError if one is missing."""
        values = dict(state_dict)
        accept_hub_names(self.bare, values, "", {})
        missing = [name for name, _ in self.named_parameters() if name not in values]
        if missing:
            raise InputError(f"save_pretrained: state_dict has no {missing[0]}, one of {len(missing)} that are missing")
        return values

    def update_bare_config(self) -> None:
        """Gives the bare model the fields that changed in the configuration since the model was made."""
        changed = changed_fields(self.initial_config, self.config)
        if changed:
            self.bare.config = type(self.bare.config).from_dict(with_changes(self.bare.config.raw, changed))
            self.initial_config = self.config.to_dict()


def predicted_items(items: Tensor | int, labels: Tensor, attention_mask: Tensor) -> Tensor:
    """The share of `items` that a micro-batch predicts: Trainer counts all labels [B, T] but each row's first.

    Not predicted is the first token behind padding: transformers predicts it from the padding, by numbers that depend
    on its implementation of attention. It counts as if it had the mean loss of its micro-batch.
    """
    counted = labels[:, 1:] != IGNORE_INDEX
    predicted = counted & (attention_mask[:, 1:] != 0) & (attention_mask[:, :-1] != 0)
    return items * (predicted.sum().clamp(min=1) / counted.sum().clamp(min=1))


def wrap(model: CausalLM) -> TransformersModel:
    """The face of a bare model, which it shares its parameters with."""
    raw = dict(model.config.raw)
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    config.dtype = model.dtype
    if model.source is not None:
        config.name_or_path = base_model_name(model.source)
    return MODEL_CLASSES[config.model_type](config, model)


def register() -> None:
    """Makes `AutoModelForCausalLM` return these models for our families, in the whole process. Whatever loads its model
    by that class then gets ours: pipelines, lm-eval, scripts."""
    for model_class in MODEL_CLASSES.values():
        AutoModelForCausalLM.register(model_class.config_class, model_class, exist_ok=True)


def unregister() -> None:
    """Undoes `register`."""
    for model_class in MODEL_CLASSES.values():
        AutoModelForCausalLM._model_mapping._extra_content.pop(model_class.config_class, None)


def accept_names_of_bare(model: TransformersModel, *arguments: Any) -> None:
    """A hook of load_state_dict: `accept_hub_names` of the bare model."""
    accept_hub_names(model.bare, *arguments)


def single_device(device_map: str | int | torch.device | Mapping[str, Any] | None) -> torch.device:
    """The device that a device map names. Raises InputError if it names several, or leaves the choice of several."""
    if device_map is None:
        return torch.get_default_device()
    devices = list(device_map.values()) if isinstance(device_map, Mapping) else [device_map]
    if devices == ["auto"] and torch.accelerator.device_count() <= 1:
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    if len(set(devices)) != 1 or devices[0] in ("auto", "balanced", "balanced_low_0", "sequential", "disk"):
        raise InputError(
            f"from_pretrained: device_map={device_map!r} may spread the model over several devices, which is not "
            "supported; pass one device"
        )
    return torch.device(devices[0])


def refuse_argument(function: str, name: str, value: Any) -> None:
    """Raises InputError for an argument of transformers that asks for something else than what is done."""
    if value is not None and value is not False and value != "" and FIXED_ARGUMENTS.get(name) != value:
        raise InputError(f"{function}: {name}={value!r} is not supported; leave it out")


def changed_fields(initial: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a configuration that were other, or not there, when `initial` was its `to_dict()`."""
    fields = config.to_dict()
    return {
        name: value
        for name, value in fields.items()
        if name not in BOOKKEEPING and (name not in initial or initial[name] != value)
    }


def with_changes(raw: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json with changed fields; new RoPE parameters replace the old fields of the same."""
    replaced = OLD_ROPE_FIELDS if "rope_parameters" in changed else ()
    return {name: value for name, value in raw.items() if name not in replaced} | dict(changed)


def as_fused_head(head: nn.Module) -> nn.Module:
    """A plain linear as the module that also computes the loss, with the same weight; any other head as it is."""
    if type(head) is not nn.Linear or head.bias is not None:
        return head
    fused = LMHead(head.in_features, head.out_features, bias=False, device="meta")
    fused.weight = head.weight
    return fused


def replace_weights(folder: Path, temporary: Path) -> None:
    """Moves the files of a folder inside `folder` there, in place of the weights that `folder` has."""
    for pattern in (SINGLE_FILE, INDEX_FILE, "model-*-of-*.safetensors"):
        for old in folder.glob(pattern):
            old.unlink()
    for file in temporary.iterdir():
        file.replace(folder / file.name)
    temporary.rmdir()


def model_class(model_type: str) -> type[TransformersModel]:
    """The class of a family, with the name of the one in transformers that it replaces."""
    architecture = ARCHITECTURES[model_type]
    attributes = {"config_class": CONFIG_MAPPING[model_type], "__module__": __name__, "__doc__": architecture.__doc__}
    return type(architecture.hub_class, (TransformersModel,), attributes)


MODEL_CLASSES = {name: model_class(name) for name in ARCHITECTURES if name in CONFIG_MAPPING}
globals().update({model.__name__: model for model in MODEL_CLASSES.values()})  # so that pickle finds them
