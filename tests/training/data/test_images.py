"""Records with images: their forms, their tokens, what is supervised, their batches, and what is refused."""

import base64
import dataclasses
import json
import shutil

import datasets
import numpy as np
import pytest
import torch

import ligermodels
from ligermodels.architectures import ARCHITECTURES
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.training import TrainConfig
from ligermodels.training.data import open_data
from ligermodels.training.data.rows.store import cache_folder
from tests.images.folders import QWEN_TEMPLATE, picture, png, write_folder
from tests.images.reference import SMALL
from tests.training.data.documents import CPU

VOCABULARY = 264
ROW = 96
SIZES = [(60, 61), (90, 61), (56, 120)]  # 4, 6 and 8 tokens
IMAGE = {"type": "image"}
DEFAULTS = TrainConfig(batch_size=1, sequence_length=ROW, packing=False)


def text(content):
    return {"type": "text", "text": content}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("model"), *SMALL["qwen2"], QWEN_TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": VOCABULARY - 1}))
    return folder


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def pictures(tmp_path):
    """The names of three files in the folder of the data."""
    (tmp_path / "pictures").mkdir()
    for number, size in enumerate(SIZES):
        (tmp_path / f"pictures/{number}.png").write_bytes(png(picture(*size, seed=number)))
    return [f"pictures/{number}.png" for number in range(len(SIZES))]


def opened(file, folder, prepare_inputs=None, **settings):
    held_out = file.with_name("held_out.jsonl")
    held_out.write_text(json.dumps({"messages": asked("held", "out")}))
    config = dataclasses.replace(DEFAULTS, data=(str(file),), validation_data=(str(held_out),), **settings)
    return open_data(config, folder, VOCABULARY, positions=512, prepare_inputs=prepare_inputs)


def written(tmp_path, *records):
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    return file


