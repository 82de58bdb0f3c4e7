"""How good a model is: its loss on validation data, right answers to their questions, a sample. Must not know files."""

import torch

from ligermodels.generate import generate
from ligermodels.layers.decoder import CausalLM
from ligermodels.training.data import Data, supervised
from ligermodels.training.reporting.metrics import Metrics
from ligermodels.training.reporting.skill import prompt_ids, right_answers
from ligermodels.training.scaling.parallel import World, total

SAMPLE_TOKENS = 40


@torch.no_grad()
def evaluate(model: CausalLM, data: Data, step: int, micro_batch_size: int, world: World, metrics: Metrics) -> None:
    """Nats per predicted token of all validation rows, over all ranks; right answers, and a sample."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    for batch in data.validation.batches(micro_batch_size, world):
        summed = model(**batch._asdict(), num_items_in_batch=1).loss
        totals += torch.stack([summed, supervised(batch)])
    loss, count = total(totals).tolist()
    metrics.validation(step, loss / count, data.floor)
    with torch.compiler.set_stance("force_eager"):  # every length would be compiled for
        if data.tokenizer and data.questions:
            metrics.skill(step, right_answers(model, data.tokenizer, data.questions), len(data.questions))
        if data.tokenizer:
            begun = prompt_ids(data.tokenizer, data.questions[0][0]) if data.questions else data.validation.beginning()
            new = generate(model, [begun], max_new_tokens=SAMPLE_TOKENS)[0]
            metrics.sample(step, f"{data.tokenizer.decode(begun)} | {data.tokenizer.decode(new)}")
    model.train()
