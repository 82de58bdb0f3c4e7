"""Steps: the units of a step in their endless order, dealt to ranks and packed into rows.

The units of a step, over all ranks and rows, depend only on the cursor, the number of units taken before the step, and
on the seed. A unit is a group: a pair, a judged completion, a prompt, a text to distil.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.training.data.preferences.formats import GroupKind
from ligermodels.training.data.preferences.layout import GroupPiece, PreferenceBatch, collate_row
from ligermodels.training.data.preferences.store import Group, GroupOptions, GroupPrompt, GroupStore, unshared
from ligermodels.training.data.rows.image_documents import ImageDecoder
from ligermodels.training.data.rows.packing import Concatenated, deal_units, pack_units
from ligermodels.training.data.rows.run_rows import HeldOutRows, MixedRows


@dataclass(frozen=True)
class GroupSelection:
    """Some groups of a store. numbers: int64 [U]. first: the number that the store's first document has in all data."""

    store: GroupStore
    numbers: np.ndarray
    first: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def fingerprint(self) -> str:
        """A hash of the groups' tokens, values and columns, and of their order."""
        digest = hashlib.sha256(self.store.digest.encode())
        for array in (self.store.tokens.hashes, self.numbers):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @property
    def hashes(self) -> np.ndarray:
        """uint64 [U], of the prompts."""
        return self.store.prompt_hashes[self.numbers]

    def select(self, mask: np.ndarray) -> "GroupSelection":
        """Returns the groups for which `mask` [U] bool is True."""
        return replace(self, numbers=self.numbers[mask])

    @property
    def tokens(self) -> int:
        starts = self.store.tokens.offsets[self.store.firsts]
        return int((starts[self.numbers + 1] - starts[self.numbers]).sum())

    def laid_out(self, share_prompts: bool) -> np.ndarray:
        """Tokens of each group in a row, and those of its images among them: int64 [2, U]."""
        store, tokens = self.store, self.store.tokens
        prompts, stops = store.firsts[self.numbers], store.firsts[self.numbers + 1]
        completions = stops - prompts - 1
        copies = np.ones_like(completions) if share_prompts else completions
        of_prompts, rest = (
            np.stack([before[last] - before[first] for before in (tokens.offsets, tokens.features_before)])
            for first, last in ((prompts, prompts + 1), (prompts + 1, stops))
        )  # [2, U]
        found = of_prompts * copies + rest
        found[0] += completions - copies  # the last token of a shared prompt is repeated
        return found

    @property
    def longest_prompt(self) -> int:
        """Tokens."""
        documents, offsets = self.store.firsts[self.numbers], self.store.tokens.offsets
        return int((offsets[documents + 1] - offsets[documents]).max())

    @property
    def longest_group(self) -> int:
        """Tokens of its completions."""
        documents, offsets = self.store.firsts, self.store.tokens.offsets
        return int((offsets[documents[self.numbers + 1]] - offsets[documents[self.numbers] + 1]).max())

    def places(self, index: int) -> list[str]:
        return [self.store.place(int(self.numbers[index]))]

    def piece(self, index: int, unit: int) -> GroupPiece:
        """Group number `index` of these. unit: the number that it gets in its step."""
        number = int(self.numbers[index])
        return GroupPiece(self.store.group(number), unit, 0, self.first + int(self.store.firsts[number]))


class Step(NamedTuple):
    """The micro-batches of one rank in one step; as many on every rank, some of them of padding alone.

    Over all ranks: units: groups of the step. supervised: their supervised tokens. tokens: computed, without padding.
    tokens_unshared: what they would be without shared prompts; `1 - tokens / tokens_unshared` is saved.
    """

    batches: list[PreferenceBatch]
    units: int
    supervised: int
    tokens: int
    tokens_unshared: int

    def to(self, device: torch.device) -> "Step":
        """Copies the micro-batches to a device."""
        return self._replace(batches=[batch.to(device) for batch in self.batches])


