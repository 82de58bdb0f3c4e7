"""Groups with images: their tokens and borders, files of all kinds, lengths, and what is refused."""

import json

import datasets
import pytest

import ligermodels
from ligermodels.errors import InputError
from ligermodels.training import TrainConfig
from ligermodels.training.data.formats.records import BadLines, TeacherRecord, Text
from ligermodels.training.data.preferences import GroupOptions, open_preferences
from ligermodels.training.data.preferences.tokenization import GroupTokenizer
from tests.images.folders import QWEN_TEMPLATE, picture, png, write_folder
from tests.images.reference import SMALL
from tests.training.data.documents import CPU

VOCABULARY = 264
SIZES = [(60, 61), (90, 61), (56, 120)]  # 4, 6 and 8 tokens
IMAGE = {"type": "image"}
HELD_OUT = {"prompt": "held", "chosen": "a", "rejected": "b"}


def text(content):
    return {"type": "text", "text": content}


def asked(*content):
    return [{"role": "user", "content": list(content)}]


def said(content):
    return [{"role": "assistant", "content": content}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("model"), *SMALL["qwen2"], QWEN_TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": VOCABULARY - 1}))
    return folder


@pytest.fixture(autouse=True)
def pictures(tmp_path):
    for number, size in enumerate(SIZES):
        (tmp_path / f"{number}.png").write_bytes(png(picture(*size, seed=number)))


def opened(tmp_path, folder, *records, file=None, kind="pairs", config=None, **options):
    if file is None:
        file = tmp_path / "data.jsonl"
        file.write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "held_out.jsonl").write_text(json.dumps(HELD_OUT))
    config = {"data": (str(file),), "validation_data": (str(tmp_path / "held_out.jsonl"),)} | (config or {})
    given = GroupOptions(**{"kind": kind, "max_length": 200} | options)
    return open_preferences(TrainConfig(**config), given, folder, VOCABULARY)


def groups(data):
    return [data.training.groups.piece(number, 0).group for number in range(len(data.training))]


def sources(group):
    return [[image.store.images.source(image.number) for image in part] for part in group.images]


PAIR = {"prompt": asked(IMAGE, text("what?")), "chosen": said("a cat"), "rejected": said("a dog"), "images": ["0.png"]}


def test_a_model_whose_prompts_are_no_conversations_refuses_images(tmp_path):
    """PaliGemma."""
    folder = tmp_path / "paligemma"
    folder.mkdir()
    write_folder(folder, *SMALL["paligemma"], QWEN_TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": VOCABULARY - 1}))
    with pytest.raises(InputError, match=r"data.jsonl:1: has images, and this model trains on preferences about text"):
        opened(tmp_path, folder, PAIR)


def test_the_images_of_a_prompt_are_stored_once(folder, tmp_path):
    [group] = groups(opened(tmp_path, folder, PAIR))
    processor = ligermodels.load_processor(folder)
    start = "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>what?<|im_end|>\n"
    prompt = processor.tokenizer.encode(start + "<|im_start|>assistant\n", add_special_tokens=False)
    assert group.prompt.tolist() == prompt and sources(group) == [[str(tmp_path / "0.png")], [], []]
    [image] = group.images[0]
    assert set(group.prompt[image.start : image.stop].tolist()) == {processor.feature_id}
    assert [processor.tokenizer.decode(ids.tolist()) for ids in group.completions] == ["a cat\n", "a dog\n"]


def test_texts_have_the_models_own_tokens(folder, tmp_path):
    pair = {"prompt": "<|vision_start|><|image_pad|><|vision_end|> is", "chosen": " a cat", "rejected": " a dog"}
    [group] = groups(opened(tmp_path, folder, pair | {"images": ["1.png"]}))
    token = ligermodels.load_processor(folder).feature_id
    assert group.prompt.tolist().count(token) == 6 and [ids.tolist()[0] for ids in group.completions] == [220, 220]
    assert sources(group) == [[str(tmp_path / "1.png")], [], []]


def test_parquet_with_bytes_and_judged_completions(folder, tmp_path):
    contents = [(tmp_path / f"{number}.png").read_bytes() for number in range(3)]
    rows = [
        {"prompt": asked(IMAGE | {"text": None}, text(f"{n}?")), "completion": said("a"), "label": n > 0,
         "images": [{"bytes": content, "path": None}]}
        for n, content in enumerate(contents)
    ]  # fmt: skip
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "data.parquet")
    data = opened(tmp_path, folder, file=tmp_path / "data.parquet", kind="judged")
    assert [sources(group) for group in groups(data)] == [[[content], []] for content in contents]
    assert data.training.labels == (2, 1)


def test_a_batch_has_each_image_where_its_tokens_are(folder, tmp_path):
    """A shared prompt's once; that of a prompt that is not shared for each completion, decoded once."""
    other = PAIR | {"prompt": asked(text("no image")), "images": []}
    two = PAIR | {"prompt": asked(IMAGE, text("and"), IMAGE), "images": ["1.png", "2.png"]}
    decoded = []
    for share in (True, False):
        data = opened(tmp_path, folder, PAIR, other, two, share_prompts=share, row_length=600)
        decoder = data.training.groups.decoder
        prepare = decoder.prepare
        decoder.prepare = lambda store, number, prepare=prepare: decoded.append(number) or prepare(store, number)
        step = data.training.collated(0, 3, CPU)
        [batch] = step.batches
        tokens = (batch.input_ids == decoder.processor.feature_id).sum()
        assert batch.images["image_grid_thw"].prod(1).sum() == 4 * tokens == 4 * 18 * (1 if share else 2)
        assert (data.training.groups.laid_out.sum(1) == [step.tokens, int(tokens)]).all()
        assert sorted(decoded) == [0, 1, 2]
        decoded.clear()


