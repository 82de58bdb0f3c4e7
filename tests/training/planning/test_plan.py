import platform
import re
from types import SimpleNamespace

import pytest
import torch

import ligermodels
from ligermodels.distributed import World
from ligermodels.layers.attention import Attention
from ligermodels.memory.model import training_memory
from ligermodels.training.data.opening import DocumentLengths
from ligermodels.training.parallel.activation_checkpointing import Checkpointing
from ligermodels.training.planning import plan as module
from ligermodels.training.planning.plan import DataSummary, make_plan
from ligermodels.training.reporting.flops import flops_per_token
from ligermodels.training.run.folder import default_folder
from ligermodels.units import memory_size
from tests.training.planning.configs import run_config

CPU = torch.device("cpu")


WHOLE = DocumentLengths(documents=200, longest=256, cut=0, holds_most=240)


def planned(
    *argv, rank=None, rows=1000, passes=None, world=None, validation_rows=10, checkpointed_blocks=0, lengths=WHOLE,
    chosen=(), kept_tensors=0,
):  # fmt: skip
    args = run_config("--model", "llama", *argv)
    model = ligermodels.create("llama", size="tiny", device="meta")
    if rank:
        ligermodels.add_lora(model, rank=rank)
    memory = training_memory(model, 4, args.sequence_length, torch.float32)
    return model, make_plan(
        model, args, world or World(CPU),
        data=DataSummary("my.jsonl", rows, passes or [rows], validation_rows, lengths),
        micro_batch_size=args.micro_batch_size or args.batch_size, tokens_per_step=args.units * args.sequence_length,
        chosen=chosen, checkpointing=Checkpointing(checkpointed_blocks, kept_tensors), memory=memory,
        phases={"train": memory.peak}, facts={},
    )  # fmt: skip


def test_the_first_line_summarises_the_run():
    _, whole = planned("--steps", "500")
    assert whole.line == (
        "llama: 1,049,728 parameters; my.jsonl: 1,000 rows; 500 steps = 2.0 epochs; "
        "1,024 tokens a step = 1 batch of 4 x 256 on 1 x cpu"
    )
    flags = ("--batch-size", "24", "--micro-batch-size", "2")
    _, shared = planned(*flags, rank=4, rows=4000, passes=[1920, 12800], world=World(CPU, 0, 4))
    model = ligermodels.create("llama", size="tiny", device="meta")
    ligermodels.add_lora(model, rank=4)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert shared.line == (
        f"llama: {1_049_728 + trained:,} parameters, {trained:,} of them trained; my.jsonl: 4,000 rows; "
        "800 steps = 10 + 1.5 epochs; "
        "6,144 tokens a step = 3 batches of 2 x 256 on 4 x cpu"
    )
    assert shared.tokens_per_step == 24 * 256
    _, smallest = planned("--steps", "1", "--eval-every", "1", rows=1, validation_rows=1)
    assert "my.jsonl: 1 row; 1 step = 4.0 epochs; " in smallest.line and "1 row, every 1 step\n" in smallest.text()


@pytest.mark.parametrize(
    "model, titled, folder",
    [("llama:8b", "llama:8b", "llama-8b"), ("llama:tiny", "llama", "llama"), ("runs/x/model", "runs/x/model", "x")],
)
def test_a_run_is_named_after_its_model_and_a_size_that_is_not_the_default(model, titled, folder):
    _, whole = planned("--steps", "500", "--model", model)
    assert whole.line.startswith(f"{titled}: ") and whole.text().startswith(f"{titled}\n")
    assert str(default_folder(whole.config.title)) == f"runs/{folder}"


@pytest.mark.parametrize("model, folder", [("x/Smol-1.7B.Q4_1.gguf", "Smol-1.7B.Q4_1"), ("x/Smol-1.7B", "Smol-1.7B")])
def test_a_run_of_a_gguf_file_is_named_without_its_ending(model, folder):
    assert str(default_folder(model)) == f"runs/{folder}"


