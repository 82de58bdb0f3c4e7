"""Models with images against the reference implementation: logits, loss, SGD step, generation, packing, caches."""

import copy

import pytest
import torch
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

import ligermodels
from ligermodels.errors import InputError
from ligermodels.generation import engine
from ligermodels.generation.kv_cache import KVCache
from ligermodels.vision.patch_positions import Grid
from ligermodels.vision.siglip_tiles import padded_tile_layout
from tests.cases import CASES
from tests.conftest import DEVICE
from tests.kernels.error_budget import relative_error
from tests.parity import FP32_FACTOR, HALF, check_half_precision, moved, reference_results, results
from tests.reference_model import save_reference
from tests.suites import of_families, quick
from tests.vision.batches import (
    GRIDS,
    VIDEO,
    VISION_CASES,
    batch_of,
    completion_labels,
    for_reference,
    ids_of,
    image_token,
    images_between,
    join_pixels,
    labels_for,
    takes_pictures,
    takes_tiles,
    takes_videos,
    types_of,
)

A, B, C = GRIDS
# Images of unequal size, two in a row, one at the start of a row, one at its end, rows of unequal length; a video.
BATCH = [[4, A, 3, B, 5], [C, 2], [3, B]]
PATTERNS = {
    "images": BATCH, "row": [[4, A, 3, B, 5]], "video": [[2, VIDEO, 3, B, 2]], "none": [[7], [7]], "short": [[2, B, 2]],
}  # fmt: skip


def inputs_of(name, patterns):
    batch = batch_of(name, PATTERNS[patterns])
    if name.startswith("paligemma") and "pixel_values" in batch:
        batch["token_type_ids"] = types_of(name, batch)
    return batch | {"labels": labels_for(name, batch)}


def inputs_of_reference(name, patterns):
    return for_reference(name, inputs_of(name, patterns))


def check_image_parity(name, patterns, device=DEVICE):
    """Compares logits, loss and the change of every weight in one SGD step, in fp32.

    patterns: of the rows, a key of PATTERNS. The absolute error of a logit is a relative error of all gradients.
    """
    folder, exact, theirs = reference_results(name, inputs_of_reference, patterns, step_from_zero=False)
    model = ligermodels.load(folder.name, device=device)
    ours = results(model, moved(inputs_of(name, patterns), device), step_from_zero=False)
    of_logits = (theirs["logits"].double() - exact["logits"]).abs().max().item()
    left_out = exact.keys() - ours.keys() - {"lm_head.weight", "language_model.lm_head.weight"}
    assert left_out == set(model.kept_of(left_out))
    for what in left_out:  # kept, not computed: results must not depend on it
        assert not exact[what].any(), what
    for what, value in ours.items():
        if takes_pictures(name) and what.endswith("k_proj.bias"):  # without RoPE it adds the same to all scores
            of_queries = exact[what.replace("k_proj", "q_proj")].abs().max()
            assert value.abs().max() <= FP32_FACTOR * of_logits * of_queries + torch.finfo(torch.float32).eps, what
            continue
        error, own = relative_error(value, exact[what]), relative_error(theirs[what], exact[what])
        if what not in ("logits", "loss"):  # the gradient of the loss is softmax(logits) - target
            own = max(own, of_logits)
        allowed = FP32_FACTOR * max(own, torch.finfo(torch.float32).eps)
        assert error <= allowed, f"{what}: error {error:.1e}, allowed {allowed:.1e}"


