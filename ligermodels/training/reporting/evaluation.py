"""How good a model is: its loss on validation data, right answers to their questions, a sample. Must not know files."""

from collections.abc import Callable

import torch

from ligermodels.distributed import World, total
from ligermodels.generation.decoding import generate
from ligermodels.layers.decoder import CausalLM
from ligermodels.training.data import Data, ValidationRows, count_supervised
from ligermodels.training.reporting.metrics import Metrics
from ligermodels.training.reporting.skill import prompt_ids, right_answers
from ligermodels.training.runs.stopping import Stop
from ligermodels.training.scaling.host_reads import read_later

SAMPLE_TOKENS = 40


@torch.no_grad()
def evaluate(
    model: CausalLM, data: Data, micro_batch_size: int, world: World, metrics: Metrics, stop: Stop, step: int
) -> None:
    """Reports the loss of all validation rows, right answers and a sample; nothing where the run is told to stop, which
    must not wait for them."""
    model.eval()
    loss = validation_loss(model, data.validation, micro_batch_size, world, stop)
    if loss is not None:
        metrics.validation(step, loss, data.floor)
        with torch.compiler.set_stance("force_eager"):  # every length would be compiled for
            show_skill(model, data, step, metrics)
    model.train()


def validation_loss(
    model: CausalLM, validation: ValidationRows, micro_batch_size: int, world: World, stop: Stop
) -> float | None:
    """Nats per predicted token, over all ranks; None where one of them is told to stop, which all hear at one batch."""
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    told = told_to_stop(stop, world)
    for batch in validation.batches(micro_batch_size, world):
        if told():
            return None
        told = told_to_stop(stop, world)  # heard before the next batch: a GPU computes this one meanwhile
        summed = model(**batch._asdict(), num_items_in_batch=1).loss
        totals += torch.stack([summed, count_supervised(batch)])
    loss, count = total(totals).tolist()
    return loss / count


def told_to_stop(stop: Stop, world: World) -> Callable[[], bool]:
    """Asks all ranks whether one is told to stop; what it returns waits for their answer."""
    if world.size == 1:
        return lambda: stop.requested
    read = read_later(total(torch.full((1,), float(stop.requested), device=world.device)))
    return lambda: read()[0] > 0


def show_skill(model: CausalLM, data: Data, step: int, metrics: Metrics) -> None:
    if data.tokenizer is None:
        return
    if data.questions:
        metrics.skill(step, right_answers(model, data.tokenizer, data.questions), len(data.questions))
    begun = prompt_ids(data.tokenizer, data.questions[0][0]) if data.questions else data.validation.sample_prompt()
    new = generate(model, [begun], max_new_tokens=SAMPLE_TOKENS)[0]
    metrics.sample(step, f"{data.tokenizer.decode(begun)} | {data.tokenizer.decode(new)}")