class Groups(Concatenated[GroupSelection]):
    """The groups of several selections, as one sequence, and their rows. decoder: of images; None if there are none."""

    def __init__(
        self, parts: Sequence[GroupSelection], options: GroupOptions, decoder: ImageDecoder | None = None
    ) -> None:
        super().__init__(parts)
        self.options, self.decoder = options, decoder

    @property
    def longest_prompt(self) -> int:
        """Tokens."""
        return max(part.longest_prompt for part in self.parts)

    @property
    def longest_group(self) -> int:
        """Tokens of its completions."""
        return max(part.longest_group for part in self.parts)

    @property
    def laid_out(self) -> np.ndarray:
        """Tokens of each group in a row, and those of its images among them: int64 [2, U]."""
        return np.concatenate([part.laid_out(self.options.share_prompts) for part in self.parts], 1)

    @property
    def column_names(self) -> list[str]:
        """The columns that any of the prompts has."""
        contents = (part.store.content(number) for part in self.parts for number in part.numbers.tolist())
        return list(dict.fromkeys(name for content in contents for name in content["columns"]))

    def piece(self, number: int, unit: int) -> GroupPiece:
        part, index = self.locate(number)
        return part.piece(index, unit)

    def value(self, number: int) -> float:
        part, index = self.locate(number)
        return float(part.store.values[part.numbers[index]])

    def completion_numbers(self, number: int) -> np.ndarray:
        """Returns the numbers that the completions of group number `number` have in all of the data, int64."""
        part, index = self.locate(number)
        first, last = (int(part.store.firsts[part.numbers[index] + more]) for more in (0, 1))
        return part.first + np.arange(first, last - 1)

    def prompt(self, number: int, unit: int) -> GroupPrompt:
        part, index = self.locate(number)
        return part.store.prompt(int(part.numbers[index]), unit)._replace(number=number)

    def dealt_prompts(self, numbers: Sequence[int], world: World) -> list[GroupPrompt]:
        """Returns this rank's prompts of these groups, dealt by their tokens; `unit` numbers all of them."""
        prompts = [self.prompt(number, unit) for unit, number in enumerate(numbers)]
        return [prompts[unit] for unit in deal_units([len(prompt.ids) for prompt in prompts], world.size)[world.rank]]

    def step(self, numbers: Sequence[int], world: World) -> Step:
        """Returns the step that has the groups of these numbers, in host memory, pinned if the rank has a GPU."""
        pieces = [self.piece(number, unit) for unit, number in enumerate(numbers)]
        return self.rows(pieces, [self.value(number) for number in numbers], self.options.kind, world)

    def rows(self, pieces: Sequence[GroupPiece], values: Sequence[float], kind: GroupKind | None, world: World) -> Step:
        options = self.options
        sizes = [piece.tokens(options.share_prompts) for piece in pieces]
        dealt = deal_units(sizes, world.data_size)
        packed = [pack_units([sizes[unit] for unit in units], options.tokens_per_row) for units in dealt]
        mine = dealt[world.data_rank]
        rows = [[mine[index] for index in row] for row in packed[world.data_rank]]
        rows += [[]] * (max(map(len, packed)) - len(rows))
        batches = [
            collate_row(
                [pieces[unit] for unit in row], options.share_prompts, values=[values[unit] for unit in row],
                kind=kind, decoder=self.decoder, world=world,
            )
            for row in rows
        ]  # fmt: skip
        groups = [piece.group for piece in pieces]
        return Step(batches, len(pieces), supervised(groups), sum(sizes), unshared(groups))

    def mismatched(self, numbers: Sequence[int], world: World, generator: np.random.Generator) -> Step:
        """Returns each group's prompt with the completion of another group: a cyclic shift of a random order.

        A completion without images is cut where it would exceed max_length behind the other prompt. A group alone, such
        as the last one of a validation, takes that of the group before it in the data. For the KL estimate of KTO.
        """
        own = [self.piece(number, unit) for unit, number in enumerate(numbers)]
        sources = own if len(own) > 1 else [self.piece((numbers[0] - 1) % len(self), 0)]
        order = generator.permutation(len(own))
        pieces = [own[0]] * len(own)
        for unit, other in zip(order.tolist(), np.roll(order, 1).tolist(), strict=True):
            prompt, source = own[unit].group.prompt, sources[other].group
            images = own[unit].group.images_of(0), *map(source.images_of, range(1, 1 + len(source.completions)))
            room = None if any(images[1:]) else max(1, self.options.max_length - len(prompt))
            masks = tuple(None if mask is None else mask[:room] for mask in source.supervised)
            completions = tuple(completion[:room] for completion in source.completions)
            pieces[unit] = GroupPiece(Group(prompt, completions, masks, images=images), unit)
        return self.rows(pieces, [np.nan] * len(pieces), None, world)


