"""`ligermodels verify`: a valid checkpoint gets its certificate, and each check detects its kind of fault."""

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils import logging

from ligermodels import hub
from ligermodels.cli import main
from ligermodels.generation.rows import DecodeLayer
from ligermodels.tokenizer import Tokenizer
from ligermodels.verify import parity, reference, round_trip
from ligermodels.verify.certificate import BAR, Check, as_picture, file_name, parts_of_allowed
from ligermodels.weights.files import tensor_hashes
from tests.cases import CASES
from tests.reference_model import save_reference
from tests.tokenizer.folders import FORMS

ARITHMETIC = ["fp32 logits", "fp32 loss", "fp32 gradients", "bf16 logits", "bf16 gradients", "greedy tokens"]
TRIP = ["tensors after a round trip", "config.json after a round trip", "other files after a round trip"]
TEXT = ["token ids", "chat template"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Qwen2 with biases, tied embeddings and a tokenizer."""
    folder = tmp_path_factory.mktemp("verified") / "model"
    save_reference(CASES["qwen2"] | {"vocab_size": 460, "num_hidden_layers": 2, "tie_word_embeddings": True}, folder)
    tokenizer, config = FORMS["qwen"]()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def verified(folder, tmp_path, capsys):
    """The exit status, the outcome of each check by name, the certificate, and what was printed."""
    status = main(["verify", str(folder), "--output", str(tmp_path), "--device", "cpu", "--tokens", "6"])
    certificate = json.loads((tmp_path / f"{file_name(str(folder))}.json").read_text())
    outcomes = {check["name"]: check["outcome"] for check in certificate["checks"]}
    return status, outcomes, certificate, capsys.readouterr().out


def test_a_valid_checkpoint_passes_and_the_certificate_lists_the_checks(folder, tmp_path, capsys):
    status, outcomes, certificate, out = verified(folder, tmp_path, capsys)
    assert status == 0 and certificate["passed"], out
    assert certificate["scope"] == {"images": "not compared: of text alone"}
    assert out.splitlines()[-2] == "scope    images: not compared: of text alone"
    assert outcomes == dict.fromkeys(ARITHMETIC + TRIP + TEXT, "passed")
    measured = {check["name"]: check.get("measured") for check in certificate["checks"]}
    assert measured["fp32 gradients"].keys() == tensor_hashes(folder).keys()
    assert all(0 < entry["error"] <= entry["allowed"] < 1e-3 for entry in measured["fp32 gradients"].values())
    assert 1e-3 < measured["bf16 logits"]["error"] <= 1.5 * measured["bf16 logits"]["reference"]
    assert measured["greedy tokens"]["ours"] == measured["greedy tokens"]["reference"] != []
    assert measured["tensors after a round trip"] == {"before": tensor_hashes(folder), "after": "the same"}
    assert certificate["torch"] == torch.__version__ and certificate["transformers"] == reference.version()
    page = (tmp_path / f"{file_name(str(folder))}.html").read_text()
    assert page.count('class="passed"') == 1 + len(outcomes) and "http" not in page and "fp32 gradients" in page


def test_certificates_of_different_models_have_different_file_names(tmp_path, monkeypatch):
    for run in ("runs/qwen2", "runs/qwen2-2", "elsewhere"):
        (tmp_path / run / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert file_name("runs/qwen2/model") == file_name(f"{tmp_path}/runs/qwen2/model/") == "runs--qwen2--model"
    assert file_name("runs/qwen2-2/model") == "runs--qwen2-2--model"
    assert file_name("Qwen/Qwen3-0.6B") == "Qwen--Qwen3-0.6B"
    monkeypatch.chdir(tmp_path / "runs/qwen2/model")
    assert file_name("../../../elsewhere/model") == "--".join([*tmp_path.parts[1:], "elsewhere", "model"])
    assert file_name(".") == "--".join([*tmp_path.parts[1:], "runs", "qwen2", "model"])


def test_each_check_detects_its_own_fault(folder, tmp_path, capsys, monkeypatch):
    """Faults in one gradient, the KV cache, bf16 only, the text, and the files other than weights; the rest passes."""
    load, attend, encode, render = hub.load, DecodeLayer.attend, Tokenizer.encode, Tokenizer.render_chat_template
    config_of = round_trip.read_config

    def faulty(folder, dtype=None, **options):
        model = load(folder, dtype=dtype, **options)
        model.model.layers[1].mlp.down_proj.weight.register_hook(lambda gradient: 1.001 * gradient)
        if dtype is torch.bfloat16:
            for layer in model.model.layers:
                layer.mlp.down_proj.weight.data += 0.1 * torch.randn(layer.mlp.down_proj.weight.shape).bfloat16()
        return model

    def stale(self, q, k, v, position_ids, **options):
        return attend(self, -q, k, v, position_ids, **options)

    def changed(folder):
        return config_of(folder) | ({"rms_norm_eps": 0.5} if folder.name == "export" else {})

    def forgetful(source, folder, patterns):
        (folder / "tokenizer_config.json").write_text("{}")

    monkeypatch.setattr(hub, "load", faulty)
    monkeypatch.setattr(DecodeLayer, "attend", stale)
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **options: encode(self, text, **options)[::-1])
    monkeypatch.setattr(Tokenizer, "render_chat_template", lambda *args, **options: render(*args, **options) + " ")
    monkeypatch.setattr(round_trip, "read_config", changed)
    monkeypatch.setattr("ligermodels.weights.exporting.copy_files", forgetful)
    status, outcomes, certificate, out = verified(folder, tmp_path, capsys)
    assert status == 1 and not certificate["passed"]
    passed = {name for name, outcome in outcomes.items() if outcome == "passed"}
    assert passed == {"fp32 logits", "fp32 loss", "tensors after a round trip"}
    (line,) = (line for line in out.splitlines() if line.startswith("failed   fp32 gradients"))
    assert "1 of 26 beyond" in line and "model.layers.1.mlp.down_proj.weight" in line
    assert 'class="failed"' in (tmp_path / f"{file_name(str(folder))}.html").read_text()


def test_ids_are_those_of_tokenizer_json_where_a_class_of_transformers_departs_from_it(tmp_path):
    """GPT2Tokenizer of transformers 5 drops the Digits that SmolLM2's tokenizer.json has."""
    words = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = words, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["a  1   2 "] * 9, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    ids, _ = round_trip.text_checks(tmp_path)
    departs = "; GPT2Tokenizer of transformers departs from tokenizer.json in 1"
    assert ids.passed and ids.result == f"all 6 texts equal{departs}"


def test_libraries_are_quiet_while_a_reference_is_loaded(folder, capfd, recwarn):
    reference.load_reference_tokenizer(folder)
    reference.load_reference_model(folder, torch.float32, "cpu")
    assert capfd.readouterr() == ("", "") and not recwarn.list
    assert logging.is_progress_bar_enabled()


def test_a_weight_that_differs_on_one_side_is_detected(folder, tmp_path, capsys, monkeypatch):
    load = hub.load

    def altered(*args, **options):
        model = load(*args, **options)
        model.model.layers[0].mlp.gate_up_proj.weight.data[3] *= 1.01
        return model

    monkeypatch.setattr(hub, "load", altered)
    status, outcomes, _, out = verified(folder, tmp_path, capsys)
    assert status == 1
    wrong = {name for name, outcome in outcomes.items() if outcome == "failed"}
    assert {"fp32 logits", "fp32 loss", "fp32 gradients", "tensors after a round trip"} <= wrong
    assert not wrong & {*TEXT, "config.json after a round trip"}
    assert "1 differ: model.layers.0.mlp.gate_proj.weight" in out


def test_if_fp64_does_not_fit_the_truth_is_fp32_and_faults_are_still_detected(folder, monkeypatch):
    monkeypatch.setattr(parity, "fits_fp64", lambda *args: False)
    assert [check.passed for check in parity.parity_checks(folder, "cpu", 4)] == 6 * [True]
    load = hub.load

    def off(*args, **options):
        model = load(*args, **options)
        model.model.layers[0].self_attn.scale *= 1.001
        return model

    monkeypatch.setattr(hub, "load", off)
    failed = {check.name for check in parity.parity_checks(folder, "cpu", 4) if check.passed is False}
    assert {"fp32 logits", "fp32 gradients"} <= failed


def test_gradients_of_experts_have_their_hub_names(tmp_path):
    """The reference implementation has other names in memory."""
    save_reference(CASES["mixtral"] | {"num_hidden_layers": 2}, tmp_path)
    checks = {check.name: check for check in parity.parity_checks(tmp_path, "cpu", 2)}
    assert all(check.passed for check in checks.values())
    gradients = checks["fp32 gradients"].measured
    assert gradients.keys() == tensor_hashes(tmp_path).keys()
    assert "model.layers.1.block_sparse_moe.experts.2.w3.weight" in gradients


@pytest.mark.parametrize(
    "name", ["qwen2_vl", "qwen3_vl", "gemma3", "llava", "idefics3", "pixtral", "mllama", "paligemma"]
)
def test_models_with_images_are_compared_on_images(name, tmp_path, monkeypatch):
    """Gradients of all tensors but those that vanish; a break of the image side fails.

    Rows of a tile see all rows nearly alike, where gradients of scores cancel, in torch's flash attention more.
    """
    save_reference(CASES[name], tmp_path)
    with sdpa_kernel(SDPBackend.MATH) if name == "mllama" else nullcontext():
        checks = {check.name: check for check in parity.parity_checks(tmp_path, "cpu", 4)}
    assert all(check.passed for check in checks.values()), checks
    compared = {key.replace(".vision_model", "") for key in checks["fp32 gradients"].measured}
    model = hub.load(tmp_path)
    computed = tensor_hashes(tmp_path).keys() - model.kept_of(tensor_hashes(tmp_path))
    left_out = {key.replace(".vision_model", "") for key in computed} - compared
    assert {key.rpartition(".self_attn.")[2] for key in left_out} <= {"k_proj.bias"}
    load = hub.load

    def swapped(*args, **options):
        model = load(*args, **options)
        patches = getattr(model.visual, "patch_embed", None) or model.visual.patch_embedding
        patches.weight.data = patches.weight.data.flip(-1)
        return model

    monkeypatch.setattr(hub, "load", swapped)
    failed = {check.name for check in parity.parity_checks(tmp_path, "cpu", 4) if check.passed is False}
    assert {"fp32 logits", "fp32 loss", "fp32 gradients"} <= failed


PIXELS = "compared on random pixels, an image a row; its image processor was not compared"
TILED = "with model.as_transformers = True, as transformers computes; it is not the default"
SCOPES = {
    "mllama": {"images": PIXELS, "computation": TILED},
    "qwen2_vl": {"images": f"{PIXELS}; videos were not compared"},
}


@pytest.mark.parametrize("name", SCOPES)
def test_a_certificate_says_what_was_compared_of_images(name, tmp_path, capsys):
    save_reference(CASES[name], tmp_path / "model")
    with sdpa_kernel(SDPBackend.MATH):
        _, _, certificate, out = verified(tmp_path / "model", tmp_path / "out", capsys)
    page = (tmp_path / "out" / f"{file_name(str(tmp_path / 'model'))}.html").read_text()
    assert certificate["scope"] == SCOPES[name]
    for subject, line in SCOPES[name].items():
        assert f"scope    {subject}: {line}\n" in out and f"<tr><th>{subject}<td>{line}" in page


def test_without_transformers_or_a_checkpoint_no_certificate_is_written(folder, tmp_path, capsys, monkeypatch):
    def refused(model):
        assert main(["verify", str(model), "--output", str(tmp_path / "out"), "--device", "cpu"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and not (tmp_path / "out").exists()
        return error

    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(tmp_path / "empty")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'transformers" in refused(folder)


@pytest.mark.parametrize("scheme", ["nf4", "fp8"])
def test_of_a_checkpoint_in_few_bits_the_dequantised_weights_are_verified(scheme, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 1}
    save_reference(CASES["llama"] | sizes, Path("original"))
    hub.export(hub.load("original", quantize=scheme), "bits")
    capsys.readouterr()
    assert main(["verify", "bits", "--device", "cpu"]) == 2
    advice = "ligermodels export bits dense --dtype bfloat16"
    assert capsys.readouterr().err == (
        f"ligermodels: verify: bits is in {scheme.upper()}, in which transformers computes no gradients; verify its "
        f"dequantised weights: {advice}\n"
    )
    with pytest.warns(UserWarning, match="dequantised") if scheme == "nf4" else nullcontext():
        assert not main(advice.split()[1:])
    status, outcomes, *_ = verified("dense", tmp_path, capsys)
    assert status == 0 and "failed" not in outcomes.values()


def test_the_page_draws_errors_as_parts_of_what_is_allowed():
    checks = [
        Check("fp32 logits", True, "", "", {"error": 1e-7, "allowed": 1e-6}),
        Check(
            "fp32 gradients", False, "", "", {"a": {"error": 1.0, "allowed": 4.0}, "b": {"error": 3.0, "allowed": 2.0}}
        ),
        Check("<b>", False, "", "", {"error": float("nan"), "allowed": 1.0}),
        Check("bf16 logits", True, "", "", {"error": 0.0, "allowed": 0.0}),
        Check("greedy tokens", True, "", "", {"ours": [1], "reference": [1]}),
    ]
    parts = parts_of_allowed(checks)
    assert parts == {"fp32 logits": pytest.approx(0.1), "fp32 gradients": 1.5, "<b>": float("inf"), "bf16 logits": 0}
    picture = as_picture(parts)
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', picture)]
    assert widths == [pytest.approx(BAR / 2), pytest.approx(BAR * (3 + 0.1761) / 4, abs=0.1), BAR, 2]
    assert "&lt;b&gt;" in picture and "<b>" not in picture