FAMILIES = of_families(VISION_CASES)
SWITCHES = [name for name in VISION_CASES if "-" in name]
# A family of each tower and of each mask; that of tiles is in test_tiles.py.
OF_TOWERS = ["gemma3", "idefics3", "llava", "mistral3", "paligemma", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
FEW = ["gemma3", "qwen2_5_vl"]


def patterns_of(name):
    return ["images", "row", "none", *(["video"] if takes_videos(name) else [])]


@pytest.mark.parametrize(
    ("name", "patterns"),
    quick(
        [(name, patterns) for name in FAMILIES for patterns in patterns_of(name)]
        + [(name, "row") for name in SWITCHES],
        [(name, "images") for name in FAMILIES],
    ),
)
def test_fp32_results_with_images_equal_those_of_the_reference(name, patterns):
    check_image_parity(name, patterns)


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])
def test_tokens_of_images_without_images_are_refused_in_prompts_and_not_where_a_model_draws_them(name):
    model, token = ligermodels.create(CASES[name], seed=0).eval(), image_token(CASES[name])
    message = (
        f"generate: prompt 1 has the token {token}, which stands for an image, but no images; pass its pixel values"
    )
    with pytest.raises(InputError, match=message):
        ligermodels.generate(model, [[5, 6], [5, token, 6]], max_new_tokens=1)
    with pytest.raises(InputError, match=message.replace("prompt 1", "prompt 0")):
        model.generate(torch.tensor([[5, token, 6]]), max_new_tokens=1)
    drawn = ligermodels.generate(model, [[5]], n=4, max_new_tokens=100, stop_tokens=(), temperature=1e4, seed=0)
    assert any(token in row[:-1] for row in drawn)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", quick(OF_TOWERS, FEW))
def test_fp32_results_of_the_kernels_with_images_equal_those_of_the_reference(name):
    check_image_parity(name, "short")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", quick(OF_TOWERS, FEW))
def test_half_precision_with_images_is_within_the_error_budget(name, tmp_path):
    reference = save_reference(CASES[name], tmp_path)
    model = ligermodels.load(tmp_path, dtype=HALF, device=DEVICE)
    batch = batch_of(name, [[4, B, 3, B, 5]])
    if name == "paligemma":
        batch["token_type_ids"] = types_of(name, batch)
    check_half_precision(model, reference, batch, for_reference(name, batch))


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_generation_with_images_gives_the_tokens_of_the_reference(name, tmp_path):
    """Both ways to pass images; the reference runs the prompts separately. The engine prefills them as one row."""
    reference = save_reference(CASES[name], tmp_path)
    model = ligermodels.load(tmp_path, device=DEVICE)
    # Of a prompt that ends with an image, the reference computes other tokens step by step than as a whole.
    patterns = [[*pattern, 1] for pattern in BATCH] + [[6]]
    patterns += [PATTERNS["video"][0]] if takes_videos(name) else []
    rows = [batch_of(name, [pattern], seed=20 + number) for number, pattern in enumerate(patterns)]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = []
    for row in rows:
        every = torch.ones_like(row["input_ids"])
        inputs = for_reference(name, row)
        if name.startswith("paligemma") and "pixel_values" in row:  # all of a prompt
            inputs["token_type_ids"] = torch.zeros_like(every)
        theirs = reference.generate(**inputs, attention_mask=every, **options)
        expected.append(theirs[0, row["input_ids"].shape[1] :].tolist())
    prompts = [row["input_ids"][0].tolist() for row in rows]
    images = [{key: value for key, value in row.items() if key != "input_ids"} for row in rows]
    assert ligermodels.generate(model, prompts, max_new_tokens=8, stop_tokens=(), images=images) == expected
    batch = moved(batch_of(name, BATCH))
    together = model.generate(**batch, max_new_tokens=4, stop_tokens=())[:, -4:]
    apart = [model.generate(**row, max_new_tokens=4, stop_tokens=())[0, -4:] for row in rows_of(name, batch)]
    assert together.tolist() == [row.tolist() for row in apart]


@pytest.mark.parametrize("count", [1, 6, 13])
@pytest.mark.parametrize("name", ["gemma3-beyond-the-window", "paligemma"])
def test_pieces_of_a_prompt_cut_no_picture(name, count, monkeypatch):
    """Tokens of a picture see those behind them, of PaliGemma all of the prompt; a picture is longer than a window."""
    model = ligermodels.create(CASES[name], device=DEVICE).double().eval()
    row = batch_of(name, [[4, A, 3, B, 5]])
    prompts, images = [row.pop("input_ids")[0].tolist()], [row]
    whole = ligermodels.generate(model, prompts, max_new_tokens=8, stop_tokens=(), images=images)
    monkeypatch.setattr(engine, "PREFILL_TOKENS", count)
    assert ligermodels.generate(model, prompts, max_new_tokens=8, stop_tokens=(), images=images) == whole