def test_the_table_has_parameters_data_tokens_compute_and_every_part_of_the_memory():
    model, whole = planned("--steps", "500", validation_rows=11, checkpointed_blocks=3, kept_tensors=5)
    first, *lines = whole.text().splitlines()
    table = {label.strip(): value for label, value in (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines)}
    assert first == "llama"
    assert table["parameters"] == "1,049,728, 131,072 of them embeddings"
    assert table["trained"] == "1,049,728, 100.00%"
    assert (table["data"], table["validation"]) == ("my.jsonl: 1,000 rows", "11 rows, every 200 steps")
    assert table["the run"] == "500 steps = 2.0 epochs, 512,000 tokens"
    assert table["attention"] == "SDPA, one document after the other"
    flops = flops_per_token(model, 256)
    assert table["compute"] == f"{flops:.3g} FLOPs a token, {flops * 512_000:.3g} in all"
    assert (
        table["memory"] == "of a CPU process, not all at the same time, 3 of 4 blocks checkpointed with 5 results kept"
    )
    memory = training_memory(model, 4, 256, torch.float32)
    for part, size in memory.parts.items():
        assert table.get(part) == (memory_size(size) if size else None)
    assert table["peak"] == memory_size(memory.peak)
    assert "warning" not in table


@pytest.mark.parametrize(
    "argv, rows, warning",
    [
        (["--steps", "31"], 1001, "0.12 epochs: --steps 31 does not see all rows; all are seen once by --steps 251"),
        (["--steps", "5000"], 1000, "20 epochs: every row is repeated as often; watch the validation loss"),
        (["--steps", "300", "--warmup", "300"], 1000, "--warmup 300 is all of --steps 300"),
        (
            ["--sequence-length", "513", "--steps", "250"],
            1000,
            "--sequence-length 513 is more than the model's max_position_embeddings, 512",
        ),
        (["--sequence-length", "512", "--steps", "250"], 1000, None),
    ],
)
def test_unlikely_settings_give_warnings(argv, rows, warning):
    _, whole = planned(*argv, rows=rows)
    assert whole.warnings == ([warning] if warning else [])
    assert ("warning" in whole.text()) == bool(warning)
    if warning and "epochs" in warning:
        assert f"= {warning.partition(':')[0]}" in whole.line  # in the same words


@pytest.mark.parametrize(
    "argv, size",
    [
        ([], 4 * 1_049_728),
        (["--dtype", "bfloat16"], 2 * 1_049_728),
        (["--model", "folder", "--lora-rank", "1", "--lora-export", "adapter"], 4 * 1_049_728),  # as if all were LoRA
    ],
)
def test_a_full_disk_gives_a_warning_about_the_export(argv, size, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "computes_in_bfloat16", lambda: True)

    def warnings(free, *more):
        monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        flags = ("--steps", "250", "--checkpoint-every", "0", "--output", f"{tmp_path}/new/run", *argv, *more)
        return planned(*flags)[1].warnings

    needs = f"no room for the export of {memory_size(size)}: {tmp_path} has {memory_size(size - 1)}; make room there"
    assert warnings(size - 1) == [needs]
    assert warnings(size) == warnings(0, "--no-export") == []


@pytest.mark.parametrize(
    "flags, number, exports, said",
    [
        ([], 2, True, "up to 2 checkpoints"),  # by time
        (["--steps", "1", "--warmup", "0"], 1, True, "1 checkpoint"),
        (["--checkpoint-every", "50"], 2, True, "2 checkpoints"),
        (["--checkpoint-every", "50", "--keep-checkpoints", "1", "--no-export"], 2, False, "2 checkpoints"),
        (["--checkpoint-every", "50", "--keep-checkpoints", "9"], 5, True, "5 checkpoints"),
        (["--checkpoint-every", "60", "--keep-checkpoints", "9"], 5, True, "5 checkpoints"),  # with the last
        (["--checkpoint-every", "300"], 1, True, "1 checkpoint"),
        (["--best-checkpoint"], 3, True, "up to 3 checkpoints"),
        (["--best-checkpoint", "--checkpoint-every", "250", "--eval-every", "250"], 2, True, "up to 2 checkpoints"),
    ],
)
def test_a_full_disk_gives_a_warning_about_the_checkpoints(flags, number, exports, said, tmp_path, monkeypatch):
    parameters = 1_049_728
    one, export = 3 * 4 * parameters, 4 * parameters * exports  # a weight and its two moments

    def warnings(free, *more):
        monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        warnings = planned("--steps", "250", *flags, *more)[1].warnings
        return [warning for warning in warnings if "epochs" not in warning]

    least = number * one + export + 1024  # of the moments, 4 bytes a parameter more are the steps
    assert warnings(least) == []
    (warning,) = warnings(number * one + export - 1)
    assert warning.startswith(f"no room for {said} of {memory_size(one)}")
    assert (f" and the export of {memory_size(export)}: " in warning) == exports
    (tmp_path / "train.toml").write_text('model = "llama"')
    (tmp_path / "checkpoints/step-000050").mkdir(parents=True)
    assert warnings(least - one, "--resume", str(tmp_path)) == []
    assert len(warnings(number * one + export - one - 1, "--resume", str(tmp_path))) == 1


