"""Texts and messages with images become the inputs of the processors of transformers: ids, masks, pixels."""

import base64
import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast
from transformers.models.smolvlm import processing_smolvlm

import ligermodels
from ligermodels.errors import CheckpointError, InputError
from ligermodels.images import inputs as module
from ligermodels.images.inputs import IMAGE_FAMILIES
from ligermodels.images.processors import ImagePlan
from ligermodels.images.resizing import Size
from ligermodels.images.settings import ImageSettings
from tests.images.folders import QWEN_TEMPLATE, byte_tokenizer, picture, png, write_folder
from tests.images.reference import SMALL, their_processor, with_torchvision

__all__ = ["with_torchvision"]
HUB_FILES = Path(__file__).parents[1] / "data" / "image_processors"
IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "x"}
GEMMA3_NAMES = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
PARTS_ONLY_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part is mapping %}"
    "{{ '<|image_pad|>' if part.type == 'image' else part.text }}{% endif %}{% endfor %};{% endfor %}"
)


def qwen_processor(folder, template=QWEN_TEMPLATE):
    return ligermodels.load_processor(write_folder(folder, *SMALL["qwen2"], template))


# case, the placeholder that users write
TEXTS = {
    "gemma3": "<start_of_image>", "gemma3 with crops": "<start_of_image>", "mllama": "<|image|>", "llava": "<image>",
    "idefics3": "<image>",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_inputs_are_those_of_transformers(name, with_torchvision, tmp_path):
    kind, image, text = SMALL[name]
    processor = ligermodels.load_processor(write_folder(tmp_path, kind, image, text))
    names = GEMMA3_NAMES if kind == "Gemma3" else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(kind), bos_token="<bos>", pad_token="<pad>", extra_special_tokens=names
    )
    reference = getattr(transformers, f"{kind}Processor")(their_processor(kind, image), tokenizer, **text)
    mark = TEXTS[name]
    texts = [f"<bos>One\n\n{mark}\n\nhere", f"<bos>{mark}{mark} and two ä{mark}."]
    rows = [[picture(90, 61)], [picture(50, 200, 1), picture(33, 34, 2), picture(120, 100, 3)]]
    crops = {field: value for field, value in image.items() if "pan_and_scan" in field}  # its files do not count
    expected = reference(text=texts, images=rows, return_tensors="pt", padding=True, **crops)
    inputs = processor(texts, rows)
    assert inputs.keys() == expected.keys() - {"token_type_ids", "mm_token_type_ids"}
    for key, value in inputs.items():
        assert torch.equal(value, torch.as_tensor(expected[key])), key


def paligemma_processors(folder):
    """Ours and that of transformers, with a tokenizer of bytes."""
    kind, image, text = SMALL["paligemma"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(kind), bos_token="<bos>", pad_token="<pad>", eos_token="<pad>"
    )
    ours = ligermodels.load_processor(write_folder(folder, kind, image, text))
    return ours, transformers.PaliGemmaProcessor(their_processor(kind, image), tokenizer)