class TrainingGroups(MixedRows[Groups, Step]):
    """The groups that a run trains on."""

    def __init__(
        self, sources: Sequence[Sequence[GroupSelection]], weights: Sequence[float], seed: int, options: GroupOptions,
        decoder: ImageDecoder | None = None,
    ) -> None:  # fmt: skip
        groups = Groups([part for parts in sources for part in parts], options, decoder)
        super().__init__(groups, [sum(map(len, parts)) for parts in sources], weights, seed, decoder)
        self.seed, self.collate = seed, groups.step

    @property
    def groups(self) -> Groups:
        """The groups of all sources."""
        return self.rows

    @property
    def labels(self) -> tuple[int, int]:
        """How many judged completions are good, and how many are bad."""
        values = np.concatenate([part.store.values[part.numbers] for part in self.rows.parts])
        return int((values == 1).sum()), int((values == 0).sum())

    def step(self, cursor: int, count: int, world: World) -> Step:
        """Returns this rank's part, on its device, of the step that takes `count` units starting at `cursor`."""
        return self.prefetched(cursor, count, world).to(world.device)

    def collated(self, cursor: int, count: int, world: World) -> Step:
        """Returns the same step as `step`, without prefetching the next one."""
        return self.collate(self.numbers(cursor, count), world).to(world.device)

    def mismatched(self, cursor: int, count: int, world: World) -> Step:
        """Returns the step with other completions: each prompt with another unit's, in an order of the seed.

        KTO's z reads these. Raises InputError for a step of one unit.
        """
        if count < 2:
            raise InputError("a step has one example; the KL estimate of KTO compares examples: take 2 or more a step")
        generator = np.random.default_rng([self.seed % 2**64, cursor])
        return self.rows.mismatched(self.numbers(cursor, count), world, generator).to(world.device)

    def prompts(self, cursor: int, count: int, world: World) -> list[GroupPrompt]:
        """Returns this rank's prompts of the step, dealt by their tokens; `unit` is the number in the whole step."""
        return self.rows.dealt_prompts(self.numbers(cursor, count), world)


class ValidationGroups(HeldOutRows[Groups, Step]):
    """The groups of the validation split."""

    def __init__(
        self, parts: Sequence[GroupSelection], options: GroupOptions, decoder: ImageDecoder | None = None
    ) -> None:
        super().__init__(Groups(parts, options, decoder), decoder)

    @property
    def groups(self) -> Groups:
        return self.rows

    def steps(self, count: int, world: World) -> Iterator[Step]:
        """Returns every group once over all ranks, `count` at a time, on the rank's device."""
        return (step.to(world.device) for step in self.prefetched(count, world))

    def collate(self, numbers: range, world: World) -> Step:
        return self.rows.step(numbers[: len(self) - numbers.start], world)

    def prompts(self, world: World) -> list[GroupPrompt]:
        """Returns this rank's share of the prompts."""
        return self.rows.dealt_prompts(range(len(self)), world)


def supervised(groups: Sequence[Group]) -> int:
    return sum(
        len(completion) if mask is None else int(mask.sum())
        for group in groups
        for completion, mask in zip(group.completions, group.supervised, strict=True)
    )
