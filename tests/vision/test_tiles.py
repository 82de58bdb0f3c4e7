"""Llama 3.2 Vision with images against the reference implementation, its caches, packing, and breaks of the code."""

import copy
import json

import pytest
import torch

import ligermodels
from ligermodels.errors import InputError
from ligermodels.generation.kv_cache import KVCache
from ligermodels.training import TrainConfig, train
from ligermodels.training.preparing import plan
from tests.cases import CASES
from tests.conftest import DEVICE
from tests.images.folders import QWEN_TEMPLATE, TOKENS, picture, write_folder
from tests.kernels.error_budget import relative_error
from tests.parity import FP32_FACTOR, HALF, check_half_precision, moved, reference_results, results
from tests.reference_model import save_reference
from tests.sabotage import Sabotage
from tests.suites import slow
from tests.vision.batches import labels_for
from tests.vision.tiles import BATCH, ONE, PATTERNS, SQUARE, WIDE, batch_of

PARITY_PATTERNS = PATTERNS | {"short": [[1, WIDE, 2]]}
VARIANTS = [name for name in CASES if name.startswith("mllama")]


def inputs_of(name, patterns):
    batch = batch_of(name, PARITY_PATTERNS[patterns])
    return batch | {"labels": labels_for(name, batch)}


def check_tile_parity(name, patterns, device=DEVICE):
    """Compares logits, loss and the change of every weight in one SGD step, in fp32, with both switches of the
    reference. patterns: of the rows, a key of PARITY_PATTERNS."""
    folder, exact, theirs = reference_results(name, inputs_of, patterns, step_from_zero=False)
    model = ligermodels.load(folder.name, device=device)
    model.as_transformers = True
    ours = results(model, moved(inputs_of(name, patterns), device), step_from_zero=False)
    assert ours.keys() == exact.keys()
    exact, theirs, ours = (with_gates_together(found) for found in (exact, theirs, ours))
    for what, value in ours.items():
        error, floor = relative_error(value, exact[what]), torch.finfo(torch.float32).eps
        own_error = relative_error(theirs[what], exact[what])
        assert error <= FP32_FACTOR * max(own_error, floor), (
            f"{what}: error {error:.1e}, the reference's {own_error:.1e}"
        )


def with_gates_together(found):
    """A gate's gradient is one number, a sum that may cancel, whose own error says little: all gates are one vector."""
    gates = sorted(what for what in found if "gate" in what and found[what].numel() == 1)
    others = {what: value for what, value in found.items() if what not in gates}
    return others | {"gates": torch.stack([found[what].flatten() for what in gates])}


@pytest.mark.parametrize(
    ("name", "patterns"),
    [("mllama", patterns) for patterns in PATTERNS] + [(name, "row") for name in VARIANTS if "-" in name],
)
def test_fp32_results_with_images_equal_those_of_the_reference(name, patterns):
    check_tile_parity(name, patterns)


@pytest.mark.usefixtures("kernels")
def test_fp32_results_of_the_kernels_with_images_equal_those_of_the_reference():
    check_tile_parity("mllama", "short")


@pytest.mark.usefixtures("kernels")
def test_half_precision_with_images_is_within_the_error_budget(tmp_path):
    reference = save_reference(CASES["mllama"], tmp_path)
    model = ligermodels.load(tmp_path, dtype=HALF, device=DEVICE)
    model.as_transformers = True
    batch = batch_of("mllama", [[2, WIDE, 3]])
    check_half_precision(model, reference, batch, batch)


def trained_model(seed=0):
    """In fp64, with gates that are not closed."""
    model = ligermodels.create(CASES["mllama"], device=DEVICE, seed=seed).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate_attn", "gate_ffn", ".gate")):
                parameter.fill_(0.7)
            else:
                parameter.mul_(5)  # sharp attention, so that attention across documents would show
    return model


