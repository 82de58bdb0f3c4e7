"""A run on pictures: it trains, resumes on its data, and exports a folder from which questions are answered alike."""

import json
import re
import shutil

import pytest
import torch
from PIL import Image
from transformers import PaliGemmaForConditionalGeneration

import ligermodels
from ligermodels.architectures import ARCHITECTURES
from ligermodels.errors import InputError
from ligermodels.memory.model import training_memory
from ligermodels.training import TrainConfig, train
from ligermodels.training.data import embedded
from ligermodels.training.data.embedded import shape_conversations, shape_question
from ligermodels.training.objectives.sft import SFT
from ligermodels.training.planning.image_load import flops_per_patch
from ligermodels.training.preparing import plan
from ligermodels.training.reporting.flops import flops_per_token
from ligermodels.training.settings.settings import config_of_run
from ligermodels.vision.patch_positions import Grid
from tests.images.folders import picture, png, write_folder
from tests.images.models import save_image_model
from tests.suites import quick
from tests.training.launching import TRAIN, losses, weights


@pytest.mark.parametrize(
    "family", quick(["qwen2_vl", "gemma3", "llava", "smolvlm", "mistral3", "mllama"], ["qwen2_vl", "mllama"])
)
def test_shapes_train_and_export(family, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "TRAINING_SHAPES", 24)
    monkeypatch.setattr(embedded, "VALIDATION_SHAPES", 4)
    monkeypatch.setattr(embedded, "VALIDATION_QUESTIONS", 2)
    config = TrainConfig(
        model=family, data=("shapes",), steps=2, batch_size=2, sequence_length=128, eval_every=2,
        output=str(tmp_path / "run"),
    )  # fmt: skip
    result = train(config)
    losses = [record["loss"] for record in result.metrics if "loss" in record]
    assert len(losses) == 2 and losses[1] < losses[0]
    [validation] = [record for record in result.metrics if "validation_loss" in record and record["step"] == 2]
    assert validation["questions"] == 2

    processor, model = ligermodels.load_processor(result.exported), ligermodels.load(result.exported)
    (picture, messages), *_ = shape_conversations(7, 1)
    prompt, _ = shape_question(picture, messages)
    inputs = processor.apply_chat_template(prompt, add_generation_prompt=True)
    with torch.no_grad():
        trained = result.model.eval()(**inputs).logits
        assert torch.equal(model(**inputs).logits, trained)
        other = processor.apply_chat_template(
            shape_question(next(shape_conversations(8, 1))[0], messages)[0], add_generation_prompt=True
        )
        assert torch.equal(inputs["input_ids"], other["input_ids"])
        assert not torch.equal(model(**other).logits, trained)


