"""Training of Llama 3.2 Vision: LoRA on its tower, the memory and the FLOPs of its images, the plan of a run."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ligermodels
from ligermodels.memory.model import decoder_blocks, training_memory
from ligermodels.training.planning.image_load import flops_per_seeing_token, flops_per_tiled_image
from ligermodels.training.reporting.flops import flops_per_token
from tests.cases import CASES
from tests.conftest import DEVICE
from tests.parity import moved
from tests.vision.batches import labels_for
from tests.vision.tiles import SQUARE, WIDE, batch_of

TILE = {"hidden_size": 128, "intermediate_size": 160, "attention_heads": 4, "image_size": 24, "patch_size": 4}
LARGER = CASES["mllama"] | {"vision_config": CASES["mllama"]["vision_config"] | TILE | {"vision_output_dim": 384}}


def on_device(patterns):
    batch = batch_of("mllama", patterns)
    return moved(batch | {"labels": labels_for("mllama", batch)})


# Of 3 + 2 blocks of the tower and 2 of the text with four linears each, and 2 of cross-attention with five.
TARGETS = {"all-linear": (18, 0), "vision": (0, 20), "both": (18, 20), "fc1": (0, 5), "q_proj": (4, 0)}


@pytest.mark.parametrize("target", TARGETS)
def test_lora_is_added_to_text_tower_or_both(target):
    model = ligermodels.create(CASES["mllama"], device=DEVICE)
    ligermodels.add_lora(model, rank=2, targets=["all-linear", "vision"] if target == "both" else target)
    with torch.no_grad():
        for block in (*model.tower_blocks, *decoder_blocks(model)):
            for name, parameter in block.named_parameters():
                if name.startswith("gate_"):
                    parameter.fill_(0.5)
    owners = [name for name, _ in model.named_parameters() if name.endswith("lora_A")]
    assert tuple(sum(name.startswith(part) for name in owners) for part in ("model.", "visual.")) == TARGETS[target]
    model(**on_device([[2, WIDE, 3]])).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == name.endswith(("lora_A", "lora_B")), name
        assert not name.endswith("lora_B") or parameter.grad.any(), name


SAVED = [("vision", "projector", "text"), ("text",)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("trained", SAVED)
def test_activations_of_images_match_the_tensors_that_autograd_saves(trained):
    ids = torch.tensor([[99, *range(5, 24)]], device=DEVICE)
    images = {
        "pixel_values": torch.randn(1, 1, 4, 3, 24, 24), "aspect_ratio_ids": torch.tensor([[6]]),
        "aspect_ratio_mask": torch.ones(1, 1, 4),
    }  # fmt: skip
    model = ligermodels.create(LARGER, device=DEVICE)
    model.train_parts(trained)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def saved(inputs):
        kept = {}

        def keep(x):
            if x.untyped_storage().data_ptr() not in weights:
                kept[x.untyped_storage().data_ptr()] = (x.untyped_storage().nbytes(), x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model(ids, ids.masked_fill(ids == 99, -100), **inputs)
        return sum(size for size, _ in kept.values())

    planned = [training_memory(model, 1, 20, torch.float32, patches=n).activations for n in (4 * 36, 0)]
    # Without a GPU the outputs of the tower's attention are kept document by document, and together.
    copied = 5 * 4 * 40 * 128 * 4 * ("vision" in trained)
    kept = saved(moved(images)) - saved({}) - (copied if DEVICE == "cpu" else 0)
    assert planned[0] - planned[1] == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize("trained", [*SAVED, ("projector", "text")])
def test_the_flops_of_images_equal_torchs_count(trained):
    """Of linears; and of tokens that all see the image. The text model alone counts no cross-attention."""
    model = ligermodels.create(CASES["mllama"], device=DEVICE)
    model.train_parts(trained)
    batch = on_device([[SQUARE, 6]])
    del batch["labels"]
    without = {"input_ids": batch["input_ids"]}

    def counted(inputs):
        with FlopCounterMode(display=False) as counter:
            model(**inputs).logits.sum().backward()
        counts = counter.get_flop_counts()["Global"]
        return sum(counts[op] for op in counts if op in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm))

    vision = model.config.vision
    rows, states, valid = 4 * vision.rows_per_tile, 4 * vision.tokens_per_tile, 4 * vision.tokens_per_tile
    pairs = valid * rows + (rows - valid) * valid
    attention = 5 * (12 if "vision" in trained else 4) * vision.hidden_size * pairs
    scores = 2 * 12 * model.config.query_size * states
    image = flops_per_tiled_image(model, [4]) - attention
    token = flops_per_seeing_token(model, 4) - scores
    assert counted(batch) - counted(without) == image + 7 * token
    scores_of_text = 2 * 12 * model.config.query_size * 4  # 7 tokens attend to 4 keys on average
    assert counted(without) == 7 * (flops_per_token(model, 7) - scores_of_text)
