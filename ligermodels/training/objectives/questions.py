"""Accuracy on questions with a known answer, by greedy decoding."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ligermodels.generation.decoding import generate
from ligermodels.images.inputs import Processor
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer

Prompt = str | Sequence[Mapping[str, Any]]


def count_correct_answers(
    model: CausalLM, tokenizer: Tokenizer, questions: Sequence[tuple[Prompt, str]], processor: Processor | None = None
) -> int:
    """Returns for how many questions the model's greedy continuation starts with the answer.

    questions: (prompt, answer). A prompt is the start of a text, or the messages of a conversation that the assistant
    continues, with images if there is a `processor`. Text after the answer is ignored, so an answer must end in a way
    that no other answer starts with, such as "12." with its full stop.
    """
    inputs = [prompt_inputs(tokenizer, prompt, processor) for prompt, _ in questions]
    answers = [answer for _, answer in questions]
    longest = max(map(len, tokenizer.encode_batch([f" {answer}" for answer in answers], add_special_tokens=False)))
    was_training = model.training
    model.eval()
    prompts, images = [ids for ids, _ in inputs], [pixels for _, pixels in inputs]
    replies = map(tokenizer.decode, generate(model, prompts, images=images, max_new_tokens=longest))
    model.train(was_training)
    return sum(reply.lstrip().startswith(answer) for reply, answer in zip(replies, answers, strict=True))


def prompt_inputs(
    tokenizer: Tokenizer, prompt: Prompt, processor: Processor | None
) -> tuple[list[int], Mapping[str, Tensor]]:
    """The token ids of a prompt and its images; a conversation goes through the chat template."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt), {}
    if processor is None:
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True), {}
    inputs = processor.apply_chat_template(prompt, add_generation_prompt=True)
    ids = inputs.pop("input_ids")[0].tolist()
    del inputs["attention_mask"]  # of a single row: ones
    return ids, inputs
