"""What an exported model can do, measured in the same way whichever library trained it.

Log-probabilities are those of ligermodels, bf16 on a GPU, fp32 on a CPU. A completion's tokens are those of the chat
template up to the end of the turn, without the line break behind it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ligermodels
from benchmarks.real_models.brief import score
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer

PASSAGE = 1024  # tokens of a text that are read at once
ROW = 8192  # tokens of a packed row
ANSWER_TOKENS = 96
SHOWN = 3  # answers that are kept as samples
Record = dict[str, Any]


class Sequences(NamedTuple):
    """Token ids, and for each list of ids the place of the first token whose probability counts."""

    ids: list[list[int]]
    begins: list[int]


class Sums(NamedTuple):
    """fp64 [N]: the log-probability of each sequence's counted tokens in nats, and their number."""

    logprobs: torch.Tensor
    counts: torch.Tensor

    @property
    def loss(self) -> float:
        """In nats per token."""
        return -(self.logprobs.sum() / self.counts.sum()).item()


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> Sequences:
    """Passages of at most PASSAGE tokens. The first token of a text has no probability."""
    ids = [tokenizer.encode(text) for text in texts]
    passages = [row[first : first + PASSAGE] for row in ids for first in range(0, len(row) - 1, PASSAGE)]
    return Sequences(passages, [1] * len(passages))


def of_chats(tokenizer: Tokenizer, chats: Sequence[Sequence[Record]]) -> Sequences:
    """Chats whose last message counts."""
    prompts = [rendered(tokenizer, chat[:-1], add_generation_prompt=True) for chat in chats]
    wholes = [rendered(tokenizer, chat).rstrip("\n") for chat in chats]
    begins = [len(tokenizer.encode(prompt, add_special_tokens=False)) for prompt in prompts]
    return Sequences([tokenizer.encode(whole, add_special_tokens=False) for whole in wholes], begins)


def rendered(tokenizer: Tokenizer, messages: Sequence[Record], **options: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@torch.no_grad()
def sums(model: CausalLM, sequences: Sequences) -> Sums:
    """Sequences are packed into rows of at most ROW tokens, or of one longer sequence."""
    device = next(model.parameters()).device
    logprobs, counts = [], []
    for places in rows_of([len(ids) for ids in sequences.ids]):
        ids = [torch.tensor(sequences.ids[place]) for place in places]
        labels = [row.clone() for row in ids]
        for row, place in zip(labels, places, strict=True):
            row[: sequences.begins[place]] = -100
        ends = torch.tensor([0, *map(len, ids)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        inputs = torch.cat(ids)[None].to(device), torch.cat(labels)[None].to(device)
        found = model.logprobs(*inputs, cu_seqlens=ends.to(device)).logprobs[0].double().cpu()
        logprobs += [found[begin:end].sum() for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
        counts += [(row != -100).sum().double() for row in labels]
    return Sums(torch.stack(logprobs), torch.stack(counts))


def rows_of(lengths: Sequence[int]) -> list[list[int]]:
    rows: list[list[int]] = [[]]
    for place, length in enumerate(lengths):
        if rows[-1] and sum(lengths[other] for other in rows[-1]) + length > ROW:
            rows.append([])
        rows[-1].append(place)
    return rows


def answers(model: CausalLM, tokenizer: Tokenizer, chats: Sequence[Sequence[Record]]) -> list[str]:
    """Greedy answers to chats that end with the user."""
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    found = ligermodels.generate(model, prompts, max_new_tokens=ANSWER_TOKENS, tokenizer=tokenizer)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in found]


class Measure:
    """The held-out data. most: records of each kind that are read, of prose passages."""

    def __init__(self, data: Path, device: str, most: int | None = None) -> None:
        names = ("questions", "calls", "topics", "pairs", "prompts")
        self.records = {name: read(data / f"{name}-validation.jsonl")[:most] for name in names}
        self.prose = [record["text"] for record in read(data / "prose.jsonl")][:most]
        self.device, self.most = device, most

    def load(self, folder: Path) -> tuple[CausalLM, Tokenizer]:
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        return ligermodels.load(folder, dtype=dtype, device=self.device), ligermodels.load_tokenizer(folder)

    def __call__(self, folder: Path, name: str) -> Record:
        """Everything about a model that was trained on the data `name`."""
        model, tokenizer = self.load(folder)
        prose = of_texts(tokenizer, self.prose)
        cut = Sequences(prose.ids[: self.most], prose.begins[: self.most])
        found = {"prose_perplexity": torch.tensor(sums(model, cut).loss).exp().item()}
        asked = [record["messages"][:-1] for record in self.records["questions"][:SHOWN]]
        shown = [
            {"prompt": chat[-1]["content"], "answer": text}
            for chat, text in zip(asked, answers(model, tokenizer, asked), strict=True)
        ]
        return found | self.quick(model, tokenizer, name) | self.of_answers(model, tokenizer, name) | {"samples": shown}

    def quick(self, model: CausalLM, tokenizer: Tokenizer, name: str) -> Record:
        """The validation loss, or of pairs the log-probabilities: nothing is generated."""
        records = self.records[name]
        if name == "topics":
            return {"loss": sums(model, of_texts(tokenizer, [record["text"] for record in records])).loss}
        if name == "pairs":
            chosen, rejected = (
                sums(model, of_chats(tokenizer, [record["prompt"] + record[side] for record in records]))
                for side in ("chosen", "rejected")
            )
            differences = (chosen.logprobs - rejected.logprobs).tolist()
            return {"loss": chosen.loss, "differences": [round(value, 3) for value in differences]}
        if name == "prompts":
            return {}
        return {"loss": sums(model, of_chats(tokenizer, [record["messages"] for record in records])).loss}

    def of_answers(self, model: CausalLM, tokenizer: Tokenizer, name: str) -> Record:
        """calls: the share of answers that are the call that was meant. prompts: the mean reward."""
        records = self.records[name]
        if name == "calls":
            found = answers(model, tokenizer, [record["messages"][:-1] for record in records])
            wanted = [record["messages"][-1]["content"] for record in records]
            right = [same_json(text, whole) for text, whole in zip(found, wanted, strict=True)]
            return {"correct": sum(right) / len(right), "calls": found[:SHOWN]}
        if name == "prompts":
            found = answers(model, tokenizer, [record["prompt"] for record in records])
            rewards = [score(text, record["name"]) for text, record in zip(found, records, strict=True)]
            return {"reward": sum(rewards) / len(rewards), "brief": found[:SHOWN]}
        return {}


def same_json(text: str, wanted: str) -> bool:
    try:
        return json.loads(text) == json.loads(wanted)
    except ValueError:
        return False
