"""Training with images: which parts are trained, LoRA, activation checkpointing, memory, FLOPs."""

import copy
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ligermodels
from ligermodels.errors import InputError
from ligermodels.memory.model import count_parameters, training_memory
from ligermodels.training.planning.image_load import flops_per_patch
from ligermodels.vision.patch_positions import Grid
from tests.cases import CASES
from tests.conftest import DEVICE
from tests.parity import moved
from tests.vision import tiles
from tests.vision.batches import GRIDS, VISION_CASES, batch_of, completion_labels, image_token

FAMILIES = [name for name in VISION_CASES if "-" not in name]
A, B, C = GRIDS


def on_device(name, patterns):
    batch = batch_of(name, patterns)
    return moved(batch | {"labels": completion_labels(name, batch)})


@pytest.mark.parametrize("trained", [("projector", "text"), ("vision",), ("text",), ("vision", "projector", "text")])
def test_only_the_chosen_parts_change(trained):
    model, batch = ligermodels.create(CASES["qwen2_vl"], device=DEVICE), on_device("qwen2_vl", [[2, A, 3, B]])
    model.train_parts(trained)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(**batch).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    after = dict(model.named_parameters())
    parts = {id(p): part for part, parameters in model.parts().items() for p in parameters}
    assert {part: len(found) for part, found in model.parts().items()} == {"vision": 37, "projector": 6, "text": 24}
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (parts[id(after[name])] not in trained), name


@pytest.mark.parametrize("trained", ["projector", "vision", "LoRA of the tower"])
@pytest.mark.parametrize("name", [*FAMILIES, "mllama"])
def test_a_batch_without_an_image_has_zero_gradients_where_no_text_is_trained(name, trained):
    """Its loss is that of a model of which nothing is trained."""
    model, ids = ligermodels.create(CASES[name], device=DEVICE), torch.arange(3, 30, device=DEVICE)[None]
    model.requires_grad_(False)
    expected = model(ids, ids).loss
    if trained == "LoRA of the tower":
        ligermodels.add_lora(model, rank=2, targets=["vision"])
    else:
        model.train_parts([trained])
    loss = model(ids, ids).loss
    assert loss.item() == expected.item()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert gradients and all(grad is not None and not grad.any() for grad in gradients)
    with torch.no_grad():  # nor does a validation run the tower
        model.encode_images = model.unseen_image = None
        model(ids)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_no_block_with_biases_returns_a_view_because_fsdp_would_warn_about_it_on_every_rank(name):
    model = ligermodels.create(CASES[name])
    outputs = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, out: outputs.extend(x for x in out[:2] if x is not None))
    model(**batch_of(name, [[4, B, 3]]))
    assert len(outputs) >= len(model.blocks) and not any(x._is_view() for x in outputs)


def test_unknown_parts_are_refused():
    model = ligermodels.create(CASES["qwen2_vl"], device="meta")
    with pytest.raises(InputError, match="parts to train: tower; choose from: vision, projector, text"):
        model.train_parts(["tower"])
    with pytest.raises(InputError, match="parts to train: none"):
        model.train_parts([])


def test_a_frozen_tower_keeps_nothing_for_backward():
    model, batch = ligermodels.create(CASES["qwen2_5_vl"], device=DEVICE), on_device("qwen2_5_vl", [[2, A, 3]])
    model.train_parts(["projector", "text"])
    images = model.prepare_images(**{key: x for key, x in batch.items() if key != "labels"}).to(torch.device(DEVICE))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        model.encode_images(images)
    assert kept and all(shape[-1] != 3 * 24 for shape in kept)  # no packed queries, keys and values


@pytest.mark.parametrize("name", FAMILIES)
def test_activation_checkpointing_of_all_blocks_changes_no_gradient(name):
    model, batch = ligermodels.create(CASES[name], device=DEVICE), on_device(name, [[2, A, 3, B], [C, 1]])
    other = copy.deepcopy(model)
    other.checkpoint_activations()
    assert all(block.activation_checkpointing for block in other.blocks)
    for each in (model, other):
        each(**batch).loss.backward()
    for (parameter, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=parameter: f"{n}: {m}")


def test_the_blocks_of_the_tower_are_checkpointed_first():
    model = ligermodels.create(CASES["qwen2_vl"])
    model.checkpoint_activations(2)
    assert [block.activation_checkpointing for block in model.blocks] == [True] * 2 + [False] * 4
    model.train_parts(["text"])
    assert len(model.blocks) == 3


TARGETS = {
    "all-linear": ("all-linear", (3, 0)),
    "text by name": (["q_proj", "gate_proj"], (2, 0)),
    "the tower": ("vision", (0, 4)),
    "both": (["all-linear", "vision"], (4, 4)),
    "of the tower by name": (["qkv", "attn.proj"], (0, 2)),
}


