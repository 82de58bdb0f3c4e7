"""What a model can do, in numbers of right answers to questions that have one. Must not know where they come from."""

from collections.abc import Mapping, Sequence

from ligermodels.generation.decoding import generate
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer

BATCH_SIZE = 32
Prompt = str | Sequence[Mapping[str, str]]


def right_answers(model: CausalLM, tokenizer: Tokenizer, questions: Sequence[tuple[Prompt, str]]) -> int:
    """How many prompts the model continues, word by likeliest word, with the answer.

    questions: (prompt, answer); the prompt is the beginning of a text, or the messages of a conversation, to which the
    assistant's next is given. What comes after the answer does not count: let it end as no other begins, as "12." does.
    """
    asked = sorted(((prompt_ids(tokenizer, prompt), answer) for prompt, answer in questions), key=lambda q: len(q[0]))
    right = 0
    was_training = model.training
    model.eval()
    for start in range(0, len(asked), BATCH_SIZE):
        prompts, answers = zip(*asked[start : start + BATCH_SIZE], strict=True)
        longest = max(map(len, tokenizer.encode_batch([f" {answer}" for answer in answers], add_special_tokens=False)))
        continued = map(tokenizer.decode, generate(model, prompts, max_new_tokens=longest))
        right += sum(text.lstrip().startswith(answer) for text, answer in zip(continued, answers, strict=True))
    model.train(was_training)
    return right


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
