"""Activation checkpointing of a model's blocks, also under the names that the Hub's trainers call.

Must not know how many blocks need it.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import nn

from ligermodels.layers.block import Block
from ligermodels.layers.checkpointing.kept_tensors import choose_kept
from ligermodels.layers.checkpointing.offloaded_inputs import OffloadedInputs


class CheckpointedModel(nn.Module):
    """Base class of a model that consists of blocks."""

    @property
    @abstractmethod
    def blocks(self) -> list[Block]:
        """All blocks through which gradients flow, in the order of the forward pass."""

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
        """Undoes `checkpoint_activations`."""
        for block in self.blocks:
            block.keep_activations()

    def gradient_checkpointing_disable(self) -> None:
        """`activation_checkpointing_disable`, under its older name."""
        self.activation_checkpointing_disable()

    def checkpoint_activations(
        self, count: int | None = None, kept_tensors: int | None = 0, sequence_length: int = 1
    ) -> None:
        """Enables activation checkpointing in the first `count` blocks; None for all.

        It takes the first blocks because their backward runs last, when the other blocks have freed their activations.
        kept_tensors: how many results these blocks keep; None for all that `choose_kept` finds, with sequences of
        sequence_length tokens.
        """
        blocks = self.blocks[:count]
        for block, kept in zip(blocks, choose_kept(blocks, kept_tensors, sequence_length), strict=True):
            block.checkpoint_activations({tensor.size for tensor in kept})

    def offload_inputs(self, count: int | None = None, every: int = 1) -> None:
        """Keeps the inputs of every k-th of the first `count` blocks, which are checkpointed, in pinned host memory.

        count: None for all blocks. every: k.
        """
        offloaded = OffloadedInputs()
        for block in self.blocks[:count][::every]:
            block.offloaded_inputs = offloaded