def rows_of(name, batch):
    """The rows of a batch of BATCH, each with its own images."""
    grids = [part for pattern in BATCH for part in pattern if isinstance(part, tuple)]
    first = 0
    for ids, mask, pattern in zip(batch["input_ids"], batch["attention_mask"], BATCH, strict=True):
        last = first + sum(isinstance(part, tuple) for part in pattern)
        yield {"input_ids": ids[mask.bool()][None]} | images_between(name, batch, grids, first, last)
        first = last


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_with_images_give_loss_and_gradients_of_separate_runs(name):
    """Images at both edges of documents, and a document without images between two with."""
    patterns = [[A, 3], [5], [2, B, 1, C], [C, 1]]
    if name == "paligemma":  # something follows the prompts
        patterns = [[A, 3, 4], [5], [2, B, 1, C, 5], [C, 4]]
    rows = [batch_of(name, [pattern], seed=number) for number, pattern in enumerate(patterns)]
    lengths = [row["input_ids"].shape[1] for row in rows]
    packed = {"input_ids": torch.cat([row["input_ids"] for row in rows], 1)}
    for key in rows[0].keys() & {"pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes"}:
        join = join_pixels if key == "pixel_values" and not takes_tiles(name) else torch.cat
        packed[key] = join([row[key] for row in rows if key in row], *([1] if takes_tiles(name) else []))
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)

    for row in rows:
        row["labels"] = completion_labels(name, row)
    packed["labels"] = torch.cat([row["labels"] for row in rows], 1)

    def run(model, batches, **inputs):
        losses = []
        for batch in batches:
            batch = moved(batch)
            losses.append(model(**batch, num_items_in_batch=10, **inputs).loss)
        loss = torch.stack(losses).sum()
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    model = ligermodels.create(CASES[name], device=DEVICE).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # sharp attention, so that attention across documents would show
    together = run(copy.deepcopy(model), [packed], cu_seqlens=offsets, max_seqlen=max(lengths))
    apart = run(copy.deepcopy(model), rows)
    for one, other in zip(together, apart, strict=True):
        assert relative_error(one, other) < 1e-11


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "paligemma"])  # whose prompt sees all of it
def test_a_cache_continues_behind_images_and_takes_new_ones(name):
    """Two turns with an image each, the second in a second call, then a token: as one pass over everything."""
    model = ligermodels.create(CASES[name], device=DEVICE).double().eval()
    whole = moved(batch_of(name, [[4, A, 3, B, 2]]))
    ids = whole["input_ids"]
    cut = 4 + len(ids_of(CASES[name], A)) + 2
    cache = KVCache(model.kept_by_layers(), 1, ids.shape[1], ids.device)
    one, other = (images_between(name, whole, [A, B], n, n + 1) for n in (0, 1))
    with torch.no_grad():
        expected = model(**whole).logits
        first = model(ids[:, :cut], **one, cache=cache)
        second = model(ids[:, cut:-1], **other, cache=cache)
        last = model(ids[:, -1:], cache=cache)
    got = torch.cat([out.logits for out in (first, second, last)], 1)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


def test_positions_go_on_behind_the_largest_of_a_long_video(tmp_path):
    """As the models were trained. The reference goes on at max(height, width); with our positions it agrees."""
    name, long = "qwen2_5_vl", [(3, 4, 6)]
    reference = save_reference(CASES[name], tmp_path)
    model, batch = ligermodels.load(tmp_path, device=DEVICE), batch_of(name, [[2, long, 2]])
    images = model.prepare_images(**batch)
    seconds = CASES[name]["vision_config"]["tokens_per_second"] * float(batch["second_per_grid_ts"])
    assert images.rope_ids[0, 0, 2:-2].tolist() == [2 + int(k * seconds) for k in range(3) for _ in range(6)]
    assert images.rope_ids[:, 0, -2:].tolist() == [[2 + int(2 * seconds) + 1, 2 + int(2 * seconds) + 2]] * 3
    with torch.no_grad():
        ours = model(**moved(batch)).logits.cpu()
        theirs = reference(**for_reference(name, batch), position_ids=images.rope_ids).logits
        assert relative_error(ours, reference(**for_reference(name, batch)).logits) > 1e-2
    assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_positions_behind_a_long_video_are_those_of_the_reference_if_asked_for(name, tmp_path):
    """In a row with text and an image behind it, and in generation, which goes on behind the last position."""
    reference = save_reference(CASES[name], tmp_path)
    model, batch = ligermodels.load(tmp_path, device=DEVICE), batch_of(name, [[2, [(5, 4, 6)], 3, B, 2]])
    on_device, options = moved(batch), {"max_new_tokens": 4}
    with torch.no_grad():
        theirs = reference(**for_reference(name, batch)).logits
        assert relative_error(model(**on_device).logits.cpu(), theirs) > 1e-2
        model.as_transformers = True
        assert relative_error(model(**on_device).logits.cpu(), theirs) < 1e-5
    new = reference.generate(
        **for_reference(name, batch), **options, do_sample=False, eos_token_id=None, pad_token_id=0,
        attention_mask=torch.ones_like(batch["input_ids"]),
    )  # fmt: skip
    assert model.generate(**on_device, **options, stop_tokens=()).tolist() == new.tolist()


