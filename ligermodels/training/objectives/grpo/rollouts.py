"""Rollouts: the completions of one generation with what the updates read of them, in host memory, on every rank.

They are plain tensors, so that a checkpoint holds them: a run that is killed between two updates of a generation
continues with the same completions.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.distributed import World
from ligermodels.training.data.preferences import Group, PreferenceBatch, collate_groups, empty_batch
from ligermodels.training.data.preferences.layout import GroupPiece, padded, split_group
from ligermodels.training.data.rows.packing import deal_units, pack_units
from ligermodels.training.objectives.grpo.judging import RewardedGroup


@dataclass(frozen=True)
class Rollouts:
    """Q prompts with G completions each, C = Q G, of all ranks; completion c belongs to prompt c // G.

    first_step: int64 [1], the completed steps when they were sampled. prompts int64 [P] and prompt_offsets int64
    [Q + 1]: token ids of the prompts, and where each begins. ids int64 [N], offsets int64 [C + 1]: those of the
    completions, the stop token included. sampling_logprobs: fp32 [N], of the distribution that each token was drawn
    from. advantages: fp32 [C]. kept: bool [C], the completions that updates read. old_logprobs, ref_logprobs: fp32 [N],
    of the policy before the first update and of the reference; token_mask: fp32 [N], those of high entropy; [0] where
    the loss needs none.
    """

    first_step: Tensor
    prompts: Tensor
    prompt_offsets: Tensor
    ids: Tensor
    offsets: Tensor
    sampling_logprobs: Tensor
    advantages: Tensor
    kept: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    token_mask: Tensor

    @property
    def generations(self) -> int:
        """G."""
        return (len(self.offsets) - 1) // (len(self.prompt_offsets) - 1)

    def state(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> "Rollouts":
        return cls(**{field.name: state[field.name] for field in dataclasses.fields(cls)})

    def tokens_of(self, completions: Sequence[int]) -> Tensor:
        """The places in [N] of the tokens of some completions, one after another, int64."""
        spans = [torch.arange(*self.offsets[c : c + 2].tolist()) for c in completions]
        return torch.cat([*spans, torch.arange(0)])

    @property
    def read_tokens(self) -> Tensor:
        """The places in [N] of the tokens that updates read, int64."""
        return self.tokens_of(self.kept.nonzero()[:, 0].tolist())

    def kept_of(self, prompt: int) -> list[int]:
        """The completions of a prompt that updates read."""
        first = prompt * self.generations
        return [first + side for side in range(self.generations) if self.kept[first + side]]

    def group(self, prompt: int) -> Group:
        """A prompt with those of its completions that updates read."""
        ids = self.prompts[self.prompt_offsets[prompt] : self.prompt_offsets[prompt + 1]].numpy()
        kept = [self.ids[self.offsets[c] : self.offsets[c + 1]].numpy() for c in self.kept_of(prompt)]
        return Group(ids, tuple(kept), (None,) * len(kept))


class Scores(NamedTuple):
    """What models say of the tokens of rollouts, fp32 [N]; 0 where updates do not read them.

    logprobs and entropy are the policy's. reference has the log-probabilities of the reference; 0 without one.
    """

    logprobs: Tensor
    entropy: Tensor
    reference: Tensor


def pack_rollouts(groups: Sequence[RewardedGroup], first_step: int) -> Rollouts:
    """The rollouts of some prompts, all with as many samples; without advantages, all kept."""
    samples = [sample for group in groups for sample in group.samples]
    prompts = [torch.from_numpy(group.prompt.ids) for group in groups]
    return Rollouts(
        first_step=torch.tensor([first_step]), prompts=torch.cat(prompts), prompt_offsets=offsets_of(prompts),
        ids=torch.tensor([token for sample in samples for token in sample.ids]),
        offsets=offsets_of([sample.ids for sample in samples]),
        sampling_logprobs=torch.tensor([value for sample in samples for value in sample.logprobs]),
        advantages=torch.zeros(len(samples)), kept=torch.ones(len(samples), dtype=torch.bool),
        old_logprobs=torch.zeros(0), ref_logprobs=torch.zeros(0), token_mask=torch.zeros(0),
    )  # fmt: skip


def offsets_of(parts: Sequence[Sized]) -> Tensor:
    return torch.tensor([0, *map(len, parts)]).cumsum(0)


@dataclass(frozen=True)
class RolloutBatch:
    """A packed row and the values of its S completions and N tokens, on the device; one micro-batch of a rank.

    places: int64 [M] on the host, of its tokens in the rollouts. old_logprobs, ref_logprobs, token_mask: fp32 [N] with
    zeros in the padding, or None. sampling_logprobs: fp32 [N]. advantages: fp32 [S].
    """

    batch: PreferenceBatch
    places: Tensor
    advantages: Tensor
    sampling_logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    token_mask: Tensor | None


@dataclass(frozen=True)
class MiniBatch:
    """The part of a generation that one update reads: this rank's rows, and counts over all ranks.

    completions, supervised: how many completions and tokens the loss reads. unmasked: the tokens among these that it
    trains on, those of high entropy where there is a mask. tokens: computed, without padding; tokens_unshared: what
    they would be with a prompt for each completion.
    """

    rows: list[tuple[PreferenceBatch, list[int]]]
    completions: int
    supervised: int
    unmasked: int
    tokens: int
    tokens_unshared: int


def mini_batch(rollouts: Rollouts, prompts: Sequence[int], length: int, *, share: bool, world: World) -> MiniBatch:
    """The rows of some prompts of a generation, of at most `length` tokens, each with the numbers of its completions.

    Groups are dealt to ranks whole, by their tokens. Every rank gets the same number of rows, some of padding alone.
    """
    read = [prompt for prompt in prompts if rollouts.kept_of(prompt)]
    groups = [rollouts.group(prompt) for prompt in read]
    sizes = [GroupPiece(group, 0).tokens(share) for group in groups]
    dealt = deal_units(sizes, world.data_size)
    most = max(count_rows([groups[unit] for unit in units], length, share) for units in dealt)
    mine = dealt[world.data_rank]
    batches = collate_groups(
        [groups[u] for u in mine], [read[u] for u in mine], length, share_prompts=share, world=world
    )
    batches += [empty_batch(world) for _ in range(max(1, most) - len(batches))]
    supervised = sum(sum(group.lengths) for group in groups)
    unshared = sum(len(group.prompt) * len(group.completions) for group in groups) + supervised
    completions = sum(len(group.completions) for group in groups)
    rows = [(batch, places_of_completions(rollouts, batch)) for batch in batches]
    unmasked = supervised
    if len(rollouts.token_mask):
        kept = [completion for prompt in read for completion in rollouts.kept_of(prompt)]
        unmasked = int(rollouts.token_mask[rollouts.tokens_of(kept)].sum())
    return MiniBatch(rows, completions, supervised, unmasked, sum(sizes), unshared)


def count_rows(groups: Sequence[Group], length: int, share: bool) -> int:
    """How many rows `collate_groups` makes of some groups."""
    pieces = [part for group in groups for part in split_group(GroupPiece(group, 0), length, share)]
    return len(pack_units([piece.tokens(share) for piece in pieces], length)) if pieces else 0


def places_of_completions(rollouts: Rollouts, batch: PreferenceBatch) -> list[int]:
    """The number of each of a batch's completions in the rollouts."""
    kept = {unit: rollouts.kept_of(unit) for unit in set(batch.units.tolist())}
    return [kept[unit][side] for unit, side in zip(batch.units.tolist(), batch.sides.tolist(), strict=True)]


def with_values(rollouts: Rollouts, rows: MiniBatch, device: torch.device) -> Iterator[RolloutBatch]:
    """The rows with their values, on the device."""
    for batch, completions in rows.rows:
        places = rollouts.tokens_of(completions)
        size = padded(batch.supervised)

        def of_tokens(values: Tensor, places: Tensor = places, size: int = size) -> Tensor | None:
            return padded_values(values[places], size).to(device, non_blocking=True) if len(values) else None

        sampling = padded_values(rollouts.sampling_logprobs[places], size)
        yield RolloutBatch(
            batch.to(device), places, rollouts.advantages[completions].to(device), sampling.to(device),
            of_tokens(rollouts.old_logprobs), of_tokens(rollouts.ref_logprobs), of_tokens(rollouts.token_mask),
        )  # fmt: skip


def padded_values(values: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, size - len(values)))