def colours(folder, count):
    """Writes questions about pictures, data.jsonl and shown/data.jsonl, and a model of prompts with images, `model`.

    Returns the model's folder.
    """
    names = ["red", "green"] * (count // 2)
    for number, name in enumerate(names):
        Image.new("RGB", (30 + number, 20), name).save(folder / f"{number}.png")
    records = [{"prompt": "colour?", "completion": name, "images": [f"{n}.png"]} for n, name in enumerate(names)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    raw = ARCHITECTURES["paligemma"].SIZES["tiny"]
    text = raw["text_config"] | {"vocab_size": 264}
    model = folder / "model"
    ligermodels.export(
        ligermodels.create(raw | {"text_config": text, "image_token_index": 256, "eos_token_id": 258}), model
    )
    write_folder(model, "Siglip", {"size": {"height": 56, "width": 56}, "image_seq_length": 16}, {})
    (folder / "shown").mkdir()
    Image.new("RGB", (20, 20), "red").save(folder / "shown/0.png")
    (folder / "shown/data.jsonl").write_text(json.dumps(records[0]))
    return model


def test_prompts_with_images_train_and_export(tmp_path, monkeypatch):
    """PaliGemma's: the exported folder gives transformers the loss of the trained model on a prompt and its answer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = colours(tmp_path, 16)
    config = TrainConfig(
        model=str(folder), data=(str(tmp_path / "data.jsonl"),), steps=3, batch_size=1, sequence_length=128,
        eval_every=3, validation_fraction=0.25, output=str(tmp_path / "run"),
    )  # fmt: skip
    result = train(config)
    losses = [record["loss"] for record in result.metrics if "loss" in record]
    assert len(losses) == 3 and losses[-1] < losses[0]
    processor = ligermodels.load_processor(result.exported)
    inputs = processor("colour?", [tmp_path / "0.png"], suffix="red")
    with torch.no_grad():
        loss = result.model.eval()(**inputs).loss
        by_labels = result.model(**{name: x for name, x in inputs.items() if name != "token_type_ids"}).loss
        assert torch.equal(ligermodels.load(result.exported)(**inputs).loss, loss) and torch.equal(by_labels, loss)
        reference = PaliGemmaForConditionalGeneration.from_pretrained(result.exported)
        assert loss.item() == pytest.approx(reference(**inputs).loss.item(), rel=1e-5)


COLOURS = ["--model", "model", "--data", "data.jsonl", "--batch-size", "2", "--sequence-length", "64"]
COLOURS += ["--packing", "off", "--steps", "5", "--validation-data", "shown/data.jsonl"]


def test_a_picture_that_cannot_be_decoded_ends_a_run_with_its_last_step_saved(launcher):
    """On all ranks; with the picture restored, the run ends as one that was not interrupted."""
    folder = launcher.folder
    colours(folder, 12)
    launcher.succeed(*COLOURS, "--output", "whole", ranks=2)
    picture = folder / "3.png"
    content = picture.read_bytes()
    picture.write_bytes(content[:-30])
    ended = launcher.run(*COLOURS, "--output", "ended", ranks=2)
    [line] = re.findall("^ligermodels: .*", ended.stderr, re.MULTILINE)
    assert ended.statuses == [2, 2] and line == (
        "ligermodels: data.jsonl:4: image: cannot be decoded: image file is truncated; restore the image; step 3 is "
        f"saved; to continue from it: torchrun --nproc-per-node 2 {TRAIN} --resume ended"
    )
    assert [path.name for path in (folder / "ended/checkpoints").iterdir()] == ["step-000003"]
    picture.write_bytes(content)
    done = launcher.succeed("--resume", "ended", ranks=2)
    assert "ended: resumes after step 3\n" in done.stdout
    assert losses(folder / "ended") == losses(folder / "whole") and weights(folder / "ended") == weights(
        folder / "whole"
    )


def test_a_picture_of_the_validation_that_cannot_be_decoded_leaves_the_last_step_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = colours(tmp_path, 4)
    picture = tmp_path / "shown/0.png"
    half = picture.read_bytes()[:-30]
    monkeypatch.setattr(SFT, "finish_step", lambda self, model, step: picture.write_bytes(half))
    config = TrainConfig(
        model=str(model), data=(str(tmp_path / "data.jsonl"),), validation_data=(str(tmp_path / "shown/data.jsonl"),),
        steps=4, batch_size=1, sequence_length=64, eval_every=2, output=str(tmp_path / "run"),
    )  # fmt: skip
    with pytest.raises(InputError, match=r"shown/data.jsonl:1: image: cannot be decoded: .*; step 2 is saved; to "):
        train(config)


QUICK = {"data": ("shapes",), "steps": 2, "batch_size": 2, "sequence_length": 128}


@pytest.fixture
def few_data(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "TRAINING_SHAPES", 24)
    monkeypatch.setattr(embedded, "VALIDATION_SHAPES", 4)
    monkeypatch.setattr(embedded, "VALIDATION_QUESTIONS", 2)
    monkeypatch.setattr(embedded, "TRAINING_STORIES", 200)
    monkeypatch.setattr(embedded, "VALIDATION_STORIES", 8)


@pytest.mark.usefixtures("few_data")
def test_frozen_parts_stay_and_parts_have_their_own_learning_rates(tmp_path):
    """A projector with a thousandth of the rate of the text moves a thousandth as far in the first step."""

    def changes(**settings):
        config = TrainConfig(model="qwen2_vl", **QUICK | {"steps": 1}, output=tmp_path / f"{len(settings)}", **settings)
        model = train(config).model
        before = dict(ligermodels.create("qwen2_vl", size="tiny", seed=0).named_parameters())
        matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1}
        moved = {name: (p - before[name]).abs().max().item() for name, p in matrices.items()}
        return {part: max(moved[f"{part}.{name}"] for name, p in getattr(model, part).named_parameters() if p.ndim > 1)
                for part in ("visual", "projector", "model")}  # fmt: skip

    every = changes()
    assert every["visual"] > 1e-5 and every["projector"] > 1e-5
    some = changes(train_parts=("projector", "text"), projector_learning_rate=1e-6)
    assert some["visual"] == 0 and some["model"] == pytest.approx(every["model"], rel=0.01)
    assert some["projector"] == pytest.approx(1e-3 * every["projector"], rel=0.01)


MIXED = {
    "the projector": {"train_parts": ("projector",)},
    "the tower, during backward": {"train_parts": ("vision",), "optimizer_in_backward": True},
    "LoRA of the tower": {"lora_rank": 2, "lora_targets": ("vision",)},
    "preferences": {"lora_rank": 2, "lora_targets": ("vision",), "objective": "dpo"},
}  # fmt: skip


@pytest.mark.parametrize("case", quick(MIXED, ["the projector", "the tower, during backward"]))
def test_steps_without_an_image_train_nothing_where_no_text_is_trained(case, tmp_path, monkeypatch):
    """The norms of their gradients are zero, and those of the other steps are not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    folder = save_image_model(tmp_path / "model", "qwen2_vl")
    preferences = "objective" in MIXED[case]
    records = []
    for number in range(12):
        question, images = [{"role": "user", "content": f"question {number}"}], {}
        if number % 4 == 0:
            (tmp_path / f"{number}.png").write_bytes(png(picture(12, 8 + number, seed=number)))
            question[0]["content"] = [{"type": "image"}, {"type": "text", "text": "what?"}]
            images = {"images": [f"{number}.png"]}
        good, bad = ([{"role": "assistant", "content": text}] for text in ("good", "bad"))
        answers = {"chosen": good, "rejected": bad} if preferences else {"completion": good}
        records.append({"prompt": question, **answers, **images})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    rows = {"pairs": 1} if preferences else {"batch_size": 1, "packing": False}
    config = TrainConfig(
        model=str(folder), data=(str(tmp_path / "data.jsonl"),), steps=11, sequence_length=160, validation_fraction=0.1,
        eval_every=11, output=str(tmp_path / "run"), no_export=True, **rows, **MIXED[case],
    )  # fmt: skip
    norms = [record["grad_norm"] for record in train(config).metrics if "grad_norm" in record]
    assert len(norms) == 11 and norms.count(0.0) in (8, 9)


@pytest.mark.parametrize("family", quick(["qwen2_vl", "gemma3", "mllama"], ["qwen2_vl"]))
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(family, tmp_path, monkeypatch):
    """Records of no, one, two and three images of unequal sizes, packed; more than an epoch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    records = []
    for number in range(8):
        names = [f"{number}-{index}.png" for index in range(number % 4)]
        for index, name in enumerate(names):
            (tmp_path / name).write_bytes(png(picture(8 + 4 * index, 8 + 2 * number, seed=10 * number + index)))
        parts = [*({"type": "image"} for _ in names), {"type": "text", "text": f"question {number}"}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": f"answer {number}"}]
        records.append({"messages": messages, "images": names})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    config = TrainConfig(
        model=str(save_image_model(tmp_path / "model", family)), data=(str(tmp_path / "data.jsonl"),), steps=6,
        batch_size=1, sequence_length=160, checkpoint_every=4, keep_checkpoints=2, no_export=True, learning_rate=1e-3,
        output=str(tmp_path / "whole"),
    )  # fmt: skip
    whole = train(config)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed/checkpoints/step-000006")
    resumed = train(config_of_run(tmp_path / "killed"))
    losses = [[record["loss"] for record in run.metrics if "loss" in record] for run in (whole, resumed)]
    assert losses[0] == losses[1] and len(set(losses[0])) == 6
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.usefixtures("few_data")
def test_a_plan_counts_patches_and_limits_images():
    """Pictures of 56 pixels are 2 x 2 features of 2 x 2 patches; one feature each with --image-tokens 1."""
    made = plan(TrainConfig(model="qwen2_vl", **QUICK))
    assert any(line.startswith("--image-tokens 4:1024") for line in made.chosen)
    model = ligermodels.create("qwen2_vl", size="tiny", device="meta")
    assert made.data.images.tokens == 4 * 24 and made.data.images.most_patches in (16, 32)
    tokens = made.data.rows * 128
    patches = flops_per_patch(model, [Grid(1, 4, 4)]) * 16 * 24 / tokens
    assert made.flops == pytest.approx(flops_per_token(model, 128) + patches, rel=1e-6)
    text = training_memory(model, 2, 128, torch.float32).activations
    assert made.memory.activations > text
    assert "images" in dict(made.table())

    limited = plan(TrainConfig(model="qwen2_vl", **QUICK, image_tokens="1"))
    assert limited.data.images.tokens == 24 and limited.data.images.most_patches < made.data.images.most_patches
    frozen = plan(TrainConfig(model="qwen2_vl", **QUICK, train_parts=("projector", "text")))
    assert frozen.trained == sum(p.numel() for name in ("projector", "text") for p in model.parts()[name])
    assert frozen.flops < made.flops and frozen.memory.activations < made.memory.activations


@pytest.mark.usefixtures("few_data")
def test_a_plan_counts_the_tiles_of_an_image():
    """Pictures of 56 pixels become 2 x 2 tiles and the whole, each 2 x 2 features of 2 x 2 patches."""
    made = plan(TrainConfig(model="smolvlm", **QUICK))
    model = ligermodels.create("smolvlm", size="tiny", device="meta")
    assert made.data.images.tokens == 5 * 4 * 24 and made.data.images.most_patches in (5 * 16, 2 * 5 * 16)
    patches = flops_per_patch(model, [Grid(1, 4, 4)]) * 5 * 16 * 24 / (made.data.rows * 128)
    assert made.flops == pytest.approx(flops_per_token(model, 128) + patches, rel=1e-6)


REFUSED = {
    "parts of a text model": ({"model": "llama", "train_parts": ("text",)}, "--train-parts: llama is a model of text"),
    "a rate of a text model": ({"model": "llama", "vision_learning_rate": 1e-5}, "--vision-learning-rate: llama is a"),
    "a rate of a frozen part": (
        {"train_parts": ("text",), "vision_learning_rate": 1e-5}, "--vision-learning-rate: the vision is not trained",
    ),
    "parts beside LoRA": ({"train_parts": ("text",), "lora_rank": 4}, "--train-parts is for training without LoRA"),
    "limits without images": ({"data": ("stories",), "image_tokens": "64"}, "--image-tokens 64: the data have no"),
    "limits of a text model": (
        {"model": "llama", "data": ("stories",), "image_tokens": "64"}, "--image-tokens 64: the data have no images",
    ),
    "limits of pictures": ({"model": "gemma3", "image_tokens": "64"}, "--image-tokens 64: the images of this model"),
    "more than any": ({"image_tokens": "1:65537"}, "--image-tokens 1:65537: an image has at most 65,536 tokens; lower"),
    "a part of images without images": (
        {"data": ("stories",), "train_parts": ("projector",)}, "--data: has no images, which alone reach what is",
    ),
    "LoRA on the tower without images": (
        {"data": ("stories",), "lora_rank": 4, "lora_targets": ("vision",)}, "--data: has no images, which alone",
    ),
    "a rate of a part without images": (
        {"data": ("stories",), "vision_learning_rate": 1e-5},
        "--vision-learning-rate: the data have no images, which alone train the vision; leave it out",
    ),
    "no limits": ({"image_tokens": "9:4"}, "image_tokens is '9:4'; must be the most tokens of an image, or few"),
}  # fmt: skip


@pytest.mark.usefixtures("few_data")
@pytest.mark.parametrize("fault", REFUSED)
def test_settings_of_images_that_do_not_fit_are_refused(fault):
    settings, message = REFUSED[fault]
    with pytest.raises(InputError, match=re.escape(message)):
        plan(TrainConfig(**{"model": "qwen2_vl"} | QUICK | settings))