IMAGE_ROWS = [[picture(90, 61)], [picture(50, 200, 1), picture(33, 34, 2)]]
PREFIXES = {
    "images in front": ["<image>caption ä\n", "<image><image> what?"],
    "an image within the text": ["a<image>b", "<image>\n<image>"],
    "no mark for the images": ["caption", ""],
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("suffix", [None, ["a cat", "\n\n2 dogs"]])
@pytest.mark.parametrize("texts", PREFIXES)
def test_prefixes_and_their_completions_are_those_of_transformers(texts, suffix, side, with_torchvision, tmp_path):
    processor, reference = paligemma_processors(tmp_path)
    reference.tokenizer.padding_side = side
    given = {"text": PREFIXES[texts], "images": IMAGE_ROWS, "suffix": suffix}
    expected = reference(**given, return_tensors="pt", padding=True)
    inputs = processor(**given, padding_side=side)
    assert inputs.keys() == expected.keys() - (set() if suffix else {"labels"})
    for key, value in inputs.items():
        assert torch.equal(value, torch.as_tensor(expected[key])), key


def test_a_question_with_an_image_is_a_prefix(tmp_path):
    processor, _ = paligemma_processors(tmp_path)
    image, question = picture(60, 61), {"role": "user", "content": [IMAGE, TEXT]}
    for answer, options in ((None, {"add_generation_prompt": True}), ("y", {})):
        messages = [question] if answer is None else [question, {"role": "assistant", "content": answer}]
        expected = processor("x", [image], suffix=answer)
        inputs = processor.apply_chat_template(messages, [image], **options)
        assert inputs.keys() == expected.keys()
        assert all(torch.equal(inputs[name], expected[name]) for name in inputs)
    rows = processor(["x", "y"], [[image], []], suffix=["a", "bc"])  # a text alone is no prefix
    assert rows["token_type_ids"].sum(1).tolist() == [2, rows["attention_mask"][1].sum()]
    assert (rows["labels"] >= 0).sum(1).tolist() == [2, 3]


BAD_PREFIXES = {
    "two turns": (["user", "assistant", "user"], {}, "messages: have the roles user, assistant, user; .* one message"),
    "a system message": (["system", "user"], {}, "have the roles system, user"),
    "an answer to continue": (["user", "assistant"], {"add_generation_prompt": True}, "messages: end with an answer"),
    "tools": (["user"], {"tools": [{}]}, "tools: belong to a chat template"),
}


@pytest.mark.parametrize("fault", BAD_PREFIXES)
def test_conversations_that_are_no_prefix_are_refused(fault, tmp_path):
    processor, _ = paligemma_processors(tmp_path)
    roles, options, message = BAD_PREFIXES[fault]
    messages = [{"role": role, "content": [IMAGE, TEXT] if role == "user" else "y"} for role in roles]
    images = [picture(60, 61)] * roles.count("user")
    with pytest.raises(InputError, match=message):
        processor.apply_chat_template(messages, images, **options)


def test_completions_that_do_not_fit_are_refused(tmp_path):
    processor, _ = paligemma_processors(tmp_path)
    with pytest.raises(InputError, match="suffix: has 2 completions for 1 texts"):
        processor("x", [picture(60, 61)], suffix=["a", "b"])
    with pytest.raises(InputError, match="completion: has <image> in its text"):
        processor("x", [picture(60, 61)], suffix="<image>")
    (tmp_path / "qwen").mkdir()
    with pytest.raises(InputError, match="suffix: the prompts of this model are no prefixes"):
        qwen_processor(tmp_path / "qwen")("x", suffix="y")


@pytest.mark.parametrize("grid", [(0, 0), (1, 2), (4, 3)])
def test_the_text_of_tiles_is_that_of_transformers(grid):
    """Of SmolVLM, whose processor there wants packages for videos."""
    expected = processing_smolvlm.get_image_prompt_string(
        *grid, 5, "<fake_token_around_image>", "<image>", "<global-img>"
    )
    assert module.smolvlm(5).text(ImagePlan(Size(9, 9), grid, 5)) == expected


def test_qwen_has_a_token_for_each_merged_patch(tmp_path):
    processor = qwen_processor(tmp_path)
    image = picture(90, 61)
    inputs = processor("a<|vision_start|><|image_pad|><|vision_end|>b", [image])
    grid = inputs["image_grid_thw"].tolist()
    assert grid == [[1, 6, 4]] and inputs["pixel_values"].shape == (24, 3 * 2 * 14 * 14)
    assert processor.tokenizer.decode(inputs["input_ids"][0].tolist(), skip_special_tokens=False) == (
        "a<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>b"
    )
    assert processor.plan(png(image)).features == 6


def test_pixtral_has_rows_that_end_with_a_break(tmp_path):
    processor = ligermodels.load_processor(write_folder(tmp_path, *SMALL["pixtral"]))
    ids = processor("[IMG]", [picture(60, 84)])["input_ids"][0].tolist()
    row = "[IMG]" * 3
    text = processor.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == f"{row}[IMG_BREAK]{row}[IMG_BREAK]{row}[IMG_END]"
    assert list(processor.image_tokens.values()) == ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]


def test_images_of_messages_in_all_their_forms(tmp_path):
    processor, image = qwen_processor(tmp_path), picture(60, 61)
    (tmp_path / "image.png").write_bytes(png(image))
    url = "data:image/png;base64," + base64.b64encode(png(image)).decode()
    path = str(tmp_path / "image.png")
    forms = [
        {"type": "image"}, {"type": "image", "image": image}, {"type": "image", "path": path, "url": None},
        {"type": "image", "bytes": png(image)}, {"type": "image_url", "image_url": {"url": url}},
        {"type": "image", "image": {"bytes": None, "path": path}}, {"type": "image", "image": {"bytes": png(image)}},
    ]  # fmt: skip
    expected = processor("<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>x<|im_end|>\n", [image])
    for form in forms:
        messages = [{"role": "user", "content": [form, {"type": "text", "text": "x", "image": None}]}]
        beside = [image] if len(form) == 1 else []
        inputs = processor.apply_chat_template(messages, beside)
        assert inputs.keys() == expected.keys()
        assert all(torch.equal(inputs[name], expected[name]) for name in inputs), form