def test_groups_with_images_are_dropped_where_text_would_be_cut(folder, tmp_path):
    long = PAIR | {"chosen": said("a" * 300)}
    shown = PAIR | {"chosen": said([text("a" * 180), IMAGE])} | {"images": ["0.png", "1.png"]}
    data = opened(tmp_path, folder, PAIR, long, shown, long | {"prompt": asked(text("x"))} | {"images": []},
        too_long="cut", max_prompt_length=60)  # fmt: skip
    assert len(data.training) == 2 and (data.lengths.dropped, data.lengths.cut_completions) == (2, 1)
    data = opened(tmp_path, folder, PAIR, too_long="cut", max_prompt_length=60, max_length=80, config={"seed": 1})
    assert len(data.training) == 1
    with pytest.raises(InputError, match=r"has no group .*1 group dropped as too long"):
        opened(tmp_path, folder, PAIR, too_long="cut", max_prompt_length=25)


BAD = {
    "no file": ({"images": ["gone.png"]}, r"data.jsonl:1: image 1: .*gone.png: cannot"),
    "outside": ({"images": ["../x.png"]}, r"data.jsonl:1: the image ../x.png is outside the folder"),
    "a text without the token": (
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        r"data.jsonl:1: the text has the image placeholder <\|image_pad\|> 0 times, but there are 1 images",
    ),
    "a token in an answer": (
        {"prompt": "<|image_pad|>", "chosen": "a<|image_pad|>", "rejected": "b"},
        r"data.jsonl:1: has <\|image_pad\|> in its text, which stands for an image",
    ),
    "a token without images": (
        {"prompt": "<|image_pad|>", "chosen": "a", "rejected": "b", "images": []},
        r"data.jsonl:1: has <\|image_pad\|> in its text, which stands for an image; remove it, or give its image",
    ),
    "a token in a chat without images": (
        {"prompt": asked(text("q")), "chosen": said("<|image_pad|>"), "images": []},
        r"data.jsonl:1: has <\|image_pad\|> in its text, which stands for an image; remove it, or give its image",
    ),
    "a token in a message": (
        {"chosen": said("a<|image_pad|>")}, r"data.jsonl:1: field messages\[1\].content has <\|image_pad\|> in its",
    ),
    "a truncated file": ({"images": ["half.png"]}, r"data.jsonl:1: image 1: cannot be decoded: Truncated"),
    "equal sides": ({"rejected": said("a cat")}, "fields chosen and rejected are equal"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_bad_records_are_refused_or_counted(fault, folder, tmp_path):
    (tmp_path / "half.png").write_bytes((tmp_path / "0.png").read_bytes()[:20])
    fields, message = BAD[fault]
    with pytest.raises(InputError, match=message):
        opened(tmp_path, folder, PAIR | fields)
    data = opened(tmp_path, folder, PAIR | fields, PAIR, config={"allow_bad_lines": 2})
    assert len(data.training) == 1 and "1 bad line" in data.description


def test_a_token_of_images_in_a_record_for_distillation_is_refused(folder):
    processor = ligermodels.load_processor(folder)
    options = GroupOptions(kind="distillation", max_length=200)
    images = (lambda: processor), processor.image_tokens
    grouping = GroupTokenizer(processor.tokenizer, VOCABULARY - 1, options, BadLines(0), *images)
    with pytest.raises(
        InputError, match=r"^d:1: has <\|image_pad\|> in its text, which stands for an image; remove it"
    ):
        list(grouping.groups([TeacherRecord(Text("a<|image_pad|>", "d:1"), None, None)]))


def test_a_record_whose_images_take_too_many_tokens_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("ligermodels.images.inputs.MAX_FEATURES_OF_TEXT", 3)
    with pytest.raises(InputError, match=r"data.jsonl:1: 1 images take \d+ image tokens, more than 3; use fewer"):
        opened(tmp_path, folder, PAIR)


def test_an_image_that_has_changed_is_named(folder, tmp_path):
    data = opened(tmp_path, folder, PAIR)
    (tmp_path / "0.png").write_bytes(png(picture(200, 300)))
    with pytest.raises(InputError, match=r"data.jsonl:1: image: has another size than when the data were tokenised"):
        data.training.collated(0, 1, CPU)


def test_a_model_without_an_image_processor_refuses_images(folder, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (plain / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(InputError, match=r"data.jsonl:1: has images, but the model has no image processor"):
        opened(tmp_path, plain, PAIR)


def test_a_model_that_sees_prompts_as_a_whole_refuses_images(tmp_path):
    (tmp_path / "model").mkdir()
    folder = write_folder(tmp_path / "model", *SMALL["paligemma"], QWEN_TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": VOCABULARY - 1}))
    with pytest.raises(
        InputError, match=r"data.jsonl:1: has images, and this model trains on preferences about text alone"
    ):
        opened(tmp_path, folder, PAIR)
