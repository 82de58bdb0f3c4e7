"""What parity tests compare: results of our model and of the reference implementation, in one dtype and in fp64."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from ligermodels.layers.decoder import CausalLM
from ligermodels.weights.mapping import plan_pieces
from tests.cases import CASES
from tests.conftest import DEVICE
from tests.kernels.error_budget import FACTOR, relative_error
from tests.reference_model import KeepFp64, save_reference
from tests.reference_model import hub_tensors as reference_hub_tensors

Batch = dict[str, Tensor]
LEARNING_RATE = 0.5
# Our fp32 error, against the reference in fp64, may be this many times the reference's own: the order of sums differs.
FP32_FACTOR = 4.0
HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16


def cast(inputs: Batch, dtype: torch.dtype) -> Batch:
    return {key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs.items()}


def moved(inputs: Batch, device: str = DEVICE) -> Batch:
    return {key: x.to(device) for key, x in inputs.items()}


def hub_tensors(model: CausalLM) -> Batch:
    """The weights of a model under the names and with the shapes of the checkpoint that it was loaded from."""
    parameters = dict(model.named_parameters())
    pieces = plan_pieces({name: p.shape for name, p in parameters.items()}, model.export_rules())
    return {piece.tensor: piece.from_box(parameters[piece.parameter].detach()[piece.index]) for piece in pieces}


def results(model: nn.Module, inputs: Batch, step_from_zero: bool) -> Batch:
    """Logits of tokens, loss, and the change of each weight in one SGD step, by Hub name.

    inputs: labels too. step_from_zero: a step from the weights is rounded to their last place, an error that is larger
    than all others where a step is small. It hides those of fused attention in the small steps of towers for images,
    where its backward errs ten times as much as that of eager attention.
    """
    tokens = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    is_ours = isinstance(model, CausalLM)
    named = hub_tensors if is_ours else reference_hub_tensors
    out = model(**inputs)
    loss, logits = out.loss, out.logits[tokens]
    if is_ours:  # which may compute other things where no gradient is wanted
        with torch.no_grad():
            logits = model(**{key: x for key, x in inputs.items() if key != "labels"}).logits[tokens]
    loss.backward()
    before = {} if step_from_zero else {name: x.clone() for name, x in named(model).items()}
    if step_from_zero:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    steps = {name: x - before.get(name, 0) for name, x in named(model).items()}
    return {name: x.detach().cpu() for name, x in ({"logits": logits, "loss": loss} | steps).items()}


@functools.lru_cache(maxsize=2)  # the tests of a case's breaks follow each other
def reference_results(
    name: str, inputs_of: Callable[..., Batch], size: int | str, step_from_zero: bool
) -> tuple[TemporaryDirectory, Batch, Batch]:
    """The checkpoint of a case, in a folder that goes with it, and the reference's results in fp64 and in fp32.

    inputs_of: from (name, size), the inputs of the reference.
    """
    folder = TemporaryDirectory()
    reference, inputs = save_reference(CASES[name], Path(folder.name)), inputs_of(name, size)
    with KeepFp64():
        exact = results(copy.deepcopy(reference).double(), cast(inputs, torch.float64), step_from_zero)
    return folder, exact, results(reference, inputs, step_from_zero)


@torch.no_grad()
def check_half_precision(model: CausalLM, reference: nn.Module, inputs: Batch, inputs_of_reference: Batch) -> None:
    """Relative to the reference in fp64, our error is at most FACTOR times that of the reference in half precision.

    model: in half precision, on the device. The others are in fp32 on the CPU.
    """
    plain, theirs = reference.to(HALF), cast(inputs_of_reference, HALF)
    exact = copy.deepcopy(plain).double()(**cast(theirs, torch.float64)).logits
    own_error = relative_error(plain.to(DEVICE)(**moved(theirs)).logits.cpu(), exact)
    error = relative_error(model(**moved(cast(inputs, HALF))).logits.cpu(), exact)
    assert error <= FACTOR * own_error, f"ours {error:.2e}, the reference's {own_error:.2e}"