@pytest.mark.parametrize("targets", TARGETS)
def test_lora_is_added_to_text_tower_or_both(targets):
    names, (text, tower) = TARGETS[targets]
    text = 4 if targets == "all-linear" else text
    model, batch = ligermodels.create(CASES["qwen2_vl"], device=DEVICE), on_device("qwen2_vl", [[2, A, 3]])
    ligermodels.add_lora(model, rank=2, targets=names)
    owners = [name for name, _ in model.named_parameters() if name.endswith("lora_A")]
    found = [sum(name.startswith(part) for name in owners) for part in ("model.layers.", "visual.blocks.")]
    assert found == [3 * text, 3 * tower]
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == name.endswith(("lora_A", "lora_B")), name


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava", "mistral3", "mllama", "paligemma"])
def test_lora_of_tower_and_text_survives_the_round_trip_of_an_adapter(name, tmp_path):
    """Names that both have, as q_proj of LLaVA, are of both; the output depends on the LoRA of both."""
    model = ligermodels.create(CASES[name])
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.fill_(0.5) if key.endswith(("gate_attn", "gate_ffn")) else None  # closed in a new model
    ligermodels.export(model, tmp_path / "base")
    model = ligermodels.load(tmp_path / "base")
    ligermodels.add_lora(model, rank=2, targets=["all-linear", "vision"])
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("lora_B"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(key)))
    ligermodels.export_adapter(model, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert {"qkv", "q_proj"} <= set(config["target_modules"]) or name != "qwen2_5_vl"
    other = ligermodels.load(tmp_path / "base").eval()
    batch = tiles.batch_of(name, [[tiles.WIDE, 3]]) if name == "mllama" else batch_of(name, [[2, A, 3]])
    before = other(**batch).logits
    ligermodels.load_adapter(other, tmp_path / "adapter")
    assert torch.equal(model(**batch).logits, other.eval()(**batch).logits)
    for part in (other.visual, other.model):
        kept = {key: p.clone() for key, p in part.named_parameters() if key.endswith("lora_B")}
        assert kept
        with torch.no_grad():
            for key, parameter in part.named_parameters():
                parameter.zero_() if key.endswith("lora_B") else None
            assert not torch.equal(other(**batch).logits, model(**batch).logits)
            assert not torch.equal(other(**batch).logits, before)
            part.load_state_dict(kept, strict=False)


def test_lora_on_a_tower_that_is_not_there_is_refused():
    with pytest.raises(InputError, match="'vision': the model has no vision tower"):
        ligermodels.add_lora(ligermodels.create(CASES["llama"], device="meta"), targets="vision")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "name",
    ["qwen2_vl", "qwen2_5_vl", "gemma3", "llava", "llava-three-blocks", "smolvlm", "mistral3", "pixtral", "paligemma"],
)
def test_activations_of_images_match_the_tensors_that_autograd_saves(name):
    patches, tokens, raw = 64, 16, CASES[name]
    if name == "gemma3":
        vision = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4, "image_size": 32}
        raw = raw | {"vision_config": raw["vision_config"] | vision, "mm_tokens_per_image": 16}
        images = {"pixel_values": torch.randn(1, 3, 32, 32)}
    elif name == "paligemma":
        vision = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4, "image_size": 32}
        raw, tokens = raw | {"vision_config": raw["vision_config"] | vision}, 64
        images = {"pixel_values": torch.randn(1, 3, 32, 32)}
    elif name.startswith("llava"):
        vision = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4, "image_size": 16}
        raw, tokens = raw | {"vision_config": raw["vision_config"] | vision}, 64
        images = {"pixel_values": torch.randn(1, 3, 16, 16)}
    elif name == "smolvlm":
        vision = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4, "image_size": 16}
        raw = raw | {"vision_config": raw["vision_config"] | vision}
        images = {"pixel_values": torch.randn(1, 1, 3, 16, 16)}
    elif name in ("mistral3", "pixtral"):
        vision = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4, "head_dim": 64}
        raw, tokens = raw | {"vision_config": raw["vision_config"] | vision}, 16 if name == "mistral3" else 64
        images = {"pixel_values": torch.randn(1, 3, 32, 32)}
    else:
        vision = raw["vision_config"] | {"depth": 2, "num_heads": 4, "patch_size": 4, "window_size": 64}
        wide = {"embed_dim": 256} if name == "qwen2_vl" else {"hidden_size": 256, "intermediate_size": 320}
        raw = raw | {"vision_config": vision | wide}
        images = {"pixel_values": torch.randn(patches, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    ids = torch.tensor([[5, 6, *[image_token(raw)] * tokens, 7, 8]], device=DEVICE)
    images = moved(images)
    labels = ids.masked_fill(torch.arange(ids.shape[1], device=DEVICE) < tokens + 2, -100)  # a prompt, then its answer

    def saved(**inputs):
        model = ligermodels.create(raw, device=DEVICE)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept = {}

        def keep(x):
            is_mask = x.shape[-2:] == (tokens + 4, tokens + 4)  # of tokens that see ahead; FlexAttention stores none
            if x.untyped_storage().data_ptr() not in weights and not is_mask:
                kept[x.untyped_storage().data_ptr()] = (x.untyped_storage().nbytes(), x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = model(ids, labels, **inputs).loss
        assert loss.requires_grad
        return sum(size for size, _ in kept.values())

    model = ligermodels.create(raw, device="meta")
    with_images, without = (
        training_memory(model, 1, tokens + 4, torch.float32, patches=n).activations for n in (patches, 0)
    )
    assert with_images - without == pytest.approx(saved(**images) - saved(), rel=0.03)


@pytest.mark.parametrize(
    "name", ["qwen2_vl", "qwen2_5_vl", "gemma3", "llava", "smolvlm", "mistral3", "pixtral", "paligemma"]
)
def test_the_flops_of_a_patch_equal_torchs_count(name):
    """Of linears, forward and backward, with everything trained but the pixels."""
    model, side = ligermodels.create(CASES[name]), {"gemma3": 4, "llava": 3, "smolvlm": 6, "paligemma": 3}.get(name, 8)
    grid = Grid(1, side, side)
    layout_inputs = batch_of(name, [[tuple(grid)]])
    images = model.prepare_images(**layout_inputs)
    with FlopCounterMode(display=False) as counter:
        model.encode_images(images).values.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    linear = sum(counts[op] for op in counts if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    # The sum over layers of the keys that a patch attends to.
    keys = {
        "qwen2_vl": 3 * 64, "qwen2_5_vl": 64 + 2 * 16, "gemma3": 2 * 16, "llava": 2 * 10 * 10 / 9, "smolvlm": 2 * 36,
        "mistral3": 2 * 64, "pixtral": 2 * 64, "paligemma": 2 * 9,
    }  # fmt: skip
    attention = 12 * model.config.vision.hidden_size * keys[name]
    assert flops_per_patch(model, [grid]) == pytest.approx(linear / grid.patches + attention)


def test_a_frozen_tower_is_whole_on_every_rank_in_the_estimate():
    model = ligermodels.create(CASES["qwen2_vl"], device="meta")
    shared = training_memory(model, 1, 8, torch.float32, shards=2).weights
    model.train_parts(["text"])
    tower = sum(p.nbytes - p[: -(-len(p) // 2)].nbytes for p in model.visual.parameters())
    assert training_memory(model, 1, 8, torch.float32, shards=2).weights == shared + tower > shared


def test_text_alone_reports_the_same_as_without_images():
    model = ligermodels.create(CASES["qwen2_vl"], device="meta")
    text = ligermodels.create({**CASES["qwen2_vl"], "model_type": "qwen2", "rope_scaling": None}, device="meta")
    assert training_memory(model, 2, 16, torch.float32).activations == pytest.approx(
        training_memory(text, 2, 16, torch.float32).activations
    )
    images = sum(p.numel() for part in ("vision", "projector") for p in model.parts()[part])
    assert count_parameters(model).total == count_parameters(text).total + images


RUNS = [
    {"name": "qwen2_5_vl", "parts": ["vision", "projector", "text"], "checkpointed_blocks": 4},
    {"name": "qwen2_vl", "parts": ["projector", "text"]},
    {"name": "mllama", "parts": ["vision", "projector", "text"], "checkpointed_blocks": 6},
    {"name": "mllama", "parts": ["text"]},
    {"name": "gemma3", "parts": ["vision", "projector", "text"], "checkpointed_blocks": 3},
    {"name": "llava", "parts": ["vision", "projector", "text"]},
    {"name": "smolvlm", "parts": ["vision", "projector", "text"]},
    {"name": "mistral3", "parts": ["vision", "projector", "text"]},
    {"name": "paligemma", "parts": ["vision", "projector", "text"]},
]


def test_ranks_without_images_give_the_losses_and_weights_of_one_rank(launcher, tmp_path):
    """With a trained tower, and with a frozen one; images on one rank, on the other, on none. No rank waits."""
    for ranks in (1, 2):
        launcher.succeed(tmp_path / f"{ranks}.pt", json.dumps(RUNS), ranks=ranks, module="tests.vision.worker")
    for got, expected in zip(torch.load(tmp_path / "2.pt"), torch.load(tmp_path / "1.pt"), strict=True):
        torch.testing.assert_close(got["losses"], expected["losses"], rtol=5e-6, atol=0)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(
                got["weights"][name], weight, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
