"""The embedded shapes: pictures that anybody can see, and one answer to each question about them."""

import io

import numpy as np
import pytest
from PIL import Image

from ligermodels.errors import InputError
from ligermodels.images.inputs import Processor
from ligermodels.training.data import embedded
from ligermodels.training.data.embedded import (
    SHAPE_COLOURS,
    SIDE,
    draw,
    embedded_dataset,
    png,
    shape_conversations,
    shape_question,
)
from ligermodels.training.data.run_tokenizer import NewImages, save_tokenizer, train_image_tokenizer
from tests.suites import slow

SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


def decoded(picture):
    return np.asarray(Image.open(io.BytesIO(picture))).astype(int)


def test_png_files_are_read_back():
    pixels = np.random.default_rng(0).integers(0, 256, (9, 13, 3), dtype=np.uint8)
    assert np.array_equal(decoded(png(pixels)), pixels)


def test_pictures_have_the_colour_and_the_shape_that_the_answers_say():
    """Areas tell the shapes apart: of their bounding box a square fills all, a cross the least."""
    filled = {"circle": [], "square": [], "triangle": [], "cross": []}
    for picture, messages in shape_conversations(3, 60):
        answers = {message["content"].split()[-1].rstrip(".") for message in messages if message["role"] == "assistant"}
        [colour], [kind] = answers & SHAPE_COLOURS.keys(), answers & filled.keys()
        pixels = decoded(picture)
        ground = np.median(pixels[[0, 0, -1, -1], [0, -1, 0, -1]], axis=0)
        shape = np.abs(pixels - ground).max(-1) > 0
        distances = {name: np.abs(pixels[shape].mean(0) - value).max() for name, value in SHAPE_COLOURS.items()}
        assert min(distances, key=distances.__getitem__) == colour
        rows, columns = np.flatnonzero(shape.any(1)), np.flatnonzero(shape.any(0))
        filled[kind].append(shape.sum() / ((np.ptp(rows) + 1) * (np.ptp(columns) + 1)))
    means = {kind: np.mean(values) for kind, values in filled.items()}
    assert means["square"] == 1 and 0.68 < means["circle"] < 0.8
    assert means["cross"] < means["triangle"] < 0.6 and all(len(values) > 5 for values in filled.values())


def test_shapes_are_the_same_on_any_machine_and_unseen_ones_are_others():
    first, again, unseen = (list(shape_conversations(seed, 200)) for seed in (0, 0, 1))
    assert first == again
    assert not {picture for picture, _ in first} & {picture for picture, _ in unseen}


def test_a_shape_is_wholly_within_its_picture():
    random = np.random.default_rng(0)
    for _ in range(100):
        pixels = decoded(draw("square", (255, 255, 255), random))
        assert pixels.shape == (SIDE, SIDE, 3) and (pixels[[0, -1]].std() == 0) and pixels[:, [0, -1]].std() == 0


def test_a_new_tokenizer_has_the_tokens_of_images(tmp_path):
    texts = [message["content"] for _, messages in shape_conversations(0, 20) for message in messages[1::2]]
    with pytest.raises(
        InputError, match=r"config: image_token_id is 5, but <.image_pad.> of the new tokenizer has the id"
    ):
        train_image_tokenizer(texts, 290, NewImages(5, SETTINGS))
    tokenizer = train_image_tokenizer(texts, 290, NewImages(288, SETTINGS))
    save_tokenizer(tokenizer, tmp_path)
    NewImages(288, SETTINGS).write(tmp_path)
    processor = Processor.from_folder(tmp_path)
    assert processor.feature_id == 288 and processor.tokenizer.vocab_size == 290
    prompt, answer = shape_question(*next(shape_conversations(1, 1)))
    inputs = processor.apply_chat_template(prompt, add_generation_prompt=True)
    text = processor.tokenizer.decode(inputs["input_ids"][0].tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>What ")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n") and answer.startswith("It is ")
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 4]]


def test_a_new_tokenizer_of_little_text_has_the_tokens_of_images_at_their_ids():
    tokenizer = train_image_tokenizer(["red", "blue"], 1000, NewImages(998, SETTINGS))
    assert tokenizer.tokenizer.token_to_id("<|image_pad|>") == 998 and tokenizer.vocab_size == 1000
    ids = tokenizer.encode("red <|image_pad|>")
    assert ids[-1] == 998 and tokenizer.tokenizer.id_to_token(995) == "<|unused_731|>"


@slow
def test_questions_are_about_unseen_pictures():
    dataset = embedded_dataset("shapes")
    pictures = {part["image"] for prompt, _ in dataset.questions for part in prompt[0]["content"] if "image" in part}
    seen = {picture for picture, _ in embedded.shape_conversations(dataset.training.seed, dataset.training.size)}
    assert len(pictures) == len(dataset.questions) == 120 and not pictures & seen
