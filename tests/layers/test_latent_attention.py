"""Latent attention: what its caches hold and read, adapters of the projection that decoding absorbs, FP8 files."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.generation import Engine
from ligermodels.generation.kv_cache import KVCache
from ligermodels.generation.paged_cache import PAGE_SIZE
from ligermodels.layers.latent_attention import LatentAttention
from ligermodels.memory.model import inference_memory
from tests.cases import CASES
from tests.conftest import DEVICE
from tests.reference_model import reference_model, tokens

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of the trained length; PEFT's
RAW = CASES["deepseek_v3"]
WIDTH = RAW["kv_lora_rank"] + RAW["qk_rope_head_dim"]


def build(name="deepseek_v3"):
    model = ligermodels.create(CASES[name], device=DEVICE).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # sharp attention
    return model


def check_generation(model):
    """Greedy tokens of the engine are those of full forwards."""
    engine = Engine(model, max_tokens=1024, max_rows=2)
    prompt = tokens(RAW, 1, 70)[0].tolist()
    engine.submit(prompt, max_new_tokens=6, stop_tokens=())
    (sample,) = engine
    row = torch.tensor([[*prompt, *sample.ids]], device=DEVICE)
    with torch.no_grad():
        assert sample.ids == model(row).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    return sample.ids


@torch.no_grad()
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3-no-query-latent", "glm4_moe_lite"])
def test_tokens_fed_in_pieces_to_rows_of_any_length_give_the_logits_of_one_pass(name):
    model, rows = build(name), tokens(CASES[name], 2, 20).to(DEVICE)
    cache = KVCache(model.kept_by_layers(), 2, 20, rows.device)
    first = model(rows[:, :9], cache=cache).logits
    cache.lengths[1] = 5  # the second row goes back to its fifth token
    rest = torch.stack([rows[0, 9:18], rows[1, 5:14]])
    second = model(rest, cache=cache).logits
    expected = model(rows).logits
    torch.testing.assert_close(first, expected[:, :9])
    torch.testing.assert_close(second[0], expected[0, 9:18])
    torch.testing.assert_close(second[1], expected[1, 5:14])


@torch.no_grad()
def test_caches_hold_a_latent_and_a_rotated_key_for_each_token():
    model = build()
    rows = tokens(RAW, 2, 7).to(DEVICE)
    cache = KVCache(model.kept_by_layers(), 2, 7, rows.device)
    model(rows, cache=cache)
    engine = Engine(model, max_tokens=4 * PAGE_SIZE, max_length=2 * PAGE_SIZE, max_rows=2)
    engine.submit(range(5, 70), max_new_tokens=4)
    next(engine.run())
    for plain, paged in zip(cache.layers, engine.cache.layers, strict=True):
        assert [x.shape for x in plain.stored] == [(2, 7, 1, WIDTH), (2, 7, 1, 0)]
        assert [x.shape for x in paged.stored] == [(5 * PAGE_SIZE, 1, WIDTH), (5 * PAGE_SIZE, 1, 0)]
    held = sum(x.nbytes for layer in engine.cache.layers for x in layer.stored)
    assert inference_memory(model, 2, 2 * PAGE_SIZE, torch.float64).cache == held


def test_only_prefill_computes_keys_and_values(monkeypatch):
    calls = []
    expand = LatentAttention.expand
    monkeypatch.setattr(LatentAttention, "expand", lambda *args: (calls.append(args[1].shape[1]), expand(*args))[1])
    model = build()
    check_generation(model)
    assert calls == [70] * model.config.num_hidden_layers


def test_lora_of_the_absorbed_projection_acts_in_decoding():
    model = build()
    plain = check_generation(model)
    ligermodels.add_lora(model, rank=4, targets=["kv_b_proj", "kv_a_proj_with_mqa"], dropout=0.5)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    assert check_generation(model.eval()) != plain


def test_an_adapter_of_peft_on_the_absorbed_projection_acts_in_decoding():
    model = build()
    plain = check_generation(model)
    config = peft.LoraConfig(target_modules=["kv_b_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    assert check_generation(peft.get_peft_model(model, config).eval()) != plain


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3-no-query-latent"])
def test_activation_checkpointing_changes_no_gradient(name):
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = ligermodels.create(CASES[name], device=DEVICE).double()
        if checkpointing:
            model.checkpoint_activations()
        ids = tokens(CASES[name]).to(DEVICE)
        model(ids, ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_fp8_blocks_that_end_within_a_packed_projection_are_read_and_written_back(tmp_path):
    """Blocks of 16: q_a_proj has 20 rows, kv_a_proj_with_mqa 22, behind them in one parameter. With an MTP layer."""
    raw = RAW | {"dtype": "bfloat16"}
    reference_model(raw, torch.bfloat16).save_pretrained(tmp_path / "in")
    stored, values = load_file(tmp_path / "in" / "model.safetensors"), {}
    stored |= {
        "model.layers.3.eh_proj.weight": torch.randn(5, 7),
        "model.layers.3.self_attn.o_proj.weight": torch.ones(4),
    }
    for name in [name for name in stored if name.endswith(("_proj.weight", "_mqa.weight")) and ".3." not in name]:
        rows, columns = stored[name].shape
        scale = torch.rand(-(-rows // 16), -(-columns // 16)) + 0.5
        of_element = scale[torch.arange(rows)[:, None] // 16, torch.arange(columns) // 16]
        codes = (stored[name].float() / of_element).to(torch.float8_e4m3fn)
        values[name] = (codes.float() * of_element).bfloat16()
        stored |= {name: codes, f"{name}_scale_inv": scale}
    save_file(stored, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    (tmp_path / "in" / "config.json").write_text(json.dumps(raw | {"quantization_config": fp8}))
    model = ligermodels.load(tmp_path / "in")
    attention = model.model.layers[1].self_attn
    hub = "model.layers.1.self_attn."
    packed = torch.cat([values[f"{hub}q_a_proj.weight"], values[f"{hub}kv_a_proj_with_mqa.weight"]])
    assert torch.equal(attention.qkv_a_proj.weight, packed)
    assert torch.equal(attention.kv_b_proj.weight, values[f"{hub}kv_b_proj.weight"])
    ligermodels.export(model, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(x.view(torch.uint8), stored[name].view(torch.uint8)) for name, x in written.items())
