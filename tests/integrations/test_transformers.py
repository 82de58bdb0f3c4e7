"""The face for transformers: one model with two faces, its configuration, its files, and what it refuses."""

import copy
import io
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import ligermodels
from ligermodels.errors import InputError
from ligermodels.integrations.transformers import MODEL_CLASSES, TransformersModel, register, unregister, wrap
from ligermodels.layers.lm_head import LMHead
from tests.cases import CASES
from tests.interop.models import load_reference
from tests.reference_model import KeepFp64, labels_of, reference_model, save_reference, tokens

IDS = torch.arange(3, 43).reshape(2, 20)
LLAMA = CASES["llama"]
ONE_PER_FAMILY = {raw["model_type"]: name for name, raw in reversed(CASES.items())}


@pytest.fixture
def folder(tmp_path):
    save_reference(LLAMA, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("family", MODEL_CLASSES)
def test_every_family_has_the_outputs_and_the_class_name_of_transformers(family, tmp_path):
    raw = CASES[ONE_PER_FAMILY[family]]
    reference = save_reference(raw, tmp_path).double()  # in fp32, its rounding alone exceeds the tolerance
    model = TransformersModel.from_pretrained(tmp_path).double()
    assert (type(model).__name__, type(model.config)) == (type(reference).__name__, type(reference.config))
    ids = tokens(raw)
    got = model(ids, labels=labels_of(ids))
    with KeepFp64():
        expected = reference(ids, labels=labels_of(ids))
    torch.testing.assert_close((got.loss, got.logits), (expected.loss, expected.logits), rtol=1e-4, atol=1e-4)
    backbone = model.base_model(ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state
    torch.testing.assert_close(model.bare.logits(backbone), got.logits)


@pytest.mark.parametrize("family", MODEL_CLASSES)
def test_a_model_is_made_from_the_configuration_of_transformers(family):
    """Which writes defaults that a config.json leaves out."""
    reference = reference_model(CASES[ONE_PER_FAMILY[family]])
    model = TransformersModel.from_config(copy.deepcopy(reference.config)).eval()
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    model.load_state_dict(dict(wrap(ligermodels.create(CASES[ONE_PER_FAMILY[family]])).state_dict()))
    assert shapes == {name: value.shape for name, value in model.state_dict().items()}


def test_both_faces_are_one_model():
    bare = ligermodels.create(LLAMA)
    model = wrap(bare)
    model.lm_head = LMHead(48, 99, bias=False)
    assert bare.lm_head is model.lm_head and bare.model is model.model
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in bare.named_parameters()]
    model.eval()
    assert not bare.training and torch.equal(model(IDS).logits, bare(IDS).logits)


@pytest.mark.parametrize("case", ["llama", "llama-tied"])
def test_copies_and_pickles_are_models_of_their_own(case):
    model = wrap(ligermodels.create(CASES[case]))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(IDS).logits, model(IDS).logits)
        with torch.no_grad():
            other.lm_head.weight.zero_()
        assert not other(IDS).logits.any() and model(IDS).logits.any()
        assert (other.lm_head.weight is other.get_input_embeddings().weight) == CASES[case]["tie_word_embeddings"]


@pytest.mark.parametrize("case", ["llama", "llama-tied"])
def test_a_model_without_memory_gets_it_by_to_empty(case):
    source = wrap(ligermodels.create(CASES[case])).eval()
    with torch.device("meta"):
        model = TransformersModel.from_config(source.config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.to_empty(device="cpu").eval().load_state_dict(source.state_dict())
    assert torch.equal(model(IDS).logits, source(IDS).logits)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == CASES[case]["tie_word_embeddings"]


def test_a_step_compiles_with_equal_numbers():
    model = wrap(ligermodels.create(LLAMA))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(IDS, labels=IDS).loss, model(IDS, labels=IDS).loss)


def test_training_with_labels_makes_no_logits_unless_asked():
    model = wrap(ligermodels.create(LLAMA)).train()
    assert model(IDS, labels=IDS).logits is None
    assert model(IDS, labels=IDS, skip_logits=False).logits.shape == (2, 20, 99)
    assert model.eval()(IDS, labels=IDS).logits.shape == (2, 20, 99)


def test_routers_are_balanced_where_it_is_requested():
    raw = CASES["qwen3_moe-aux-loss"]
    reference = reference_model(raw)
    model = wrap(ligermodels.create(raw)).eval()
    model.load_state_dict(reference.state_dict())
    mask = torch.ones_like(IDS)
    mask[0, 12:] = 0
    labels = IDS.masked_fill(mask == 0, -100)
    for requested in (True, None, False):
        arguments = {"attention_mask": mask, "labels": labels, "output_router_logits": requested}
        got, expected = model(IDS, **arguments), reference(IDS, **arguments)
        torch.testing.assert_close((got.loss, got.aux_loss), (expected.loss, expected.aux_loss), rtol=1e-4, atol=1e-5)


