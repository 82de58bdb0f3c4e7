"""The processes that plan and that chat for the board: `python -m ligermodels.board.answers plan`, or `chat`.

The one that plans writes and downloads nothing, and runs no code of rewards; one that chats keeps one model at a time.
"""

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ligermodels import hub
from ligermodels.board.form import refuse_outside
from ligermodels.board.processes import answer_questions
from ligermodels.generation.decoding import engine_for
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer
from ligermodels.training import TrainConfig, plan
from ligermodels.training.model_weights import load_checkpoint
from ligermodels.training.settings.settings import config_of_run, parsed_value

Loaded = tuple[CausalLM, Tokenizer]
in_memory: dict[str, Loaded] = {}  # at most one, by its question


def spoken(question: Mapping[str, Any], is_cancelled: Callable[[], bool]) -> Iterator[Mapping[str, Any]]:
    """The text that a model answers, piece by piece.

    question: "folder" of an export or adapter, or of a run, with the "step" of a checkpoint; "folders" of the board;
    "messages" of a conversation, or a "prompt" to continue; "max_new_tokens" and "sampling".
    """
    key = f"{question['folder']} {question['step']}"
    if key not in in_memory:
        yield {"state": "loading"}
        in_memory.clear()
        gc.collect()
        in_memory[key] = load_model(Path(question["folder"]), question["step"], [*map(Path, question["folders"])])
    model, tokenizer = in_memory[key]
    if question["messages"]:
        ids = tokenizer.apply_chat_template(question["messages"], add_generation_prompt=True)
    else:
        ids = tokenizer.encode_prompt(question["prompt"])
    shown = () if question["messages"] else ids
    engine = engine_for(model, tokenizer, [ids], question["max_new_tokens"], None, question["sampling"], shown)
    yield {"state": "answering", "prompt_tokens": len(ids)}
    for step in engine.run():
        for drawn in step:
            yield {"text": drawn.text, "finish": drawn.sample.finish_reason}
        if is_cancelled():
            return


def load_model(folder: Path, step: int | None, folders: list[Path]) -> Loaded:
    if step is not None:
        config = config_of_run(folder)
        refuse_outside(config, folders)
        return load_checkpoint(config, folder, step)
    base, adapter = hub.resolve_with_adapter(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = hub.load(base, device=device)
    if adapter:
        hub.load_adapter(model, adapter)
    return model.eval(), hub.load_tokenizer(base, adapter=adapter)


def planned(question: Mapping[str, Any], is_cancelled: Callable[[], bool]) -> Iterator[Mapping[str, Any]]:
    """The plan of the settings in a question. Raises InputError where `train` would refuse them."""
    settings = {name: parsed_value(name, value, name) for name, value in question["settings"].items()}
    made = plan(TrainConfig(**settings), runs_code=False)
    parts = {part: size for part, size in made.memory.parts.items() if size}
    yield {"table": [*made.table()], "parts": parts, "peaks": dict(made.phases)}


if __name__ == "__main__":
    answer_questions({"plan": planned, "chat": spoken}[sys.argv[1]])
