"""Validation of a model: loss on the validation data, accuracy on questions with a known answer, and a sample."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.distributed import World, total
from ligermodels.generation.decoding import generate
from ligermodels.images.inputs import Processor
from ligermodels.layers.checkpointing.host_memory import read_async
from ligermodels.layers.context_parallel import ContextGroup
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data import Data, ValidationRows, count_supervised
from ligermodels.training.reporting.metrics import Validation
from ligermodels.training.run.stopping import Stop

SAMPLE_TOKENS = 40
Prompt = str | Sequence[Mapping[str, Any]]


@torch.no_grad()
def evaluate(
    model: CausalLM, data: Data, micro_batch_size: int, world: World, stop: Stop, context: ContextGroup | None = None,
    generates: bool = True,
) -> Validation | None:  # fmt: skip
    """Computes the validation loss, the accuracy on questions and a sample. Every rank calls it.

    data: its validation rows, tokenizer and questions. micro_batch_size: rows per forward pass of a rank. stop: if a
    signal requests a stop, validation ends early. context: the ranks that share this rank's rows, if any. The loss is
    in nats per supervised token, the same bits on all ranks; None if validation ended early. generates: whether there
    are answers and a sample.
    """
    model.eval()
    loss, found = validation_loss(model, data.validation, micro_batch_size, world, stop, context), None
    if loss is not None:
        answers, sample = answers_and_sample(model, data) if generates else (None, None)
        found = Validation(loss, floor=data.floor, answers=answers, sample=sample)
    model.train()
    return found


def validation_loss(
    model: CausalLM, validation: ValidationRows, micro_batch_size: int, world: World, stop: Stop,
    context: ContextGroup | None = None,
) -> float | None:  # fmt: skip
    """Returns the loss in nats per supervised token over all ranks; None if a rank was signalled to stop.

    All ranks stop before the same batch.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    stop_requested = start_stop_check(stop, world)
    for batch in validation.batches(micro_batch_size, world):
        if stop_requested():
            return None
        stop_requested = start_stop_check(stop, world)  # read before the next batch, while a GPU computes this one
        summed = model(**batch.arguments(), num_items_in_batch=1, skip_logits=True, context=context).loss
        totals += torch.stack([summed, count_supervised(batch) / world.context])
    loss, count = total(totals).tolist()
    return loss / count


def start_stop_check(stop: Stop, world: World) -> Callable[[], bool]:
    """Starts an all-reduce of the stop requests.

    The returned function waits for it, and returns whether any rank was signalled to stop.
    """
    if world.size == 1:
        return lambda: stop.requested
    read = read_async(total(torch.full((1,), float(stop.requested), device=world.device)))
    return lambda: read()[0] > 0


def answers_and_sample(model: CausalLM, data: Data) -> tuple[tuple[int, int] | None, str | None]:
    """What `correct_answers` and `greedy_sample` find."""
    with torch.compiler.set_stance("force_eager"):  # otherwise every prompt length would be compiled
        return correct_answers(model, data), greedy_sample(model, data)


def correct_answers(model: CausalLM, data: Data) -> tuple[int, int] | None:
    """How many of the data's questions are answered correctly, and how many there are; None without any."""
    if data.tokenizer is None or not data.questions:
        return None
    return count_correct_answers(model, data.tokenizer, data.questions, data.processor), len(data.questions)


def greedy_sample(model: CausalLM, data: Data) -> str | None:
    """The first question, or the beginning of a validation text, and its continuation; None without a tokenizer.

    The prompt is the same in all validations of a run, whose samples can be compared. Special tokens are left out.
    """
    if data.tokenizer is None:
        return None
    if data.questions:
        prompt, images = prompt_inputs(data.tokenizer, data.questions[0][0], data.processor)
    else:
        prompt, images = data.validation.sample_prompt(), data.validation.sample_images()
    new = generate(model, [prompt], images=[images], max_new_tokens=SAMPLE_TOKENS)[0]
    return f"{data.tokenizer.decode(prompt)} | {data.tokenizer.decode(new)}"


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