def test_prepared_images_are_read_without_the_ids_on_the_host():
    """What a data loader prepares gives the same loss."""
    name = "qwen2_5_vl"
    model, batch = ligermodels.create(CASES[name], device=DEVICE), batch_of(name, BATCH)
    on_meta = ligermodels.create(CASES[name], device="meta")
    images = on_meta.prepare_images(**batch).to(torch.device(DEVICE))
    labels, ids = labels_for(name, batch).to(DEVICE), batch["input_ids"].to(DEVICE)
    mask = batch["attention_mask"].to(DEVICE)
    loss = model(ids, labels, images=images, attention_mask=mask).loss
    assert torch.equal(loss, model(**moved(batch), labels=labels).loss)


REFUSED = {
    "an image without tokens": ([[4, A]], lambda b: b["input_ids"].fill_(5), "1 of 1 images and videos have no tokens"),
    "tokens without an image": (
        [[A, 2, A]],
        lambda b: b.update(pixel_values=b["pixel_values"][:60], image_grid_thw=b["image_grid_thw"][:1]),
        "row or document 0, token 17: the text has more tokens 90",
    ),
    "a cut image": ([[4, A]], lambda b: b.update(input_ids=b["input_ids"][:, :-1]), "has 15 features, but only 14"),
    "an image over two rows": ([[A], [4, A]], lambda b: b["input_ids"][0, 14:].fill_(3), "but only 14 of these tokens"),
    "patches that do not fit": (
        [[4, A]], lambda b: b.update(pixel_values=b["pixel_values"][1:]), r"\[59, 24\]; the grids need \[60, 24\]",
    ),
    "an odd grid": (
        [[4, A]], lambda b: b.update(image_grid_thw=torch.tensor([[1, 5, 12]])), "multiples of 2 patches",
    ),
    "grids alone": ([[4, A]], lambda b: b.pop("pixel_values"), "pixel values and grids go together"),
}  # fmt: skip


def check_refusal(case, batch, damage, message):
    """A batch that is damaged in place is refused by a model of the case."""
    damage(batch)
    with pytest.raises(InputError, match=message):
        ligermodels.create(CASES[case])(**batch)


@pytest.mark.parametrize("fault", REFUSED)
def test_images_that_do_not_fit_the_tokens_are_refused(fault):
    patterns, damage, message = REFUSED[fault]
    batch = batch_of("qwen2_vl", patterns)
    batch.pop("attention_mask", None)
    check_refusal("qwen2_vl", batch, damage, message)


REFUSED_PICTURES = {
    "another size": (lambda b: b.update(pixel_values=b["pixel_values"][..., 1:]), r"\[2, 3, 16, 15\]; must be \[pict"),
    "grids": (
        lambda b: b.update(image_grid_thw=torch.ones(2, 3)),
        "image_grid_thw: the model takes pixel_values alone",
    ),
    "a picture too many": (lambda b: b.update(input_ids=b["input_ids"][:, :9]), "1 of 2 images and videos have no tok"),
    "a cut picture": (lambda b: b.update(input_ids=b["input_ids"][:, :7]), "has 4 features, but only 3"),
    "tokens without a picture": (lambda b: b.update(pixel_values=b["pixel_values"][:1]), "more tokens 97 than"),
}