def test_items_counted_by_the_trainer_are_those_that_a_row_with_padding_on_either_side_predicts():
    """Trainer counts labels [:, 1:]: on the left, the first token behind the padding too, which nothing predicts."""
    reference = reference_model(LLAMA)
    model = wrap(ligermodels.create(LLAMA)).eval()
    model.load_state_dict(reference.state_dict())
    mask = torch.ones_like(IDS)
    mask[0, 12:] = 0
    labels, length = IDS.masked_fill(mask == 0, -100), IDS.shape[1]
    right = {"attention_mask": mask, "labels": labels, "num_items_in_batch": torch.tensor(11 + length - 1)}
    loss = model(IDS, **right).loss
    torch.testing.assert_close(loss, reference(IDS, **right).loss, rtol=1e-5, atol=0)
    on_left = [torch.stack([rows[0].roll(8), rows[1]]) for rows in (IDS, mask, labels)]
    left = model(on_left[0], on_left[1], labels=on_left[2], num_items_in_batch=torch.tensor(12 + length - 1)).loss
    torch.testing.assert_close(left, loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", ["llama", "llama-tied"])
def test_resized_embeddings_are_exported_with_their_size(case, tmp_path):
    model = wrap(ligermodels.create(CASES[case]))
    with torch.no_grad():
        before = model(IDS).logits
    model.resize_token_embeddings(108, mean_resizing=False)
    assert model.config.vocab_size == model.bare.config.vocab_size == 108
    assert type(model.lm_head) is LMHead
    torch.testing.assert_close(model(IDS).logits[..., :99], before)
    model(IDS, labels=IDS).loss.backward()
    model.save_pretrained(tmp_path)
    for other in (ligermodels.load(tmp_path), load_reference(tmp_path)):
        torch.testing.assert_close(other(IDS).logits, model.eval()(IDS).logits, rtol=1e-4, atol=1e-5)


def test_files_of_an_unchanged_model_are_those_it_was_loaded_from(folder, tmp_path):
    ligermodels.export(ligermodels.load(folder), tmp_path / "exported")
    TransformersModel.from_pretrained(tmp_path / "exported").save_pretrained(tmp_path / "saved")
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "exported" / name).read_bytes(), name


def test_changed_fields_are_saved(folder, tmp_path):
    model = TransformersModel.from_pretrained(folder)
    model.config.pad_token_id = 7
    model.generation_config = GenerationConfig(eos_token_id=[2, 9], do_sample=True)
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    written = json.loads((folder / "config.json").read_text())
    assert {key for key in saved if saved[key] != written.get(key)} == {"pad_token_id", "torch_dtype"}
    assert TransformersModel.from_pretrained(tmp_path / "saved").generation_config.eos_token_id == [2, 9]


def test_saving_replaces_weights_and_leaves_other_files(folder):
    model = TransformersModel.from_pretrained(folder)
    (folder / "notes.txt").write_text("mine")
    model.save_pretrained(folder, max_shard_size=50_000)
    assert not (folder / "model.safetensors").exists()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "notes.txt",
    ]  # fmt: skip
    assert torch.equal(ligermodels.load(folder).lm_head.weight, model.lm_head.weight)


def test_a_state_dict_is_saved_in_place_of_the_weights(folder, tmp_path):
    model = TransformersModel.from_pretrained(folder)
    ours = {name: 2 * value for name, value in model.state_dict().items()}
    hub = {name: 2 * value for name, value in load_reference(folder).state_dict().items()}
    for number, state_dict in enumerate((ours, hub)):
        model.save_pretrained(tmp_path / str(number), state_dict=state_dict)
        saved = ligermodels.load(tmp_path / str(number)).state_dict()
        assert all(torch.equal(saved[name], ours[name]) for name in ours)
    del ours["model.norm.weight"]
    with pytest.raises(InputError, match=r"state_dict has no model\.norm\.weight"):
        model.save_pretrained(tmp_path / "incomplete", state_dict=ours)


def test_fields_passed_to_from_pretrained_change_the_model(folder):
    model = TransformersModel.from_pretrained(folder, rms_norm_eps=0.5)
    reference = load_reference(folder)
    assert model.bare.config.rms_norm_eps == model.config.rms_norm_eps == 0.5
    reference.config.rms_norm_eps = 0.5
    other = type(reference)(reference.config)
    other.load_state_dict(reference.state_dict())
    torch.testing.assert_close(model(IDS).logits, other.eval()(IDS).logits, rtol=1e-4, atol=1e-4)


def test_register_models_serves_the_auto_class(folder):
    register()
    try:
        for model in (
            AutoModelForCausalLM.from_pretrained(
                folder, dtype="bfloat16", device_map={"": "cpu"}, trust_remote_code=True
            ),
            AutoModelForCausalLM.from_config(TransformersModel.from_pretrained(folder).config, dtype=torch.bfloat16),
        ):
            assert isinstance(model, TransformersModel) and model.dtype == torch.bfloat16
    finally:
        unregister()
    assert not isinstance(AutoModelForCausalLM.from_pretrained(folder), TransformersModel)


@pytest.mark.parametrize(
    "argument",
    [
        {"device_map": {"model": 0, "lm_head": 1}},
        {"device_map": "balanced"},
        {"quantization_config": {"load_in_4bit": True}},
        {"attn_implementation": "eager"},
        {"subfolder": "other"},
        {"gguf_file": "model.gguf"},
        {"dtype": "floating"},
        {"no_such_field": 1},
    ],
)
def test_arguments_that_would_have_no_effect_are_refused(argument, folder):
    with pytest.raises(InputError, match=next(iter(argument))) as error:
        TransformersModel.from_pretrained(folder, **argument)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("argument", [{"push_to_hub": True}, {"variant": "fp16"}, {"safe_serialization": 0.5}])
def test_arguments_of_saving_that_would_have_no_effect_are_refused(argument, folder, tmp_path):
    with pytest.raises(InputError, match=next(iter(argument))):
        TransformersModel.from_pretrained(folder).save_pretrained(tmp_path, **argument)


def test_reentrant_or_offloaded_checkpointing_is_refused(folder):
    model = TransformersModel.from_pretrained(folder)
    for options in ({"activation_checkpointing_kwargs": {"use_reentrant": True}}, {"offload": True}):
        with pytest.raises(ValueError, match="activation checkpointing"):
            model.activation_checkpointing_enable(**options)
    model.activation_checkpointing_enable(every_n_layers=2)
    assert [block.activation_checkpointing for block in model.model.layers] == [True, False, True]
    model.activation_checkpointing_disable()
    assert not model.is_activation_checkpointing
