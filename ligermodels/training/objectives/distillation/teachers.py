"""Teachers of distillation: a frozen model beside the student. Must not know losses or steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.hub import create, quantise_on_meta, resolve
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.reward_model import RewardModel
from ligermodels.memory.model import decoder_blocks, gathered_bytes, held_bytes, inference_memory
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data.preferences import PreferenceBatch
from ligermodels.training.data.rows.batches import Batch
from ligermodels.training.objectives.vocabulary import refuse_other_tokens, tokenizer_of
from ligermodels.training.parallel import fsdp
from ligermodels.weights.loading import load_weights


class TeacherModel:
    """A model without gradients, sharded as the student is. Its weights are read by `prepare`."""

    def __init__(self, name: str) -> None:
        """Reads the configuration. The model is on the meta device; it has to get the compute dtype of the run.

        Raises HubError, ConfigError or CheckpointError; InputError for a reward model, which has no logits.
        """
        self.folder = resolve(name)
        self.model = create(self.folder, device="meta").requires_grad_(False)
        quantise_on_meta(self.model, self.folder, None)
        if isinstance(self.model, RewardModel):
            raise InputError(f"--teacher {name}: is a reward model, without logits of tokens; name a language model")

    @property
    def tokenizer(self) -> Tokenizer | None:
        return tokenizer_of(self.folder)

    @property
    def options(self) -> dict[str, Any]:
        """Of `linear_divergence`: what the teacher does to its logits."""
        config = self.model.config
        return {"teacher_softcap": config.logit_softcap, "teacher_logit_scale": config.logit_scale}

    def prepare(self, world: World, dp_replicate: int) -> None:
        fsdp.shard_frozen(self.model, world, self.model.dtype, dp_replicate=dp_replicate)
        self.model.to_empty(device=world.device)
        load_weights(self.model, self.folder)
        self.model.eval()

    @contextmanager
    def read(self, batch: Batch | PreferenceBatch) -> Iterator[tuple[Tensor, Tensor]]:
        """(states, weight) of the batch, as `linear_divergence` takes them: [N, H] at `batch.rows`, or [B, T, H]."""
        states = self.hidden(batch)
        with fsdp.gathered_head(self.model) as weight:
            yield states, weight

    @torch.no_grad()
    def hidden(self, batch: Batch | PreferenceBatch) -> Tensor:
        return self.model.final_hidden(
            batch.input_ids, cu_seqlens=batch.cu_seqlens, max_seqlen=batch.max_seqlen, rows=batch.rows
        )

    def memory(self, tokens: int, shards: int) -> int:
        """Bytes of a rank: its shard of the weights, and one block with the head while they compute."""
        fp32 = set(self.model.fp32_parameters())
        held = held_bytes(self.model.parameters(), shards, fp32)
        computing = inference_memory(self.model, 1, tokens, self.model.dtype).prompt
        if shards == 1:
            return held + computing
        size = self.model.dtype.itemsize
        gathered = max(gathered_bytes(block, size, fp32) for block in decoder_blocks(self.model))
        return held + computing + 2 * gathered + self.model.head.weight.numel() * size


def common_vocabulary(
    student: CausalLM, teacher: CausalLM, names: tuple[str, str], tokenizers: tuple[Tokenizer | None, Tokenizer | None]
) -> int | None:
    """The number of classes that are compared; None for all, if both models have equally many.

    Heads may be padded beyond the tokenizer to any size; what is compared is the tokenizer's part, renormalised.
    names: of student and teacher. Raises InputError for tokenizers that give a number to different tokens, and for
    heads of different sizes without tokenizers that tell which part is padding.
    """
    sizes = student.config.vocab_size, teacher.config.vocab_size
    own, other = tokenizers
    if own is not None and other is not None:
        refuse_other_tokens(own, other, names[0], f"--teacher {names[1]}")
    if sizes[0] == sizes[1]:
        return None
    if own is None or other is None or own.vocab_size > min(sizes):
        raise InputError(
            f"--teacher {names[1]}: has {sizes[1]} classes, {names[0]} has {sizes[0]}, and no tokenizer of both says "
            "that the rest is padding; take a teacher with the student's vocabulary"
        )
    return own.vocab_size
