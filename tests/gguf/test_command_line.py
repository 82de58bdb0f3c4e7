"""GGUF files on the command line: shown, run, trained, and converted in both directions."""

import json
from functools import partial

import pytest
import torch

import ligermodels
from ligermodels.cli import main
from ligermodels.training.data.run_tokenizer import save_tokenizer
from ligermodels.weights.gguf.header import read_gguf_header
from tests.gguf.files import family_model, write_model
from tests.interop.folders import new_tokenizer

Q4_0, Q8_0, F32 = 2, 8, 0


@pytest.fixture
def folder(tmp_path):
    ligermodels.export(family_model("llama"), tmp_path / "model", also=partial(save_tokenizer, new_tokenizer()))
    return tmp_path / "model"


def test_export_writes_the_type_that_is_asked_for_and_says_how_large_the_file_is(folder, tmp_path, capsys):
    file = tmp_path / "out.gguf"
    assert main(["export", str(folder), str(file), "--gguf-type", "q4_0"]) == 0
    assert capsys.readouterr().out.startswith(f"{file}: ")
    tensors = read_gguf_header([file]).tensors
    types = {name: tensors[name].type for name in ("token_embd.weight", "output.weight", "blk.1.ffn_up.weight")}
    assert types == {"token_embd.weight": Q8_0, "output.weight": Q8_0, "blk.1.ffn_up.weight": Q4_0}
    assert {info.type for name, info in tensors.items() if "norm" in name} == {F32}
    decoded, original = ligermodels.load(file, dtype="float32"), ligermodels.load(folder)
    for name, limit in (("model.layers.1.mlp.down_proj.weight", 0.1), ("lm_head.weight", 0.01)):
        a, b = decoded.state_dict()[name], original.state_dict()[name]
        assert 0 < (a - b).norm() / b.norm() < limit


def test_export_reads_a_file_into_a_folder(folder, tmp_path):
    for source, target in ((folder, tmp_path / "a.gguf"), (tmp_path / "a.gguf", tmp_path / "back")):
        assert main(["export", str(source), str(target)]) == 0
    a, b = ligermodels.load(folder), ligermodels.load(tmp_path / "back")
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_an_adapter_is_merged_and_its_base_may_be_a_file(tmp_path):
    file = write_model(family_model("llama"), tmp_path)
    model = ligermodels.load(file)
    ligermodels.add_lora(model, rank=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25 if parameter.requires_grad else 0.0)
    ligermodels.export_adapter(model, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(file)
    for target in ("merged.gguf", "merged"):
        assert main(["export", str(tmp_path / "adapter"), str(tmp_path / target)]) == 0
    a, b = ligermodels.load(tmp_path / "merged.gguf"), ligermodels.load(tmp_path / "merged")
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.lm_head.weight, a.model.embed_tokens.weight)


def test_a_folder_with_one_file_is_shown_and_run(tmp_path, capsys):
    write_model(family_model("llama"), tmp_path)
    assert main(["info", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "model.gguf" in shown and "hidden size 128" in shown
    assert main(["generate", str(tmp_path), "--prompt", "Once", "--max-new-tokens", "3"]) == 0


REFUSED = {
    "a type for a folder": (["out", "--gguf-type", "q8_0"], "--gguf-type q8_0: is for an output that ends with .gguf"),
    "a dtype for a file": (["out.gguf", "--dtype", "float16"], "--dtype is for folders; --gguf-type says how"),
    "shards of a file": (["out.gguf", "--max-shard-size", "1GB"], "--max-shard-size is for folders"),
    "experts that are not there": (
        ["out.gguf", "--gguf-type", "mxfp4"],
        "mxfp4 is for experts, of which",
    ),
    "a file that exists": (["there.gguf"], "exists; export to another file, or overwrite it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_export_refuses(folder, tmp_path, capsys, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.gguf").write_bytes(b"mine")
    arguments, words = REFUSED[name]
    assert main(["export", str(folder), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "there.gguf"]


def test_overwrite_replaces_the_file(folder, tmp_path):
    file = tmp_path / "there.gguf"
    file.write_bytes(b"mine")
    assert main(["export", str(folder), str(file), "--overwrite"]) == 0
    assert file.read_bytes()[:4] == b"GGUF"
    assert [path.name for path in tmp_path.glob("*there*")] == ["there.gguf"]


def test_rows_that_are_no_whole_blocks_get_another_type_and_a_warning(folder, tmp_path):
    with pytest.warns(UserWarning, match=r"of the tensors are in q8_0 instead of tq2_0, which needs rows of"):
        ligermodels.export_gguf(ligermodels.load(folder), tmp_path / "out.gguf", gguf_type="tq2_0")


def test_another_file_is_no_model(tmp_path, capsys):
    (tmp_path / "x.bin").write_bytes(b"")
    assert main(["info", str(tmp_path / "x.bin")]) == 2
    assert "x.bin: is a file; pass the folder that contains it, or a .gguf file" in capsys.readouterr().err


def test_verify_names_what_it_can_compare(folder, tmp_path, capsys):
    file = tmp_path / "a.gguf"
    assert main(["export", str(folder), str(file)]) == 0 and main(["verify", str(file)]) == 2
    told = f"verify: {file} is GGUF; verify the folder that ligermodels export {file} FOLDER makes of it"
    assert told in capsys.readouterr().err