@pytest.mark.parametrize("fault", REFUSED_PICTURES)
def test_pictures_that_do_not_fit_the_tokens_are_refused(fault):
    check_refusal("gemma3", batch_of("gemma3", [[4, A, 3, B]]), *REFUSED_PICTURES[fault])


def with_types(batch, *rows):
    batch["token_type_ids"] = torch.tensor(rows)


# Of rows [2, picture of 9 tokens, 2], and the fault.
REFUSED_PREFIXES = {
    "a picture behind the prompt": (lambda b: with_types(b, [0] * 3 + [1] * 10), "token 3 of the batch is a picture's"),
    "labels at a picture": (lambda b: b.update(labels=b["input_ids"]), "is a picture's, but behind the prompt"),
    "a prompt in two parts": (
        lambda b: with_types(b, [0] * 11 + [1, 0]), "token_type_ids: row or document 0 has 0 behind 1",
    ),
    "types without a picture": (
        lambda b: [with_types(b, [0] * 13), b.pop("pixel_values")], "token_type_ids: belong to pixel_values",
    ),
    "a picture too many": (lambda b: b["input_ids"].fill_(5), "1 of 1 images and videos have no tokens"),
    "grids": (lambda b: b.update(image_grid_thw=torch.ones(1, 3)), "the model takes pixel_values alone"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED_PREFIXES)
def test_prompts_that_do_not_fit_are_refused(fault):
    check_refusal("paligemma", batch_of("paligemma", [[2, A, 2]]), *REFUSED_PREFIXES[fault])


def test_a_prompt_beyond_the_window_and_tokens_behind_one_are_refused():
    """Of 28 tokens, the window of 27; in generation a prompt is all that there is."""
    model, batch = ligermodels.create(CASES["paligemma-gemma2"]), batch_of("paligemma", [[2, A, 8, B]])
    with pytest.raises(InputError, match=r"a prompt has 28 tokens .* more than sliding_window 27 of text_config"):
        model(**batch)
    types = torch.zeros_like(batch["input_ids"])
    types[:, -1] = 1
    with pytest.raises(InputError, match="token_type_ids: has 1, which is behind a prompt"):
        model.generate(**batch, token_type_ids=types)


def test_token_types_say_where_prompts_end_in_rows_without_a_picture_too(tmp_path):
    """Beside one with a picture; without token types such a row is causal."""
    reference = save_reference(CASES["paligemma"], tmp_path)
    model, batch = ligermodels.load(tmp_path, device=DEVICE), batch_of("paligemma", [[2, A, 2], [13]])
    types = (torch.arange(13) >= 12).long().expand(2, -1)
    with torch.no_grad():
        causal = model(**moved(batch)).logits[1].cpu()
        assert relative_error(causal, reference(batch["input_ids"][1:]).logits[0]) < 1e-5
        batch["token_type_ids"] = types
        ours = model(**moved(batch)).logits.cpu()
        assert relative_error(ours, reference(**batch).logits) < 1e-5
    assert relative_error(ours[1], causal) > 1e-2


def shown_apart(batch):
    """The mask of a tile with a hole."""
    mask = batch["pixel_attention_mask"].clone()
    mask[0, 0, 2:6] = 0
    return mask


REFUSED_TILES = {
    "another size": (
        lambda b: b.update(pixel_values=b["pixel_values"][..., 1:]),
        r"pixel_values: has shape \[2, 2, 3, 13, 12\]; must be \[2, 'tiles', 3, 13, 13\]",
    ),
    "grids": (lambda b: b.update(image_grid_thw=torch.ones(2, 3)), "image_grid_thw: the model takes pixel_values and"),
    "another mask": (
        lambda b: b.update(pixel_attention_mask=b["pixel_attention_mask"][:, :1]),
        r"pixel_attention_mask: has shape \[2, 1, 13, 13\]; must be \[2, 2, 13, 13\]",
    ),
    "a mask with a hole": (
        lambda b: b.update(pixel_attention_mask=shown_apart(b)), "must be 1 in a rectangle from the first pixel",
    ),
    "a tile that is padding alone": (lambda b: b["pixel_attention_mask"].zero_(), "must be 1 in a rectangle"),
    "a tile of another row": (
        lambda b: b.update({key: b[key].flip(0) for key in ("pixel_values", "pixel_attention_mask")}),
        "row 0 has 1 tiles of 9 features, but 18 image tokens",
    ),
    "no tile": (
        lambda b: b.update(input_ids=b["input_ids"].clamp(max=9), pixel_values=0 * b["pixel_values"]),
        "all tiles are zeros, which is padding",
    ),
    "a mask alone": (lambda b: b.pop("pixel_values"), "images: the model takes pixel_values and pixel_attention_mask"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED_TILES)
def test_tiles_that_do_not_fit_the_tokens_are_refused(fault):
    check_refusal("smolvlm", batch_of("smolvlm", [[4, A, 3, B], [C]]), *REFUSED_TILES[fault])


@pytest.mark.parametrize("side", [6, 16, 24, 26, 27, 32])
def test_patches_of_a_part_of_a_tile_read_the_positions_of_the_reference(side):
    """26, 27 and 32 patches are the sides of published models: binary fractions of them are rounded."""
    vision = {"image_size": 2 * side, "patch_size": 2, "hidden_size": 4, "num_attention_heads": 1}
    embeddings = Idefics3VisionEmbeddings(Idefics3VisionConfig(**vision))
    with torch.no_grad():
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(side * side)[:, None].expand(-1, 4))
        sizes = [(length, side + 1 - length) for length in range(1, side + 1)]
        count = torch.arange(side)
        shown = torch.stack([(count < h)[:, None] & (count < w) for h, w in sizes])
        expected = embeddings(torch.zeros(side, 3, 2 * side, 2 * side), shown)[..., 0]
    got = padded_tile_layout([Grid(1, *size) for size in sizes], side, 1).table.entries.view(side, -1)
    assert torch.equal(got, expected.long())


REFUSED_SIZES = {
    "sizes that are no multiples": (
        lambda b: b.update(image_sizes=b["image_sizes"] - 4), r"\[20, 36\] must be positive multiples of 8 pixels",
    ),
    "sizes beyond the pixels": (lambda b: b.update(image_sizes=b["image_sizes"] + 8), r"\[32, 48\] must .* \[24, 40\]"),
    "sizes of other images": (lambda b: b.update(image_sizes=b["image_sizes"][:1]), r"image_sizes: must be \[2, 2\]"),
    "one number a size": (lambda b: b.update(image_sizes=b["image_sizes"][:, 0]), r"image_sizes: must be \[2, 2\]"),
    "patches": (lambda b: b.update(pixel_values=b["pixel_values"].flatten(1)), r"must be \[images, 3, height, width\]"),
    "sizes alone": (lambda b: b.pop("pixel_values"), "images: the model takes pixel_values and image_sizes"),
    "grids": (lambda b: b.update(image_grid_thw=torch.ones(2, 3)), "image_grid_thw: the model takes pixel_values and"),
    "a cut image": (lambda b: b.update(input_ids=b["input_ids"][:, :-2]), "have 17 features, but the text has 16"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED_SIZES)
def test_images_with_sizes_that_do_not_fit_are_refused(fault):
    check_refusal("mistral3", batch_of("mistral3", [[4, A, 3, B]]), *REFUSED_SIZES[fault])


def test_a_row_of_features_in_two_documents_is_refused():
    """Of two documents with as many tokens as features, each with a part of a row of the first image."""
    batch = batch_of("mistral3", [[A, B]])
    offsets = torch.tensor([0, 3, batch["input_ids"].shape[1]], dtype=torch.int32)
    with pytest.raises(InputError, match="has 5 features, but only 3 of these tokens"):
        ligermodels.create(CASES["mistral3"])(**batch, cu_seqlens=offsets, max_seqlen=20)


def test_images_without_sizes_are_whole_and_other_models_take_no_sizes():
    model, batch = ligermodels.create(CASES["pixtral"], device=DEVICE), batch_of("pixtral", [[2, A, 1, A]])
    batch = moved(batch)
    sizes = batch.pop("image_sizes")
    assert torch.equal(model(**batch).logits, model(**batch, image_sizes=sizes).logits)
    with pytest.raises(InputError, match="image_sizes: the model takes pixels with grids"):
        ligermodels.create(CASES["qwen2_vl"])(**batch_of("qwen2_vl", [[2, A]]), image_sizes=sizes.cpu())
