"""Gemma 4: keys and values that later layers read, per-layer embeddings, towers and tensors that are kept."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.errors import InputError
from ligermodels.generation import Engine
from ligermodels.generation.kv_cache import KVCache
from ligermodels.generation.paged_cache import PAGE_SIZE
from ligermodels.memory.model import inference_memory
from tests.cases import CASES
from tests.conftest import DEVICE
from tests.reference_model import save_reference, tokens

pytestmark = pytest.mark.filterwarnings("ignore:the text is longer than")
RAW = CASES["gemma4_text"]


def build(raw=RAW):
    return ligermodels.create(raw, device=DEVICE).double()


def test_layers_read_the_last_layer_of_their_type_that_has_keys_of_its_own():
    model = ligermodels.create(RAW, device="meta")
    assert [layer.self_attn.source for layer in model.model.layers] == [None, None, None, 2, 2, 1]
    assert [layer.self_attn.window for layer in model.model.layers] == [5, None, 5, 5, 5, None]
    assert [layer.self_attn.head_dim for layer in model.model.layers] == [6, 8, 6, 6, 6, 8]


@pytest.mark.parametrize("count", [None, 2, 4], ids=["all blocks", "sources", "sources and a reader"])
def test_activation_checkpointing_changes_no_gradient(count):
    """Of blocks whose keys others read, of readers, and of both."""
    gradients, ids = [], tokens(RAW).to(DEVICE)
    for checkpointing in (False, True):
        model = build()
        if checkpointing:
            model.checkpoint_activations(count)
        model(ids, ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_the_gradients_of_all_readers_reach_the_keys():
    """Without the readers' output projections, the source's own attention alone trains its keys."""
    ids, gradients = tokens(RAW).to(DEVICE), []
    for readers in (True, False):
        model = build()
        if not readers:
            for index in (3, 4):
                torch.nn.init.zeros_(model.model.layers[index].self_attn.o_proj.weight)
        model(ids, ids).loss.backward()
        gradients.append(model.model.layers[2].self_attn.k_norm.weight.grad)
    assert (gradients[0] - gradients[1]).norm() > 0.1 * gradients[0].norm()


@torch.no_grad()
def test_tokens_fed_in_pieces_give_the_logits_of_one_pass():
    model, rows = build().eval(), tokens(RAW, 2, 20).to(DEVICE)
    cache = KVCache(model.kept_by_layers(), 2, 20, rows.device)
    logits = [model(piece, cache=cache).logits for piece in rows.split([9, 1, 10], 1)]
    torch.testing.assert_close(torch.cat(logits, 1), model(rows).logits)


@torch.no_grad()
def test_layers_without_keys_of_their_own_take_no_memory_of_the_cache():
    model = build().eval()
    engine = Engine(model, max_tokens=4 * PAGE_SIZE, max_length=2 * PAGE_SIZE, max_rows=2)
    engine.submit(range(5, 70), max_new_tokens=4)
    next(engine.run())
    layers = engine.cache.layers
    assert all(bool(layer.stored) == (index <= 2) for index, layer in enumerate(layers))
    held = sum(x.nbytes for layer in layers[:3] for x in layer.stored)
    assert inference_memory(model, 2, 2 * PAGE_SIZE, torch.float64).cache == held


def test_embeddings_without_token_ids_are_refused():
    model = build()
    with pytest.raises(ValueError, match="per-layer embeddings need input_ids"):
        model(inputs_embeds=model.get_input_embeddings()(tokens(RAW).to(DEVICE)))


def test_towers_and_unused_keys_are_kept_and_written_back(tmp_path):
    raw = CASES["gemma4"]
    save_reference(raw, tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    text = "model.language_model.layers"
    more = {
        "model.vision_tower.encoder.layers.0.mlp.linear.weight": torch.randn(3, 4).bfloat16(),
        "model.audio_tower.layers.0.conv.weight": torch.randn(2, 1, 3),
        "model.embed_vision.embedding_projection.weight": torch.randn(4, 2),
        "model.embed_audio.embedding_projection.weight": torch.randn(4, 2),
        f"{text}.4.self_attn.k_proj.weight": torch.randn(12, 48),
        f"{text}.5.self_attn.v_proj.weight": torch.randn(16, 48),
        f"{text}.3.self_attn.k_norm.weight": torch.randn(6),
    }
    stored = load_file(file) | more
    save_file(stored, file, {"format": "pt"})
    model = ligermodels.load(tmp_path / "in")
    assert set(model.kept) == set(more) and not any("tower" in name for name in model.state_dict())
    ligermodels.export(model, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == stored.keys() and all(torch.equal(written[name], stored[name]) for name in stored)
    save_file(stored | {f"{text}.2.self_attn.extra.weight": torch.ones(1)}, file, {"format": "pt"})
    with pytest.raises(InputError, match="1 unexpected"):
        ligermodels.load(tmp_path / "in")
    del stored[f"{text}.1.layer_scalar"]
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"1 missing: model\.language_model\.layers\.1\.layer_scalar"):
        ligermodels.load(tmp_path / "in")


def test_the_sizes_of_large_heads_are_read_in_the_spelling_of_transformers_5():
    raw = RAW | {"attention_k_eq_v": True, "num_global_key_value_heads": 3}
    config = ligermodels.create(raw, device="meta").config
    of_layers = {key: value for key, value in raw.items() if "global" not in key}
    sizes = {"head_dim": 8, "num_key_value_heads": 3}
    spelled = ligermodels.create(of_layers | {"per_layer_config": {"1": sizes, "5": sizes}}, device="meta").config
    assert spelled == config and "per_layer_config" in spelled.raw


def test_a_new_model_scales_no_layer():
    model = ligermodels.create(RAW, device="meta").to_empty(device=DEVICE)
    for buffer in model.stored_buffers().values():
        buffer.fill_(torch.nan)
    model.initialize(0)
    assert {buffer.item() for buffer in model.stored_buffers().values()} == {1.0}
    moe = ligermodels.create(CASES["gemma4_text-moe"]).model.layers[0].moe
    assert moe.gate.per_expert_weight.eq(1).all() and moe.gate.norm.weight.eq(1).all()


def test_lora_and_its_merged_export_agree(tmp_path):
    raw = CASES["gemma4_text-moe-layer-inputs"]
    save_reference(raw, tmp_path / "in")
    model = ligermodels.load(tmp_path / "in")
    ligermodels.add_lora(model, rank=3, targets=["all-linear", "experts"])
    adapted = [name for name, _ in model.named_parameters() if "lora_B" in name]
    assert any("layers.3.self_attn.q_proj" in name for name in adapted)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.2)
    expected = model(tokens(raw)).logits
    ligermodels.export_adapter(model, tmp_path / "adapter")
    other = ligermodels.load(tmp_path / "in")
    ligermodels.load_adapter(other, tmp_path / "adapter")
    assert torch.equal(other(tokens(raw)).logits, expected)
    ligermodels.export(model, tmp_path / "merged")
    merged = ligermodels.load(tmp_path / "merged")
    torch.testing.assert_close(merged(tokens(raw)).logits, expected, rtol=1e-4, atol=1e-3)