def test_tokens_before_images_are_as_without_and_tiles_that_an_image_lacks_change_nothing_but_the_tower():
    """As the models were trained. A row without images in a batch with some is as alone."""
    model = trained_model().eval()
    batch = moved(batch_of("mllama", [[4, WIDE, 3], [8]]))
    with torch.no_grad():
        together = model(**batch).logits
        text = model(batch["input_ids"][:, :4]).logits
        alone = model(batch["input_ids"][1:]).logits
        by_tokens = model(**{key: x for key, x in batch.items() if key != "cross_attention_mask"}).logits
    torch.testing.assert_close(together[:1, :4], text[:1], rtol=0, atol=1e-11)
    torch.testing.assert_close(together[1:], alone, rtol=0, atol=1e-11)
    assert (together[0, 4:] - model(batch["input_ids"]).logits[0, 4:]).abs().min() > 1e-6
    assert torch.equal(together, by_tokens)


def test_states_are_taken_before_blocks_as_the_models_were_trained(tmp_path):
    """The reference with the states of the block before each index agrees with our default."""
    name = "mllama"
    reference = save_reference(CASES[name], tmp_path)
    model, batch = ligermodels.load(tmp_path, device=DEVICE), batch_of(name, [[ONE, 4]])
    shifted = copy.deepcopy(reference)
    shifted.model.vision_model.intermediate_layers_indices = [1]  # behind block 1 is before block 2
    embedded = []
    shifted.model.vision_model.transformer.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: embedded.append(kwargs["hidden_states"]), with_kwargs=True
    )
    forward = type(shifted.model.vision_model.transformer).forward

    def with_first(self, hidden_states, attention_mask=None):
        output = forward(self, hidden_states, attention_mask)
        output.hidden_states = (hidden_states, *output.hidden_states)
        return output

    transformer = shifted.model.vision_model.transformer
    transformer.forward = with_first.__get__(transformer)
    shifted.model.vision_model.intermediate_layers_indices = [0, 2]
    with torch.no_grad():
        ours = model(**moved(batch)).logits.cpu()
        assert relative_error(ours, shifted(**batch).logits) < 1e-5
        assert relative_error(ours, reference(**batch).logits) > 1e-2


def test_greedy_generation_with_images_gives_the_tokens_of_the_reference(tmp_path):
    """Images first, so that no token is before them; both ways to pass images. The engine prefills them as one row."""
    reference = save_reference(CASES["mllama"], tmp_path)
    model = ligermodels.load(tmp_path, device=DEVICE)
    model.as_transformers = True
    patterns = [[ONE, 3], [SQUARE, 2, WIDE, 4], [6], [WIDE, 5]]
    rows = [batch_of("mllama", [pattern], seed=20 + number) for number, pattern in enumerate(patterns)]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = []
    for row in rows:
        theirs = reference.generate(**row, attention_mask=torch.ones_like(row["input_ids"]), **options)
        expected.append(theirs[0, row["input_ids"].shape[1] :].tolist())
    prompts = [row["input_ids"][0].tolist() for row in rows]
    images = [{key: value for key, value in row.items() if key != "input_ids"} for row in rows]
    given = [each or None for each in images]
    assert ligermodels.generate(model, prompts, max_new_tokens=8, stop_tokens=(), images=given) == expected
    # A prompt without images takes the pages that one with images had.
    engine = ligermodels.Engine(model, max_tokens=256, max_rows=1)
    for prompt, image in zip(prompts, given, strict=True):
        engine.submit(prompt, max_new_tokens=8, stop_tokens=(), images=image)
    assert [sample.ids for sample in engine] == expected


def test_generate_of_a_batch_with_padding_gives_the_tokens_of_separate_rows():
    model = trained_model().float().eval()
    batch = moved(batch_of("mllama", BATCH))
    together = model.generate(**batch, max_new_tokens=4, stop_tokens=())[:, -4:]
    for row, mask in enumerate(batch["attention_mask"].bool()):
        alone = {key: value[row : row + 1] for key, value in batch.items() if key != "attention_mask"}
        alone |= {key: alone[key][:, mask] for key in ("input_ids", "cross_attention_mask")}
        assert together[row].tolist() == model.generate(**alone, max_new_tokens=4, stop_tokens=())[0, -4:].tolist()


