"""A reward model as a function of prompts and completions, with the signature of TRL's, and as a reward of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.hub import create, load, resolve
from ligermodels.layers.reward_model import RewardModel
from ligermodels.memory.model import elements, inference_memory
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data.formats.records import BadLines, GroupRecord
from ligermodels.training.data.preferences.store import GroupOptions
from ligermodels.training.data.preferences.tokenization import GroupTokenizer
from ligermodels.training.data.reader import read_tokenizer_and_end

TOKENS_PER_PASS = 2**14
REWARD_MODEL = "model:"  # what --reward has before the name of one


class RewardModelFunction:
    """`reward(prompts, completions)` -> one number for each completion, of the tokens that training would make of them.

        reward = RewardModelFunction.load("runs/reward/model", device="cuda", dtype="bfloat16")
        reward(["1 + 1 ="], [" 2."])

    end: the token that ends a text. max_length: of a prompt with its completion.
    """

    def __init__(self, model: RewardModel, tokenizer: Tokenizer, end: int, max_length: int | None = None) -> None:
        self.model = model
        length = max_length or model.config.max_position_embeddings
        self.tokenizer = GroupTokenizer(tokenizer, end, GroupOptions(kind="judged", max_length=length), BadLines(0))
        self.__name__ = type(model).__name__ if model.source is None else model.source.name  # of metrics

    @classmethod
    def load(cls, name_or_folder: str | Path, **options: Any) -> "RewardModelFunction":
        """Loads a reward model with the options of `ligermodels.load`. Raises InputError for a language model."""
        folder = resolve(name_or_folder)
        model = load(folder, **options)
        if not isinstance(model, RewardModel):
            raise InputError(f"{name_or_folder}: is a language model; train a reward model with --objective reward")
        return cls(model, *read_tokenizer_and_end(folder))

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Scores completions. Prompts and completions are strings, or lists of messages; columns have no effect.

        Raises InputError, which names the completion, for one that is too long or cannot be rendered.
        """
        records = [
            GroupRecord(prompt, (completion,), f"completion {number}")
            for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        scores: list[float] = []
        for part in split_by_tokens(self.documents(records)):
            scores += self.scores(part).tolist()
        return scores

    def documents(self, records: Sequence[GroupRecord]) -> list[list[int]]:
        found = {group.place: [*group.prompt, *group.completions[0]] for group in self.tokenizer.groups(records)}
        absent = next((record.place for record in records if record.place not in found), None)
        if absent is not None:
            raise InputError(f"{absent}: is longer than {self.tokenizer.options.max_length} tokens")
        return [found[record.place] for record in records]

    def scores(self, documents: Sequence[Sequence[int]]) -> Tensor:
        device = self.model.device
        lengths = torch.tensor([0, *map(len, documents)])
        ids = torch.tensor([token for document in documents for token in document])[None]
        offsets = lengths.cumsum(0).to(device, torch.int32)
        return self.model(ids.to(device), cu_seqlens=offsets, max_seqlen=int(lengths.max())).logits[:, 0]


def split_by_tokens(documents: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Parts of at most TOKENS_PER_PASS tokens, in order; a longer document is a part of its own."""
    parts: list[list[Sequence[int]]] = []
    size = 0
    for document in documents:
        if not parts or size + len(document) > TOKENS_PER_PASS:
            parts.append([])
            size = 0
        parts[-1].append(document)
        size += len(document)
    return parts


class ModelReward:
    """A reward model, whole on each rank, which scores completions in packed rows without gradients.

    name: a Hub id or a folder. Its weights are read by `load`. Raises HubError, ConfigError or CheckpointError;
    InputError for a language model.
    """

    def __init__(self, name: str) -> None:
        self.folder = resolve(name)
        self.model = create(self.folder, device="meta")
        if not isinstance(self.model, RewardModel):
            raise InputError(
                f"--reward {REWARD_MODEL}{name}: is a language model; train a reward model with --objective reward"
            )
        self.tokenizer = read_tokenizer_and_end(self.folder)
        self.function: RewardModelFunction | None = None

    def bytes(self, dtype: torch.dtype) -> tuple[int, int]:
        """Returns the bytes of the weights, and those of a pass over completions, in this dtype."""
        one_pass = inference_memory(self.model, 1, TOKENS_PER_PASS, dtype).prompt
        return elements(self.model.parameters()) * dtype.itemsize, one_pass

    def load(self, device: torch.device, dtype: torch.dtype) -> None:
        model = cast(RewardModel, load(self.folder, device=device, dtype=dtype).eval())
        self.function = RewardModelFunction(model, *self.tokenizer)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        assert self.function is not None  # `load` came first
        return self.function(prompts, completions)
