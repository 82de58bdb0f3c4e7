"""What tools of the Hub call and read of a model: Hugging Face's Trainer, TRL, PEFT, their collators.

`CausalLM` has it, so that these tools also take a model without its face of integrations/transformers.py.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.layers.block import Block
from ligermodels.layers.packed import put_together, take_apart_trained

# Options of the Hub's forward with the only value that they can have here.
FIXED_OPTIONS = {"return_dict": True, "output_attentions": False, "use_cache": False}
# Its options that collators pass for packed documents.
PACKING_OPTIONS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class HubInterface(nn.Module):
    """Base class of models that consist of blocks."""

    accepts_loss_kwargs = True  # Hugging Face's Trainer then passes num_items_in_batch,
    loss_type = "ForCausalLM"  # and counts the labels that are targets
    is_gradient_checkpointing = False  # PEFT need not make embeddings require gradients: ours is not reentrant
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}  # PEFT reads it with the config

    @property
    @abstractmethod
    def blocks(self) -> list[Block]:
        """All blocks through which gradients flow, in the order of the forward pass."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises InputError if the head is given an adapter: PEFT's "all-linear" would give it one."""
        if name == "lm_head" and hasattr(value, "base_layer"):
            raise InputError(
                "lm_head cannot have an adapter, which PEFT's 'all-linear' includes: set exclude_modules=['lm_head'], "
                "or train it as a whole, with modules_to_save=['lm_head']"
            )
        super().__setattr__(name, value)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **inputs: Any) -> dict[str, Any]:
        """The arguments of `forward`; a method that PEFT expects of causal language models."""
        return {"input_ids": input_ids} | inputs

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Enables activation checkpointing in every n-th block, under the name that the Hub's trainers call.

        Raises ValueError for reentrant checkpointing, which the fused nodes do not support, and for offloading.
        """
        if (activation_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError("activation checkpointing: use_reentrant must be False")
        if offload:
            raise ValueError("activation checkpointing: offload is not supported; leave it out")
        for block in self.blocks[::every_n_layers]:
            block.checkpoint_activations()

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """`activation_checkpointing_enable`, under its older name."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def activation_checkpointing_disable(self) -> None:
        for block in self.blocks:
            block.keep_activations()

    def gradient_checkpointing_disable(self) -> None:
        """`activation_checkpointing_disable`, under its older name."""
        self.activation_checkpointing_disable()


class AdaptableModule:
    """Base class of models that PEFT adapts: packed linears keep up with what it sets and deletes, `peft_config`."""

    @property
    def peft_config(self) -> dict[str, Any]:
        """The configurations of PEFT's adapters by their names, while the model has adapters."""
        if "_peft_config" not in vars(self):
            raise AttributeError("peft_config")
        return vars(self)["_peft_config"]

    @peft_config.setter
    def peft_config(self, configs: dict[str, Any]) -> None:
        """PEFT has added adapters: what is trained of packed linears (biases) gets the Hub's names, too."""
        vars(self)["_peft_config"] = configs
        take_apart_trained(cast(nn.Module, self))

    @peft_config.deleter
    def peft_config(self) -> None:
        """PEFT has merged or removed its adapters: the linears that it took apart are packed again."""
        del vars(self)["_peft_config"]
        put_together(cast(nn.Module, self))


def take_documents(
    options: dict[str, Any], cu_seqlens: Tensor | None, max_seqlen: int | None
) -> tuple[Tensor | None, int | None]:
    """Takes the packed documents of the Hub's collators out of options: cu_seqlens and max_seqlen, which they replace.

    cu_seq_lens_q, cu_seq_lens_k: the offsets. max_length_q, max_length_k: the longest document's length.
    seq_idx: the number of each token's document, only beside the offsets.
    Raises ValueError for offsets that are not the same for queries and keys, TypeError for seq_idx without offsets and
    for options that have no effect here.
    """
    queries, keys, longest, _, seq_idx = (options.pop(name, None) for name in PACKING_OPTIONS)
    refuse_options(options)
    if queries is not None:
        if cu_seqlens is not None or (keys is not None and keys is not queries and not torch.equal(keys, queries)):
            raise ValueError("forward: cu_seq_lens_q and cu_seq_lens_k must be equal, and replace cu_seqlens")
        cu_seqlens, max_seqlen = queries.int(), longest
    if seq_idx is not None and cu_seqlens is None:
        raise TypeError("forward: seq_idx is not supported; leave it out")
    return cu_seqlens, max_seqlen


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raises TypeError for options of the Hub's forward that would have no effect, RuntimeError under torch.jit."""
    if torch.jit.is_tracing():
        raise RuntimeError("ligermodels: torch.jit.trace is not supported; use torch.compile or torch.export")
    for name, value in options.items():
        if value is not None and (name not in FIXED_OPTIONS or value != FIXED_OPTIONS[name]):
            given = name if isinstance(value, Tensor) else f"{name}={value!r}"
            raise TypeError(f"forward: {given} is not supported; leave it out")
