"""Reward models: a decoder with a score head, the Hub's sequence classification with one label.

A family's class becomes that of its reward model by `reward_model_class`; no family knows of it.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import _register_namedtuple

from ligermodels.configs.base import Config as AnyConfig
from ligermodels.errors import ConfigError, InputError
from ligermodels.kernels.attention.shared_keys import SharedKeys
from ligermodels.layers.context_parallel import ContextGroup
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.hub_interface import take_documents
from ligermodels.layers.inputs import Inputs
from ligermodels.layers.lm_head import ScoreHead
from ligermodels.weights.mapping import pieces_of
from ligermodels.weights.sharding import copy_local_shard

CLASS_SUFFIX = "ForSequenceClassification"
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # as transformers writes num_labels=1
DEFAULT_LABELS = 2  # of a config.json that names none
SCORE = "score.weight"


class RewardOutput(NamedTuple):
    """Fields are read by name or by index, as those of the Hub's sequence classification."""

    logits: Tensor  # [S, 1], fp32: the reward of each sequence


_register_namedtuple(RewardOutput, serialized_type_name="ligermodels.RewardOutput")


class RewardModel(CausalLM):
    """A decoder whose score head reads one token of a sequence. `reward_model_class` combines it with a family.

    Raises ConfigError for a config.json of a classifier with other than one label.
    """

    _tied_weights_keys: ClassVar = {}
    peft_task = "SEQ_CLS"

    def __init__(self, config: AnyConfig) -> None:
        super().__init__(reward_config(config, self.hub_class))
        del self.lm_head
        self.score = ScoreHead(config.hidden_size, 1, bias=False)

    @property
    def head(self) -> nn.Linear:
        return self.score

    def tie_weights(self) -> None:
        """Nothing is tied: the score head has one row."""

    def get_output_embeddings(self) -> None:  # type: ignore[override]
        """None, as for the Hub's classifiers."""
        return None

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        shared_keys: SharedKeys | None = None,
        inputs_embeds: Tensor | None = None,
        rows: Tensor | None = None,
        context: ContextGroup | None = None,
        **options: Any,
    ) -> RewardOutput:
        """input_ids [B, T] -> rewards as `logits` [B, 1], of packed rows [documents, 1].

        Arguments as those of the language model's `forward`, images among them. The head reads the last token of a row
        or document that is neither masked nor `pad_token_id`, as the Hub's classifiers do: where that is the end token
        too, the token before it.
        rows: int64 [S], the places in the flattened batch that it reads instead -> [S, 1].
        context: the ranks that share this row, which all of them pass whole; each gets the rewards of all documents,
        whose gradients are the sums of those on all ranks.
        Raises ValueError for several rows of which the ends are not known: without a mask and without `pad_token_id`.
        Raises InputError for a cache, as to generate.
        """
        if options.get("cache") is not None:
            raise InputError(f"{self.hub_class} is a reward model, without a language-model head: it cannot generate")
        images = options.pop("images", None) if self.takes_images else None
        pixels = {name: options.pop(name) for name in self.pixel_inputs if options.get(name) is not None}
        cu_seqlens, max_seqlen = take_documents(options, cu_seqlens, max_seqlen)
        if rows is None:
            rows = self.last_tokens(input_ids, inputs_embeds, attention_mask, cu_seqlens)
        inputs: dict[str, Any] = {
            "attention_mask": attention_mask, "position_ids": position_ids, "cu_seqlens": cu_seqlens,
            "max_seqlen": max_seqlen, "inputs_embeds": inputs_embeds, "shared_keys": shared_keys, "context": context,
        }  # fmt: skip
        if self.takes_images:
            input_ids, inputs = cast(Any, self).with_features(input_ids, images, pixels, **inputs)
        decoded = self.decode(Inputs(input_ids, **inputs))
        hidden = decoded.unpack(decoded.output.hidden).flatten(0, 1)
        if context is None:
            return RewardOutput(self.score(hidden.index_select(0, rows)))
        rows = rows - context.rank * len(hidden)
        scores = self.score(hidden.index_select(0, rows.clamp(0, len(hidden) - 1)))
        own = (rows >= 0) & (rows < len(hidden))
        return RewardOutput(context.sum(scores.where(own[:, None], 0)))

    def last_tokens(
        self, ids: Tensor | None, embeddings: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """The places [S] that the head reads: see `forward`."""
        like = ids if ids is not None else cast(Tensor, embeddings)
        (rows, length), padding = like.shape[:2], self.config.pad_token_id
        kept = torch.ones(rows, length, dtype=torch.bool, device=like.device) if mask is None else mask.bool()
        if ids is not None and padding is not None:
            kept = kept & (ids != padding)
        elif mask is None and cu_seqlens is None and rows > 1:
            raise ValueError("forward: pass attention_mask, or set config.pad_token_id: several rows may have padding")
        places = torch.where(kept, torch.arange(length, device=like.device), 0)
        if cu_seqlens is None:
            return places.amax(1) + length * torch.arange(rows, device=like.device)
        latest = places.flatten().cummax(0).values  # the last kept place up to each
        return torch.maximum(latest[cu_seqlens[1:].long() - 1], cu_seqlens[:-1].long())

    def with_new_head(self) -> None:
        """Makes loading take the checkpoint of a language model, whose head is left out.

        The score head then keeps its values: `initialize_new_parameters` gives it some.
        """
        layouts = self.weight_rules(), *self.other_weight_rules()
        heads = (piece.tensor for rules in layouts for piece in pieces_of("lm_head.weight", (1, 1), rules))
        self.new_parameters, self.left_out = (SCORE,), tuple(dict.fromkeys(heads))


@functools.cache
def reward_model_class(family: type[CausalLM], model_type: str) -> type[RewardModel]:
    """The reward model of a family, as an ordinary class: `LlamaForSequenceClassification`."""
    stem = family.hub_class.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    if model_type.endswith("_text"):
        stem = f"{stem}Text"
    name = stem + CLASS_SUFFIX
    return cast(type[RewardModel], type(name, (RewardModel, family), {"hub_class": name, "__module__": __name__}))


@torch.no_grad()
def initialize_new_parameters(model: CausalLM, seed: int) -> None:
    """Gives what no checkpoint fills, the head of a new reward model, random values that do not depend on the sharding:
    normal, with the config's initializer_range."""
    for name in model.new_parameters:
        parameter = model.get_parameter(name)
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        generator = torch.Generator(parameter.device).manual_seed(seed)
        copy_local_shard(parameter, value.normal_(0.0, model.config.initializer_range, generator=generator))


def is_classifier(raw: Any) -> bool:
    """Whether a config.json is that of a sequence classification."""
    names = raw.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name.endswith(CLASS_SUFFIX) for name in names)


def reward_config(config: AnyConfig, hub_class: str) -> AnyConfig:
    """The configuration of the reward model: that of a language model gets one label, that of a classifier is kept."""
    raw = dict(config.raw)
    if not is_classifier(raw):
        raw |= {"architectures": [hub_class]} | ONE_LABEL
    labels = len(raw["id2label"]) if isinstance(raw.get("id2label"), dict) else raw.get("num_labels", DEFAULT_LABELS)
    if labels != 1:
        raise ConfigError(f"config.json: id2label has {labels} labels; a reward model has one")
    return dataclasses.replace(config, tie_word_embeddings=False, raw=raw)