def test_a_cache_continues_behind_images_and_takes_new_ones():
    """Two turns with an image each, the second in a second call, then a token: as one pass over everything."""
    model = trained_model().eval()
    whole = moved(batch_of("mllama", [[2, WIDE, 4, SQUARE, 3]]))
    ids, cut = whole["input_ids"], 5
    del whole["cross_attention_mask"]
    pixels = {key: x for key, x in whole.items() if key != "input_ids"}
    first, second = ({key: x[:, i : i + 1] for key, x in pixels.items()} for i in (0, 1))
    cache = KVCache(model.kept_by_layers(), 1, 64, ids.device)
    with torch.no_grad():
        expected = model(**whole).logits
        parts = [
            model(ids[:, :cut], **first, cache=cache), model(ids[:, cut:6], cache=cache),
            model(ids[:, 6:9], **second, cache=cache), model(ids[:, 9:], cache=cache),
        ]  # fmt: skip
    torch.testing.assert_close(torch.cat([out.logits for out in parts], 1), expected, rtol=0, atol=1e-11)


def test_packed_documents_with_images_give_loss_and_gradients_of_separate_runs():
    """Images at both edges of documents, and a document without images between two with."""
    patterns = [[WIDE, 3], [5], [2, ONE, 1, SQUARE], [SQUARE, ONE, 1]]
    rows = [batch_of("mllama", [pattern], seed=number) for number, pattern in enumerate(patterns)]
    lengths = [row["input_ids"].shape[1] for row in rows]
    packed = {"input_ids": torch.cat([row["input_ids"] for row in rows], 1)}
    for key in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"):
        packed[key] = torch.cat([row[key] for row in rows if key in row], 1)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    for row in rows:
        row["labels"] = labels_for("mllama", row)
    packed["labels"] = torch.cat([row["labels"] for row in rows], 1)

    def run(model, batches, **inputs):
        losses = []
        for batch in batches:
            batch = moved(batch)
            losses.append(model(**batch, num_items_in_batch=10, **inputs).loss)
        loss = torch.stack(losses).sum()
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    model = trained_model()
    together = run(copy.deepcopy(model), [packed], cu_seqlens=offsets, max_seqlen=max(lengths))
    apart = run(copy.deepcopy(model), rows)
    for one, other in zip(together, apart, strict=True):
        assert relative_error(one, other) < 1e-10


TEMPLATE = QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image|>")


