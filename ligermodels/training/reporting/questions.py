"""Accuracy on questions with a known answer, by greedy decoding. Must not know where the questions come from."""

from collections.abc import Mapping, Sequence

from ligermodels.generation.decoding import generate
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer

Prompt = str | Sequence[Mapping[str, str]]


def count_correct_answers(model: CausalLM, tokenizer: Tokenizer, questions: Sequence[tuple[Prompt, str]]) -> int:
    """Returns for how many questions the model's greedy continuation starts with the answer.

    questions: (prompt, answer). A prompt is the start of a text, or the messages of a conversation that the assistant
    continues. Text after the answer is ignored, so an answer must end in a way that no other answer starts with, such
    as "12." with its full stop.
    """
    prompts = [prompt_ids(tokenizer, prompt) for prompt, _ in questions]
    answers = [answer for _, answer in questions]
    longest = max(map(len, tokenizer.encode_batch([f" {answer}" for answer in answers], add_special_tokens=False)))
    was_training = model.training
    model.eval()
    replies = map(tokenizer.decode, generate(model, prompts, max_new_tokens=longest))
    model.train(was_training)
    return sum(reply.lstrip().startswith(answer) for reply, answer in zip(replies, answers, strict=True))


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Returns the token ids of a prompt; a conversation goes through the chat template."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