def asked(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def documents(data):
    """(ids, supervised, images) of each training document: as text, a list, and (start, stop, source)."""
    store = data.training.sources[0].parts[0].store
    for begin, end in zip(store.offsets[:-1].tolist(), store.offsets[1:].tolist(), strict=True):
        numbers = store.images.between(begin, end) if store.images else ()
        images = [
            (int(store.images.starts[n]) - begin, int(store.images.stops[n]) - begin, store.images.source(n))
            for n in numbers
        ]
        yield store.tokens[begin:end].tolist(), store.supervised[begin:end].tolist(), images


def without_processor(folder, target):
    """A copy of the folder without the files of an image processor."""
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(folder / name, target)
    return target


FORMS = {
    "parts with paths": lambda names, data: {"messages": asked([IMAGE | {"path": names[0]}, text("what?")], "a")},
    "parts and a column": lambda names, data: {
        "messages": asked([IMAGE, text("what?")], [text("a")]), "images": [names[0]],
    },
    "columns of data sets": lambda names, data: {
        "messages": asked([IMAGE, text("what?")], "a"), "images": [{"bytes": None, "path": names[0]}],
    },
    "OpenAI": lambda names, data: {
        "messages": asked([{"type": "image_url", "image_url": {"url": data}}, text("what?")], "a")
    },
    "TRL": lambda names, data: {
        "prompt": [{"role": "user", "content": [IMAGE, text("what?")]}],
        "completion": [{"role": "assistant", "content": [text("a")]}], "images": [names[0]],
    },
    "TRL, texts": lambda names, data: {
        "prompt": [{"role": "user", "content": "what?"}],
        "completion": [{"role": "assistant", "content": "a"}], "images": [names[0]],
    },
    "texts beside images": lambda names, data: {"messages": asked("what?", "a"), "images": [names[0]]},
    "LLaVA without a mark": lambda names, data: {
        "image": names[0], "conversations": [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "a"}],
    },
    "LLaVA": lambda names, data: {
        "image": names[0],
        "conversations": [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a"}],
    },
    "a question": lambda names, data: {"image": names[0], "question": "what?", "answer": "a"},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_records(form, folder, tmp_path, pictures):
    url = "data:image/png;base64," + base64.b64encode((tmp_path / pictures[0]).read_bytes()).decode()
    data = opened(written(tmp_path, FORMS[form](pictures, url)), folder)
    [(ids, supervised, images)] = documents(data)
    processor = ligermodels.load_processor(folder)
    expected = "<|im_start|>user\n<|vision_start|>{}<|vision_end|>what?<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    tokens = processor.tokenizer.encode(expected.format("<|image_pad|>" * 4), add_special_tokens=False)
    answer = processor.tokenizer.encode("a<|im_end|>", add_special_tokens=False)
    assert ids[: len(tokens)] == tokens
    assert [token for token, kept in zip(ids, supervised, strict=True) if kept][: len(answer)] == answer
    [(start, stop, source)] = images
    assert set(ids[start:stop]) == {processor.feature_id} and stop - start == 4
    assert source == ((tmp_path / pictures[0]).read_bytes() if form == "OpenAI" else str(tmp_path / pictures[0]))


@pytest.mark.parametrize("name", ["data.parquet", "saved"])
def test_tables_with_bytes(name, folder, tmp_path, pictures):
    """Of a folder of save_to_disk with a column of the type Image too."""
    contents = [(tmp_path / name).read_bytes() for name in pictures]
    rows = [
        {"messages": asked([IMAGE, text(f"{number}?")], [text("a")]), "images": [{"bytes": content, "path": None}]}
        for number, content in enumerate(contents)
    ]
    table = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    (table.save_to_disk if name == "saved" else table.to_parquet)(tmp_path / name)
    data = opened(tmp_path / name, folder)
    assert [images[0][2] for _, _, images in documents(data)] == contents


def conversations(pictures):
    """With an image in an answer, none, and two in one message."""
    return [
        {"messages": asked([IMAGE, text("0")], [text("a"), IMAGE]), "images": pictures[:2]},
        {"messages": asked("1", "b")},
        {"messages": asked([IMAGE, text("2"), IMAGE], "c"), "images": pictures[1:]},
    ]


def test_no_token_of_images_is_supervised(folder, tmp_path, pictures):
    data, processor = opened(written(tmp_path, *conversations(pictures)), folder), ligermodels.load_processor(folder)
    [first, _, third] = documents(data)
    assert [stop - start for start, stop, _ in first[2]] == [4, 6] and len(third[2]) == 2
    kept = [token for token, kept in zip(*first[:2], strict=True) if kept]
    assert processor.feature_id not in kept
    assert processor.tokenizer.decode(kept[:4], skip_special_tokens=False).startswith("a<|vision_start|><|vision_end|>")


@pytest.mark.parametrize("packing", [True, False])
def test_a_batch_has_the_inputs_of_its_rows(packing, folder, tmp_path, pictures):
    """The pixels of a batch are in the order of its image tokens, and those that the processor makes of the texts."""
    processor = ligermodels.load_processor(folder)
    data = opened(written(tmp_path, *conversations(pictures)), folder, packing=packing)
    [batch] = data.training.micro_batches(0, len(data.training), len(data.training), CPU)
    arguments = batch.arguments()
    ids, grid = arguments["input_ids"].flatten(), arguments["image_grid_thw"]
    runs = torch.unique_consecutive(ids == processor.feature_id, return_counts=True)
    tokens = [count for is_image, count in zip(*map(torch.Tensor.tolist, runs), strict=True) if is_image]
    assert tokens == (grid.prod(1) // 4).tolist() and sorted(tokens) == [4, 6, 6, 8]
    by_tokens = {plan.features: pixels for plan, pixels in (processor.prepare(tmp_path / name) for name in pictures)}
    assert torch.equal(arguments["pixel_values"], torch.cat([by_tokens[count] for count in tokens]))
    assert not (arguments["labels"] == processor.feature_id).any()
    assert (arguments["cu_seqlens"] is not None) == packing


def test_images_prepared_with_the_batch_are_those_that_forward_prepares(folder, tmp_path, pictures):
    """Packed documents: with the loss of each by itself, summed."""
    tokens = {"vocab_size": VOCABULARY, "image_token_id": 256, "video_token_id": 257}
    model = ligermodels.create(ARCHITECTURES["qwen2_vl"].SIZES["tiny"] | tokens)
    file, losses = written(tmp_path, *conversations(pictures)), []
    for prepare, packing in (
        (None, True),
        (model.prepare_training_images, True),
        (model.prepare_training_images, False),
    ):
        data = opened(file, folder, prepare, packing=packing)
        batches = data.training.micro_batches(0, len(data.training), 1, CPU)
        assert any(("images" in batch.arguments()) == (prepare is not None) for batch in batches)
        losses.append(sum(model(**batch.arguments(), num_items_in_batch=1).loss.item() for batch in batches))
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-5)


def test_a_rank_has_the_images_of_its_rows(folder, tmp_path, pictures):
    """Two ranks share the rows; rows without images give no pixels."""
    data = opened(written(tmp_path, *conversations(pictures)), folder, packing=False)
    grids = []
    for rank in range(2):
        world = World(torch.device("cpu"), rank, 2)
        batches = data.training.micro_batches(0, 2, 1, world)
        grids += [batch.arguments().get("image_grid_thw") for batch in batches]
    [whole] = data.training.micro_batches(0, 2, 2, CPU)
    assert torch.equal(torch.cat([grid for grid in grids if grid is not None]), whole.arguments()["image_grid_thw"])


def test_equal_questions_about_other_images_are_other_documents(folder, tmp_path, pictures):
    (tmp_path / "pictures/copy.png").write_bytes(png(picture(*SIZES[0], seed=9)))
    names = [pictures[0], "pictures/copy.png", pictures[0]]
    data = opened(
        written(tmp_path, *({"messages": asked([IMAGE, text("x")], "y"), "images": [name]} for name in names)), folder
    )
    hashes = data.training.sources[0].parts[0].store.hashes
    assert hashes[0] != hashes[1] and hashes[0] == hashes[2]


def test_the_header_alone_is_read_before_training(folder, tmp_path, pictures, monkeypatch):
    monkeypatch.setattr("ligermodels.images.inputs.read_image", None)
    assert opened(written(tmp_path, *conversations(pictures)), folder).lengths.documents == 3


WITHOUT_IMAGES = (
    r"data.jsonl:1: has <\|image_pad\|> in its text, which stands for an image; remove it, or give its image"
)
BAD = {
    "no file": ({"messages": asked([IMAGE | {"path": "gone.png"}], "a")}, r"data.jsonl:1: image 1: .*gone.png: cannot"),
    "outside": ({"messages": asked([IMAGE | {"path": "../x.png"}], "a")}, r":1: the image ../x.png is outside"),
    "absolute": ({"messages": asked([IMAGE | {"path": "/etc/passwd"}], "a")}, "the image /etc/passwd is outside"),
    "a zero character": ({"messages": asked([IMAGE | {"path": "a\0b"}], "a")}, r":1: the image 'a\\x00b' cannot be"),
    "links in a circle": ({"messages": asked([IMAGE | {"path": "circle/a.png"}], "a")}, "circle/a.png' cannot be"),
    "no image": ({"messages": asked([IMAGE], "a")}, r"content\[0\] is an image, but field images has only 0"),
    "one too many": (
        {"messages": asked([IMAGE, text("x")], "a"), "images": ["a.png"] * 2}, "field images has 2 images, 1 more than",
    ),
    "no question": (
        {"messages": [{"role": "assistant", "content": "a"}], "images": ["a.png"]},
        "data.jsonl:1: field images is beside messages of which none is the user's; give them as image parts",
    ),
    "a text": ({"text": "x", "image": "pictures/0.png"}, "data.jsonl:1: has images beside a text"),
    "a prompt": (
        {"prompt": "x", "completion": "y", "images": ["pictures/0.png"]}, "data.jsonl:1: has images beside a text",
    ),
    "both columns": ({"messages": asked("<image>", "a"), "image": "a", "images": ["b"]}, "both fields images and"),
    "a token": (
        {"messages": asked([IMAGE, text("<|image_pad|>")], "a"), "images": ["pictures/0.png"]},
        r"data.jsonl:1: field messages\[0\].content has <\|image_pad\|> in its text",
    ),
    "a token in a text": ({"text": "a<|image_pad|>"}, WITHOUT_IMAGES),
    "a token in a chat": ({"messages": asked("q", "a<|image_pad|>")}, WITHOUT_IMAGES),
    "a token in a prompt": ({"prompt": "<|image_pad|>q", "completion": "a"}, WITHOUT_IMAGES),
    "a folder": ({"messages": asked([IMAGE | {"path": "pictures"}], "a")}, "image 1: .*is not a regular file"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_bad_records_are_refused_or_counted(fault, folder, tmp_path, pictures):
    record, message = BAD[fault]
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(InputError, match=message):
        opened(written(tmp_path, record), folder)
    good = {"messages": asked([IMAGE, text("x")], "y"), "images": [pictures[0]]}
    data = opened(written(tmp_path, record, good), folder, allow_bad_lines=2)
    assert data.lengths.documents == 1 and "1 bad line" in data.description


def test_an_image_token_is_text_to_a_model_that_reads_no_images(folder, tmp_path):
    """As Qwen2.5's tokenizer has it. In a token file it is refused where the model reads images."""
    plain = without_processor(folder, tmp_path / "plain")
    data, token = (
        opened(written(tmp_path, {"text": "a<|image_pad|>b"}), plain),
        ligermodels.load_processor(folder).feature_id,
    )
    assert data.training.sources[0].parts[0].store.tokens[1] == token
    np.save(tmp_path / "data.npy", np.array([1, 2, VOCABULARY - 1] * 9 + [3, token, VOCABULARY - 1], np.uint32))
    assert opened(tmp_path / "data.npy", plain).lengths.documents == 10
    with pytest.raises(InputError, match=r"data.npy: token 28 is <\|image_pad\|>, which stands for an image; remove"):
        opened(tmp_path / "data.npy", folder)


def test_a_record_whose_images_take_too_many_tokens_is_named(folder, tmp_path, pictures, monkeypatch):
    monkeypatch.setattr("ligermodels.images.inputs.MAX_FEATURES_OF_TEXT", 3)
    with pytest.raises(InputError, match=r"data.jsonl:1: 1 images take 4 image tokens, more than 3; use fewer"):
        opened(written(tmp_path, {"messages": asked([IMAGE, text("x")], "y"), "images": [pictures[0]]}), folder)


def test_a_document_that_a_row_cannot_hold_is_refused(folder, tmp_path, pictures):
    file = written(tmp_path, *conversations(pictures))
    with pytest.raises(InputError, match=r":3: has 41 tokens, with those of its images, more than a row of 40"):
        opened(file, folder, sequence_length=40)


def test_an_image_that_has_changed_is_named(folder, tmp_path, pictures):
    data = opened(written(tmp_path, *conversations(pictures)), folder)
    (tmp_path / pictures[0]).write_bytes(png(picture(200, 300)))
    with pytest.raises(InputError, match=r"data.jsonl:1: image: has another size than when the data were tok") as error:
        data.training.micro_batches(0, 3, 3, CPU)
    assert f"; restore it, or delete the cache of data, {cache_folder()}, and start another run" in str(error.value)
    (tmp_path / pictures[0]).write_bytes(png(picture(*SIZES[0]))[:-50])
    with pytest.raises(InputError, match=r"data.jsonl:1: image: cannot be decoded: .*truncated"):
        data.training.micro_batches(0, 3, 3, CPU)


def test_a_model_without_an_image_processor_refuses_images(folder, tmp_path, pictures):
    plain = without_processor(folder, tmp_path / "plain")
    with pytest.raises(InputError, match=r"data.jsonl:1: has images, but the model has no image processor"):
        opened(written(tmp_path, *conversations(pictures)), plain)
    assert np.all(opened(written(tmp_path, {"messages": asked("x", "y")}), plain).training.tokens > 0)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    """A folder of a model whose prompts are prefixes."""
    folder = write_folder(tmp_path_factory.mktemp("prefixes"), *SMALL["paligemma"], QWEN_TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 258}))
    return folder


PREFIX_FORMS = {
    "a completion": {"prompt": "what?", "completion": "a"},
    "a completion with a mark": {"prompt": "<image>what?", "completion": "a"},
    "messages": {"messages": asked([IMAGE, text("what?")], "a")},
    "a question": {"question": "what?", "answer": "a"},
    "LLaVA": {"conversations": [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a"}]},
}


@pytest.mark.parametrize("form", PREFIX_FORMS)
def test_prompts_that_are_prefixes(form, prefixes, tmp_path, pictures):
    """Ids and what is supervised are those that the processor makes of the prompt and its suffix."""
    data = opened(written(tmp_path, PREFIX_FORMS[form] | {"images": [pictures[0]]}), prefixes)
    inputs = ligermodels.load_processor(prefixes)("what?", [tmp_path / pictures[0]], suffix="a")
    [(ids, supervised, images)] = documents(data)
    assert ids == inputs["input_ids"][0].tolist()
    assert supervised == (inputs["labels"][0] >= 0).tolist()
    assert images == [(0, 4, str(tmp_path / pictures[0]))]


def test_packed_prefixes_have_the_loss_of_each_by_itself(prefixes, tmp_path, pictures):
    """Prompts of one and of two images, an empty one, and a text between them, which is causal."""
    raw = ARCHITECTURES["paligemma"].SIZES["tiny"]
    raw = raw | {"image_token_index": 256, "vision_config": raw["vision_config"] | {"image_size": 28}}
    raw = raw | {"text_config": raw["text_config"] | {"vocab_size": VOCABULARY}}
    model = ligermodels.create(raw).double()
    folder = shutil.copytree(prefixes, tmp_path / "model")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"size": {"height": 28, "width": 28}}))
    processor = ligermodels.load_processor(folder)
    records = [("one", "a", pictures[:1]), ("text", "b", []), ("", "cd", pictures[1:])]
    file = written(tmp_path, *({"prompt": p, "completion": c, "images": names} for p, c, names in records))
    losses = []
    for packing in (True, False):
        data = opened(file, folder, model.prepare_training_images, packing=packing, sequence_length=30)
        batches = [batch.arguments() for batch in data.training.micro_batches(0, len(data.training), 1, CPU)]
        losses.append(sum(model(**batch, num_items_in_batch=1).loss.item() for batch in batches))
    apart = 0.0
    for prompt, completion, names in records:
        row = processor(prompt, [tmp_path / name for name in names], suffix=completion)
        apart += model(**row, num_items_in_batch=1).loss.item()
    assert len(batches) == 3 and losses == pytest.approx([apart, apart], rel=1e-6)


BAD_PREFIXES = {
    "two turns": (
        {"messages": [*asked([IMAGE, text("x")], "a"), *asked("y", "b")], "images": ["pictures/0.png"]},
        "data.jsonl:1: messages: have the roles user, assistant, user, assistant",
    ),
    "an image in an answer": (
        {"messages": asked("x", [IMAGE]), "images": ["pictures/0.png"]}, "data.jsonl:1: completion: has <image>",
    ),
    "no answer": ({"messages": asked([IMAGE], "a")[:1], "images": ["pictures/0.png"]}, "nothing is supervised"),
    "too few images": (
        {"prompt": "<image><image>", "completion": "a", "images": ["pictures/0.png"]}, "<image> 2 times, but there",
    ),
    "no file": ({"prompt": "x", "completion": "a", "images": ["gone.png"]}, ":1: image 1: .*gone.png: cannot"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD_PREFIXES)
def test_bad_prefixes_are_refused(fault, prefixes, tmp_path, pictures):
    record, message = BAD_PREFIXES[fault]
    with pytest.raises(InputError, match=message):
        opened(written(tmp_path, record), prefixes)
