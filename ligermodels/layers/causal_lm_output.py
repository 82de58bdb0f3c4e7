"""What a causal language model returns, and what its decoder does. Must not know how they are computed."""

from typing import NamedTuple

from torch import Tensor
from torch.utils._pytree import _register_namedtuple

from ligermodels.kernels.losses.linear_divergence import DivergenceOutput
from ligermodels.kernels.losses.logprobs_of_logits import LogProbs
from ligermodels.layers.row_layout import AlignedRows, PackedRows


class CausalLMOutput(NamedTuple):
    """Fields are read by name, `out.loss` or `out["loss"]`, or by index among those that are not None."""

    loss: Tensor | None  # scalar, fp32
    logits: Tensor | None  # [B, T, V]
    hidden_states: tuple[Tensor, ...] | None = None  # num_hidden_layers + 1 of [B, T, H]
    aux_loss: Tensor | None = None  # scalar, fp32: the routers' load-balancing loss, before its coefficient
    logprobs: LogProbs | None = None  # each field [B, T], or [N] of N rows
    divergence: DivergenceOutput | None = None  # from a teacher; its fields but the loss [B, T], or [N] of N rows

    def __getitem__(self, key):
        if isinstance(key, str):
            return self._asdict()[key]
        return tuple(value for value in self if value is not None)[key]


# Under this name torch.export.save writes the type of a program's output.
_register_namedtuple(CausalLMOutput, serialized_type_name="ligermodels.CausalLMOutput")


class DecoderOutput(NamedTuple):
    hidden: Tensor  # [B, T, H], after the final norm
    router_logits: list[Tensor]  # [B * T, E] of every router
    hidden_states: list[Tensor]  # if requested: the input of every block, then `hidden`


class Decoded(NamedTuple):
    """A batch behind the decoder, as the decoder has seen it: with a layout, tokens are where that has put them."""

    output: DecoderOutput
    labels: Tensor | None
    cu_seqlens: Tensor | None
    layout: PackedRows | AlignedRows | None

    def unpack(self, tokens: Tensor) -> Tensor:
        """What the decoder returned for tokens -> [B, T, ...], at their places in the batch."""
        return tokens if self.layout is None else self.layout.unpack(tokens)

    def router_logits(self) -> tuple[Tensor, ...]:
        """[B * T, E] of every router, at the tokens' places in the batch."""
        rows = self.output.hidden.shape[:2]
        return tuple(self.unpack(x.unflatten(0, rows)).flatten(0, 1) for x in self.output.router_logits)