def test_a_template_that_writes_only_parts_gets_parts(tmp_path):
    processor = qwen_processor(tmp_path, PARTS_ONLY_TEMPLATE)
    inputs = processor.apply_chat_template([{"role": "user", "content": "only text"}])
    assert inputs.keys() == {"input_ids", "attention_mask"}
    assert processor.tokenizer.decode(inputs["input_ids"][0].tolist()) == "only text;"


BAD_MESSAGES = {
    "too few images": ([IMAGE, IMAGE], 1, r"messages\[0\].content\[1\] is an image, but field images has only 1"),
    "too many images": ([IMAGE], 2, "field images has 2 images, 1 more than messages has image parts"),
    "an address": ([IMAGE | {"url": "https://a.b/c.png"}], 0, "is the address https://a.b/c.png; download the image"),
    "not base64": ([IMAGE | {"url": "data:image/png;base64,#"}], 0, "is a data URL that is not base64"),
    "base64 of other letters": ([IMAGE | {"url": "data:image/png;base64,é"}], 0, "is a data URL that is not base64"),
    "two sources": ([IMAGE | {"path": "a", "url": "b"}], 0, "more than one of image, path, url, bytes"),
    "a video": ([{"type": "video"}], 0, r"messages\[0\].content\[0\] is 'video'; must be"),
    "a number": ([IMAGE | {"image": 3}], 0, "is int; must be a path, a data URL, bytes, or a PIL image"),
    "a content that is a number": (5, 0, r"^field messages\[0\].content is int; must be a string or a list of parts$"),
    "a content that is a part": (IMAGE, 0, r"messages\[0\].content is dict; must be a string or a list of parts"),
    "a token": ([TEXT | {"text": "<|image_pad|>"}], 0, r"messages\[0\].content has <\|image_pad\|> in its text"),
    "a zero character": ([IMAGE | {"path": "a\0b"}], 0, r"'a\\x00b': has a zero character, which no path can have"),
    "no such file": ([IMAGE | {"path": "/nowhere.png"}], 0, r"images\[0\]\[0\]: /nowhere.png: cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD_MESSAGES)
def test_messages_with_bad_images_are_refused(fault, tmp_path):
    content, beside, message = BAD_MESSAGES[fault]
    with pytest.raises(InputError, match=message):
        qwen_processor(tmp_path).apply_chat_template([{"role": "user", "content": content}], [picture(60, 61)] * beside)


def test_one_text_takes_an_image_alone_and_a_flat_list(tmp_path):
    processor, mark, image = qwen_processor(tmp_path), "<|image_pad|>", picture(60, 61)
    (tmp_path / "image.png").write_bytes(png(image))
    path = tmp_path / "image.png"
    expected = processor([mark], [[image]])
    for alone in (image, path, str(path), png(image), {"bytes": png(image)}):
        for text in (mark, [mark]):
            for images in (alone, [alone], (alone,), [[alone]]):
                inputs = processor(text, images=images)
                assert all(torch.equal(inputs[name], expected[name]) for name in expected), images
        inputs = processor.apply_chat_template([{"role": "user", "content": [IMAGE]}], alone)
        assert torch.equal(inputs["pixel_values"], expected["pixel_values"])
    two = processor(mark * 2, [image, image])
    assert two["input_ids"].tolist() == [expected["input_ids"][0].tolist() * 2]
    assert torch.equal(processor([mark * 2], [image, path])["pixel_values"], two["pixel_values"])


BAD_IMAGES = {
    "one for two texts": ("a.png", 2, "images: is one image for 2 texts; give a list of images for each text"),
    "flat": (["a.png"] * 2, 2, "images: is a flat list for 2 texts; give a list of images for each text"),
    "flat and nested": (["a.png", ["b.png"]], 2, "images: has both images and lists of images; give a list of images"),
    "mixed for one": (["a.png", ["b.png"]], 1, "images: has both images and lists of images; give a list of images"),
    "two lists for one": ([["a.png"], ["b.png"]], 1, "images: has 2 lists for 1 texts; give one for each"),
    "a number": (5, 1, r"field images\[0\]\[0\] is int; must be a path, a data URL, bytes, or a PIL image"),
    "an array": (torch.zeros(3, 4, 4).numpy(), 1, r"field images\[0\]\[0\] is ndarray; must be a path"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD_IMAGES)
def test_images_of_an_ambiguous_form_are_refused(fault, tmp_path):
    images, count, message = BAD_IMAGES[fault]
    with pytest.raises(InputError, match=message):
        qwen_processor(tmp_path)(["<|image_pad|>"] * count, images)


def test_each_row_must_have_its_images(tmp_path):
    processor, mark = qwen_processor(tmp_path), "<|image_pad|>"
    with pytest.raises(InputError, match=r"texts\[0\]: .* 2 times, but there are 1 images"):
        processor([mark * 2, "none"], [[picture(60, 61)], [picture(60, 61)]])
    with pytest.raises(InputError, match="images: has 1 lists for 2 texts"):
        processor([mark, mark], [[picture(60, 61)]])


BAD_FILES = {
    "missing": ({"preprocessor_config.json": None}, "preprocessor_config.json: is missing"),
    "unknown type": ({"image_processor_type": "AriaImageProcessor"}, "'AriaImageProcessor'; is not supported"),
    "no type": ({"image_processor_type": None}, "field image_processor_type is missing"),
    "no resizing": ({"do_resize": False}, "field do_resize is False; must be true"),
    "resample": ({"resample": 0}, "field resample is 0; must be one of 1, 2, 3"),
    "mean": ({"image_mean": [0.5]}, r"field image_mean is \[0.5\]; must be three numbers from -255 to 255"),
    "std": ({"image_std": [0.5, 0, 1]}, "field image_std is .*; must be three numbers from 0.0001 to 255"),
    "size": ({"max_pixels": 0}, "field max_pixels is 0; must be an integer from 1 to 67,108,864"),
    "no size": ({"size": {"height": 1}}, "field min_pixels is None; must be an integer from 1 to 16,777,216"),
    "patch": ({"patch_size": -14}, "field patch_size is -14; must be an integer from 1 to 4,096"),
    "a switch for a number": ({"patch_size": True}, "field patch_size is True; must be an integer from 1"),
    "a switch for a filter": ({"resample": True}, "field resample is True; must be one of 1, 2, 3"),
    "factor": ({"rescale_factor": 1e-9}, "field rescale_factor is 1e-09; must be a number from 0.0001 to 1"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD_FILES)
def test_faults_of_files_are_named(fault, tmp_path):
    changes, message = BAD_FILES[fault]
    kind, image, text = SMALL["qwen2"]
    write_folder(tmp_path, kind, image, text)
    file = tmp_path / "preprocessor_config.json"
    if file.name in changes:
        file.unlink()
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        ligermodels.load_processor(tmp_path)


def test_the_images_of_a_text_are_refused_before_their_text_is_made(monkeypatch):
    placeholder = module.repeated("<|image_pad|>")
    monkeypatch.setattr(module, "MAX_FEATURES_OF_TEXT", 12)
    plans = [ImagePlan(Size(8, 8), (2, 2), 4)] * 3
    assert placeholder.expand("<|image_pad|>" * 3, plans) == "<|image_pad|>" * 12
    with pytest.raises(InputError, match="4 images take 16 image tokens, more than 12; use fewer or smaller images"):
        placeholder.expand("<|image_pad|>" * 4, [*plans, plans[0]])


def test_a_tokenizer_without_the_image_token_is_refused(tmp_path):
    write_folder(tmp_path, *SMALL["qwen2"])
    byte_tokenizer("Llava").save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"tokenizer.json: lacks the token <\|image_pad\|>"):
        ligermodels.load_processor(tmp_path)


def test_the_image_processor_of_version_5_files_counts(tmp_path):
    kind, image, text = SMALL["qwen2"]
    write_folder(tmp_path, kind, image, text)
    nested = image | {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 10}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": nested}))
    assert ligermodels.load_processor(tmp_path).images.patch_size == 10


# Features of an image of 1000 x 700 pixels, by the formulas of the processors of transformers 5.23.
HUB_FEATURES = {
    "Qwen2-VL-2B-Instruct": 900, "Qwen2.5-VL-3B-Instruct": 900, "Qwen3-VL-4B-Instruct": 682, "gemma-3-4b-it": 256,
    "Llama-3.2-11B-Vision-Instruct": 1, "SmolVLM2-500M-Video-Instruct": 13 * 64,
}  # fmt: skip


@pytest.mark.parametrize("name", HUB_FEATURES)
def test_real_files(name, tmp_path):
    [folder] = HUB_FILES.glob(f"*--{name}")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    family = IMAGE_FAMILIES[settings["image_processor_type"].removesuffix("Fast")]
    assert family.processor.from_settings(ImageSettings.read(folder)).plan(700, 1000).features == HUB_FEATURES[name]
