"""`ligermodels generate --image`: prompts and conversations with images, and what is refused."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import ligermodels
from ligermodels.cli import main
from tests.cases import CASES
from tests.images.folders import QWEN_TEMPLATE, byte_tokenizer, picture, png, write_folder
from tests.images.reference import SMALL

QUICK = ["--max-new-tokens", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen2-VL with a token for each byte."""
    folder = tmp_path_factory.mktemp("generate")
    tokens = byte_tokenizer("Qwen2VL")
    config = CASES["qwen2_vl"] | {
        "vocab_size": tokens.get_vocab_size(), "image_token_id": tokens.token_to_id("<|image_pad|>"),
        "video_token_id": tokens.token_to_id("<|video_pad|>"), "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    patch = {"patch_size": SMALL["qwen2"][1].get("patch_size", 14)}
    config["vision_config"] = config["vision_config"] | patch
    ligermodels.export(ligermodels.create(config), folder)
    return write_folder(folder, *SMALL["qwen2"], QWEN_TEMPLATE)


@pytest.fixture
def images(tmp_path):
    paths = [tmp_path / f"{number}.png" for number in range(2)]
    for number, path in enumerate(paths):
        path.write_bytes(png(picture(60 + 30 * number, 61, seed=number)))
    return [str(path) for path in paths]


def test_a_prompt_of_its_own_form_has_one_turn(images, tmp_path, capsys):
    """PaliGemma: --chat answers a question with an image; a second one, and a system message, are refused."""
    text = CASES["paligemma"]["text_config"] | {"vocab_size": byte_tokenizer("Siglip").get_vocab_size()}
    settings = {"size": {"height": 12, "width": 12}, "image_seq_length": 9}
    folder = tmp_path / "model"
    ligermodels.export(ligermodels.create(CASES["paligemma"] | {"text_config": text, "image_token_index": 256}), folder)
    processor = ligermodels.load_processor(write_folder(folder, "Siglip", settings, {}))
    flags = [str(folder), "--chat", "--image", images[0], *QUICK]
    assert main(["generate", *flags, "--prompt", "What?"]) == 0
    assert capsys.readouterr().out == f"{answered(folder, processor('What?', images[:1]))}\n"
    line = refused([*flags, "--prompt", "What?", "--system", "Short."], capsys)
    assert "messages: have the roles system, user; the model takes a question with images and its answer" in line


def answered(folder, inputs, count=4):
    """The text of the model's greedy continuation of a processor's inputs."""
    model, tokenizer = ligermodels.load(folder), ligermodels.load_tokenizer(folder)
    ids = inputs["input_ids"]
    new = model.generate(**inputs, max_new_tokens=count)[0, ids.shape[1] :].tolist()
    whole, before = tokenizer.decode(ids[0].tolist() + new), tokenizer.decode(ids[0].tolist())
    return whole.removeprefix(before)


def part(path):
    return {"type": "image", "path": path}


def said(text):
    return {"type": "text", "text": text}


def test_images_without_placeholders_come_before_the_prompt(folder, images, capsys):
    processor = ligermodels.load_processor(folder)
    assert main(["generate", str(folder), "--prompt", "What?", "--image", images[0], "--image", images[1], *QUICK]) == 0
    inputs = processor("<|vision_start|><|image_pad|><|vision_end|>" * 2 + "What?", images)
    assert capsys.readouterr().out == f"What?{answered(folder, inputs)}\n"
    prompt = "One<|image_pad|>two<|image_pad|>?"
    assert main(["generate", str(folder), "--prompt", prompt, "--image", images[1], "--image", images[0], *QUICK]) == 0
    assert capsys.readouterr().out == f"{prompt}{answered(folder, processor(prompt, images[::-1]))}\n"


def test_images_of_any_size_stand_for_rows_of_tokens(images, tmp_path, capsys):
    """Mistral 3: the ends of rows are tokens too."""
    tokens = byte_tokenizer("Pixtral")
    config = CASES["mistral3"] | {"image_token_index": tokens.token_to_id("[IMG]")}
    config["text_config"] = config["text_config"] | {"vocab_size": tokens.get_vocab_size(), "eos_token_id": None}
    config["vision_config"] = config["vision_config"] | {"patch_size": 14}
    folder = tmp_path / "model"
    ligermodels.export(ligermodels.create(config), folder)
    processor = ligermodels.load_processor(write_folder(folder, *SMALL["pixtral"]))
    assert main(["generate", str(folder), "--prompt", "What?", "--image", images[0], "--image", images[1], *QUICK]) == 0
    inputs = processor("[IMG][IMG]What?", images)
    assert inputs["image_sizes"].tolist() == [[84, 84], [112, 84]] and inputs["pixel_values"].shape[2:] == (112, 84)
    assert capsys.readouterr().out == f"What?{answered(folder, inputs)}\n"


# The processor's files, the image token, and a prompt with a placeholder.
PICTURES = {
    "llava": ("Llava", {"size": {"shortest_edge": 6}, "crop_size": {"height": 6, "width": 6}}, "<image>"),
    "mllama": ("Mllama", {"size": {"height": 6, "width": 6}}, "<|image|>"),
    "paligemma-untied": ("Siglip", {"size": {"height": 12, "width": 12}, "image_seq_length": 9}, "<image>"),
}
PATCHED = {"llava": {"patch_size": 2, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}}


@pytest.mark.parametrize("family", PICTURES)
def test_other_families_read_images(family, images, tmp_path, capsys):
    """Two images before a prompt, and between its texts; the other image gives another answer."""
    kind, settings, token = PICTURES[family]
    tokens = byte_tokenizer(kind)
    text = CASES[family]["text_config"] | {"vocab_size": tokens.get_vocab_size(), "max_position_embeddings": 256}
    model = ligermodels.create(CASES[family] | {"text_config": text, "image_token_index": tokens.token_to_id(token)})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(0.7) if "gate" in name and parameter.ndim == 1 else parameter.mul_(5)
    ligermodels.export(model, tmp_path / "model")
    folder = write_folder(tmp_path / "model", kind, settings, PATCHED.get(family, {}))
    processor, outputs = ligermodels.load_processor(folder), []
    for prompt, given in ((token * 2 + "What?", images), (f"One{token}two{token}?", images), (f"{token}?", images[:1])):
        shown = prompt.removeprefix(token * 2)
        flags = [flag for image in given for flag in ("--image", image)]
        assert main(["generate", str(folder), "--prompt", shown, *flags, *QUICK]) == 0
        outputs.append(capsys.readouterr().out)
        end = "\n" if kind == "Siglip" else ""
        assert outputs[-1] == f"{shown}{end}{answered(folder, processor(prompt, given))}\n"
    assert main(["generate", str(folder), "--prompt", f"{token}?", "--image", images[1], *QUICK]) == 0
    assert capsys.readouterr().out != outputs[-1]


def test_a_conversation_has_images_in_its_first_message_and_in_later_ones(folder, images, capsys, monkeypatch):
    processor = ligermodels.load_processor(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"What?\n/image {images[1]}\nAnd this?\n"))
    assert main(["generate", str(folder), "--chat", "--image", images[0], *QUICK]) == 0
    messages = [{"role": "user", "content": [part(images[0]), said("What?")]}]
    first = answered(folder, processor.apply_chat_template(messages, add_generation_prompt=True))
    messages += [
        {"role": "assistant", "content": first}, {"role": "user", "content": [part(images[1]), said("And this?")]},
    ]  # fmt: skip
    second = answered(folder, processor.apply_chat_template(messages, add_generation_prompt=True))
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_lines_of_a_file_have_their_images_in_a_field(folder, images, tmp_path, capsys):
    """In parts, at a mark, or before the first text of the user; a path is relative to the file."""
    processor, name = ligermodels.load_processor(folder), Path(images[0]).name
    asked = [{"role": "user", "content": [part(images[0]), said("What?")]}]
    lines = [
        {"prompt": [{"role": "user", "content": [{"type": "image"}, said("What?")]}], "images": [name]},
        {"prompt": [{"role": "user", "content": "What?"}], "images": [name]},
        {"prompt": "What?", "image": name},
        {"prompt": "<image>\nWhat?", "image": name},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main(["generate", str(folder), "--file", str(tmp_path / "prompts.jsonl"), "--chat", *QUICK]) == 0
    written = [json.loads(line)["completion"] for line in capsys.readouterr().out.splitlines()]
    expected = answered(folder, processor.apply_chat_template(asked, add_generation_prompt=True))
    assert expected and written == [expected] * 4


def test_files_bytes_and_pil_images_give_the_same_answer(folder, images):
    processor = ligermodels.load_processor(folder)
    sources = [images[0], Path(images[0]).read_bytes(), Image.open(images[0])]
    asked = [[{"role": "user", "content": [{"type": "image", "image": image}, said("What?")]}] for image in sources]
    answers = {answered(folder, processor.apply_chat_template(messages)) for messages in asked}
    assert len(answers) == 1
    other = [{"role": "user", "content": [part(images[1]), said("What?")]}]
    assert answered(folder, processor.apply_chat_template(other)) not in answers


def refused(arguments, capsys):
    assert main(["generate", *arguments]) == 2
    output = capsys.readouterr()
    [line] = output.err.splitlines()
    assert not output.out
    return line


def test_bad_images_are_refused_before_the_weights_are_loaded(folder, images, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ligermodels.cli.generate_text.load_with_adapter", None)  # would fail
    cut, text, missing = tmp_path / "cut.png", tmp_path / "text.png", tmp_path / "missing.png"
    cut.write_bytes(Path(images[0]).read_bytes()[:-200])
    text.write_text("not an image")
    for image in (cut, text, missing):
        for flags in (["--prompt", "What?"], ["--chat"]):
            line = refused([str(folder), *flags, "--image", str(image), *QUICK], capsys)
            assert line.startswith(f"ligermodels: {image}: ") and line.count(str(image)) == 1
    line = refused([str(folder), "--prompt", "<|image_pad|>", "--image", images[0], "--image", images[1]], capsys)
    assert "the text has the image placeholder <|image_pad|> 1 times, but there are 2 images" in line
    line = refused([str(folder), "--file", "prompts.jsonl", "--image", images[0]], capsys)
    assert "--image belongs to --prompt or --chat" in line


@pytest.mark.parametrize("flags", [["--prompt", "<|image_pad|>hi"], ["--chat", "--prompt", "<|image_pad|>hi"]])
def test_a_token_of_images_in_a_prompt_without_images_is_refused(flags, folder, tmp_path, capsys, monkeypatch):
    said = "the prompt has <|image_pad|> in its text, which stands for an image; remove it, or give its image"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "<|image_pad|>hi"}\n{"prompt": "hi"}\n')
    of_file = ["--file", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert main(["generate", str(folder), *of_file, *flags[:-2], *QUICK]) == 2
    assert capsys.readouterr().err.splitlines()[0] == f"ligermodels: {tmp_path}/prompts.jsonl:1: {said}"
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1
    monkeypatch.setattr("ligermodels.cli.generate_text.load_with_adapter", None)  # would fail
    assert refused([str(folder), *flags, *QUICK], capsys) == f"ligermodels: generate: {said}"


def test_a_bad_image_of_a_later_turn_ends_a_script_and_not_a_terminal(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("/image missing.png\nWhat?\n"))
    assert "missing.png" in refused([str(folder), "--chat", *QUICK], capsys)
    monkeypatch.setattr("ligermodels.cli.generate_text.typed_lines", lambda: iter(["/image missing.png", "What?"]))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["generate", str(folder), "--chat", *QUICK]) == 0
    assert "missing.png" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("What?\n/image {}\n", "generate: the image {} has no message behind it; give one, or leave the image out"),
        ("/image \nWhat?\n", "generate: /image has no path; write /image PATH"),
    ],
)
def test_an_image_line_without_a_message_or_a_path_is_refused(lines, message, folder, images, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines.format(images[0])))
    assert main(["generate", str(folder), "--chat", *QUICK]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"ligermodels: {message.format(images[0])}"


def test_models_of_text_refuse_images(images, tmp_path, capsys):
    folder = tmp_path / "llama"
    ligermodels.export(ligermodels.create(CASES["llama"] | {"vocab_size": 300}), folder)
    write_folder(folder, *SMALL["qwen2"], QWEN_TEMPLATE)
    line = refused([str(folder), "--prompt", "What?", "--image", images[0], *QUICK], capsys)
    assert line.endswith("is a llama model, which reads no images; give none")