@pytest.mark.parametrize("packing", [True, False])
def test_a_run_on_images_trains_all_parts_and_exports(packing, tmp_path, monkeypatch):
    """The image token has an embedding and no row of the head. Records with one image, two and none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(TOKENS, "Mllama", ["<bos>", "<pad>", "<|image|>"])
    raw = CASES["mllama"] | {"image_token_index": 258}
    raw["text_config"] = raw["text_config"] | {"vocab_size": 258, "max_position_embeddings": 256}
    model = ligermodels.create(raw)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate_attn", "gate_ffn", ".gate")):
                parameter.fill_(0.5)
    ligermodels.export(model, tmp_path / "model")
    write_folder(tmp_path / "model", "Mllama", {"size": {"height": 6, "width": 6}}, {}, TEMPLATE)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    before = ligermodels.load(tmp_path / "model")
    for number, size in enumerate([(6, 6), (5, 12), (12, 12)]):
        picture(*size, seed=number).save(tmp_path / f"{number}.png")
    records = [[0], [1, 2], [], [2], [0, 1], [1]]
    with open(tmp_path / "data.jsonl", "w") as file:
        for record in records:
            parts = [{"type": "image", "path": f"{number}.png"} for number in record]
            user = {"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}
            file.write(json.dumps({"messages": [user, {"role": "assistant", "content": "red"}]}) + "\n")
    config = TrainConfig(
        model=str(tmp_path / "model"), data=(str(tmp_path / "data.jsonl"),), steps=2, batch_size=2, packing=packing,
        sequence_length=192, output=str(tmp_path / "run"), learning_rate=1e-2,
    )  # fmt: skip
    made = plan(config)
    assert made.data.images.tokens in (5, 6, 7) and "images" in dict(made.table())  # one record is for validation
    assert made.data.images.flops > 0.2 * made.flops and made.data.images.most_patches % (4 * 9) == 0
    result = train(config)
    losses = [record["loss"] for record in result.metrics if "loss" in record]
    assert len(losses) == 2 and losses[1] < losses[0]
    trained = ligermodels.load(result.exported)
    same = {n for (n, p), q in zip(before.named_parameters(), trained.parameters(), strict=True) if torch.equal(p, q)}
    assert not same
    processor = ligermodels.load_processor(result.exported)
    messages = [{"role": "user", "content": [{"type": "image", "path": str(tmp_path / "1.png")}]}]
    inputs = processor.apply_chat_template(messages, add_generation_prompt=True)
    with torch.no_grad():
        assert torch.equal(result.model.eval()(**inputs).logits, trained(**inputs).logits)
    new = ligermodels.generate(trained, [inputs["input_ids"][0].tolist()], images=[
        {key: value for key, value in inputs.items() if key not in ("input_ids", "attention_mask")}
    ], max_new_tokens=3, repetition_penalty=1.2, stop_tokens=())  # fmt: skip
    assert len(new[0]) == 3


REFUSED = {
    "an image without a token": ({"input_ids": 5}, "1 of 1 images of row 0 have no token"),
    "a token without an image": ({"aspect_ratio_ids": 0}, "row 0 has more image tokens than images"),
    "tiles of another size": ({"pixel_values": torch.zeros(1, 1, 4, 3, 8, 8)}, r"need \[1, 1, 4, 3, 6, 6\]"),
    "a mask of another length": ({"cross_attention_mask": torch.ones(1, 3, 1, 4)}, r"must be \[1, 5, 1, 4\]"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_images_that_do_not_fit_the_tokens_are_refused(fault):
    changes, message = REFUSED[fault]
    batch = batch_of("mllama", [[1, ONE, 3]])
    mask = batch.pop("cross_attention_mask")
    for key, value in changes.items():
        batch[key] = value if isinstance(value, torch.Tensor) else torch.full_like(batch.get(key, mask), value)
    with pytest.raises(InputError, match=message):
        ligermodels.create(CASES["mllama"])(**batch)


TOWER, CROSS = "ligermodels.vision.mllama", "ligermodels.vision.mllama"
BREAKS = {
    "states before blocks": Sabotage(f"{TOWER}:TiledVisionTower.forward", "is_tap and self.taps_after", "False", ""),
    "states not interleaved": Sabotage(
        f"{TOWER}:TiledVisionTower.forward", "torch.stack(taps, -1)", "torch.stack(taps, -2)", ""
    ),
    "padding sees padding": Sabotage(
        f"{TOWER}:tile_layout",
        "valid, size), DocumentRun(number, size - valid, valid)",
        "valid, valid), DocumentRun(number, size - valid, size)",
        "",
    ),
    "absent tiles not seen": Sabotage(f"{TOWER}:tile_layout", "(row < count * rows)", "(row < size)", ""),
    "rows of tiles not put back": Sabotage(
        f"{TOWER}:TiledVisionTower.forward", "states[:, inverse]", "states[:, layout.order]", ""
    ),
    "gate of positions reversed": Sabotage(f"{TOWER}:GatedPositions.forward", "(1 - gate)", "gate", ""),
    "gate of tiles without tanh": Sabotage(f"{TOWER}:TilePositions.forward", ".tanh()", "", ""),
    "class token behind the patches": Sabotage(
        f"{TOWER}:TiledVisionTower.embed",
        "[self.class_embedding.expand(*x.shape[:2], 1, -1), x]",
        "[x, self.class_embedding.expand(*x.shape[:2], 1, -1)]",
        "",
    ),
    "gate of attention without tanh": Sabotage(
        f"{CROSS}:CrossAttentionLayer.forward_block", "self.gate_attn.tanh()", "self.gate_attn", ""
    ),
    "blind tokens through the MLP": Sabotage(
        f"{CROSS}:CrossAttentionLayer.forward_block", "x * seen[..., None]", "x", ""
    ),
    "keys not normed": Sabotage(f"{CROSS}:CrossAttention.attend", "k = self.k_norm(k)", "k = k * 1", ""),
    "causal cross-attention": Sabotage(f"{CROSS}:CrossAttention.attend", "causal=False", "causal=True", ""),
    "tokens see the image before": Sabotage(
        "ligermodels.vision.tiled_model:spans_of_mask", "nonzero()[:, 0] + 1", "nonzero()[:, 0] + 2", ""
    ),
}


@slow
@pytest.mark.parametrize("name", BREAKS)
def test_a_break_makes_the_parity_case_fail(name, monkeypatch):
    BREAKS[name].apply(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        check_tile_parity("mllama", "row", "cpu")