@pytest.mark.parametrize(
    "machine, instructions, slow",
    [("x86_64", {"avx512_bf16": False}, True), ("AMD64", {"avx512_bf16": True}, False), ("arm64", {}, True)],
)
def test_bfloat16_gives_a_warning_on_a_cpu_without_bf16_instructions(machine, instructions, slow, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions["avx512_bf16"])
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(module, "device_memory", lambda device: None)
    monkeypatch.setattr(Attention, "implementation", lambda *where: "of a GPU")
    half = ["--steps", "250", "--dtype", "bfloat16"]
    warning = "--dtype bfloat16: this CPU has no bf16 instructions and is many times slower with it; leave it out"
    assert planned(*half)[1].warnings == [warning] * slow
    assert planned("--steps", "250")[1].warnings == planned(*half, world=World(torch.device("cuda")))[1].warnings == []


@pytest.mark.parametrize(
    "flags, slow", [([], True), (["--dtype", "bfloat16"], False), (["--model", "folder", "--lora-rank", "1"], False)]
)
def test_parameters_in_bfloat16_beside_fp32_products_give_a_warning_on_a_cpu(flags, slow, monkeypatch):
    monkeypatch.setattr(module, "computes_in_bfloat16", lambda: True)
    warning = "--param-dtype bfloat16: a CPU converts them to fp32 and back in each step, which is slow; leave it out"
    given = "--steps", "250", "--param-dtype", "bfloat16", *flags
    assert planned(*given)[1].warnings == [warning] * slow


def test_cut_documents_and_chosen_settings_are_shown():
    chosen, cut = "--steps 30: 3 epochs of chats", "--sequence-length 256 and are cut into pieces; 512 holds 99 %"
    _, whole = planned("--steps", "250", lengths=WHOLE._replace(cut=3, holds_most=512), chosen=[chosen])
    assert whole.notes == [f"chosen: {chosen}", f"cut: 3 of 200 documents are longer than {cut} of them whole"]
    assert f"  chosen        {chosen}" in whole.text() and "  cut           3 of 200 documents are" in whole.text()
    assert planned("--steps", "250")[1].notes == []


def test_a_checkpoint_larger_than_the_memory_of_the_host_gives_a_warning(monkeypatch):
    monkeypatch.setattr(module, "device_memory", lambda device: None)
    monkeypatch.setattr(Attention, "implementation", lambda *where: "of a GPU")
    one = 3 * 4 * 1_049_728

    def warnings(host, *flags):
        monkeypatch.setattr(module, "host_memory", lambda: host)
        return planned("--steps", "250", *flags, world=World(torch.device("cuda")))[1].warnings

    copied = (
        f"a checkpoint is copied to host memory first, {memory_size(one)}, but this host has {memory_size(one - 1)}"
    )
    assert warnings(one - 1) == [f"{copied}; --checkpoint-every 0 saves none"]
    assert warnings(one + 1024) == warnings(1, "--checkpoint-every", "0") == []


def test_in_a_mixture_each_source_has_epochs_of_its_own():
    """250 steps take 1,000 rows, as many as there are, but by their weights not each once."""
    _, whole = planned("--steps", "250", passes=[90, 4000])
    assert whole.warnings == [
        "0.25 epochs: --steps 250 does not see all rows; all are seen once by --steps 1000",
        "11 epochs: rows of one source are repeated as often; watch the validation loss",
    ]


def test_a_step_larger_than_the_gpu_gives_a_warning(monkeypatch):
    monkeypatch.setattr(module.Plan, "total", 32 * 2**20)
    _, whole = planned("--steps", "500")
    (warning,) = whole.warnings
    assert warning.startswith(f"{memory_size(whole.memory.peak)} is more than the GPU has; ")
    assert "; use --activation-checkpointing auto, use --lora-rank 16, lower --sequence-length or more ranks" in warning
    assert f"{memory_size(whole.memory.peak)} of 32.0 MiB" in whole.text()
