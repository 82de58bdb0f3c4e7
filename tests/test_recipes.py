"""The commands of docs/recipes.md do what the page says, with tiny models in place of the large ones.

Each section runs in a folder of its own that holds what the section says one has. Under the names of the Hub lie tiny
checkpoints, so that the commands run as they are written, except for the values in SMALL and for torchrun, whose
processes come from a server (training/launching.py): two in place of eight, one in place of four. `pip install` is
what continuous integration runs. A command that cannot run here is marked in the page; what it reads is examined.
"""

import importlib
import json
import re
import shutil
import signal
import subprocess

import pytest
import torch
from safetensors.torch import load_file

import ligermodels
from ligermodels.architectures import ARCHITECTURES
from ligermodels.cli import main
from ligermodels.training.objectives import evaluation
from ligermodels.training.reporting.metrics import read_metrics
from tests.interop.folders import export_with_tokenizer, tiny_model
from tests.pages import ROOT, blocks_of, commands_of, ligermodels_arguments, sections

SECTIONS = sections(ROOT / "docs/recipes.md")
FOUR_COMMANDS, ON_A_CPU = "Your own chats, in four commands", "The same on a CPU"
DPO = "Preferences with DPO"
RESUME, LONGER, MEASURE = "Resume on another machine", "Train a finished run longer", "Measure speed and memory"
MAX_FLAGS = 4
MODELS = {
    "Qwen/Qwen3-4B": "qwen3", "Qwen/Qwen3-8B": "qwen3", "Qwen/Qwen3-1.7B": "qwen3", "Qwen/Qwen3-1.7B-Base": "qwen3",
    "meta-llama/Meta-Llama-3-8B": "llama", "Qwen/Qwen3-30B-A3B": "qwen3_moe",
}  # fmt: skip
SMALL = {"--steps": "2", "--batch-size": "4", "--sequence-length": "64"}
VALUES = {  # by section; SMALL elsewhere
    LONGER: {"--batch-size": "4", "--sequence-length": "64"}, DPO: {"--steps": "2", "--pairs": "4"},
}  # fmt: skip
TEXTS = [f"The {n}th story is about a lighthouse with {n} steps, and nobody counts them twice." for n in range(60)]
# What llama.cpp's script reads from config.json for every family. It takes the rest from transformers' configuration.
READ_BY_LLAMA_CPP = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "vocab_size",
}  # fmt: skip
VLLM = json.loads((ROOT / "tests/data/vllm_architectures.json").read_text())

loop = importlib.import_module("ligermodels.training.loop")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny checkpoint of each family, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("models")
    for family in set(MODELS.values()):
        export_with_tokenizer(tiny_model(family), folder / family)
    return folder


class Reader:
    """Runs the commands of a section in `folder`, which holds the models, the texts and the chats of the page.

    values: the flags of a new run that have other values than on the page.
    """

    def __init__(self, folder, models, launch_server, monkeypatch, capsys):
        self.models, self.monkeypatch, self.capsys = models, monkeypatch, capsys
        self.launcher = launch_server.within(folder)
        self.values = SMALL
        self.enter(folder)
        (write_chats,) = (block for block in blocks_of(SECTIONS[FOUR_COMMANDS]) if block.language == "python")
        exec(write_chats.code, {})
        write_texts(folder)

    def enter(self, folder):
        """Makes the folder the working directory, with the models in it."""
        for name, family in MODELS.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(self.models / family)
        self.folder = self.launcher.folder = folder
        self.monkeypatch.chdir(folder)

    def run(self, words):
        """Runs one command, which must succeed; returns what it prints."""
        arguments = ligermodels_arguments(words)
        if words[0] == "torchrun":
            ranks = int(words[words.index("--nproc-per-node") + 1]) // 4
            return self.launcher.succeed(*self.small(arguments)[1:], ranks=ranks).stdout
        if arguments:
            self.capsys.readouterr()
            status = main(self.small(arguments))
            printed = self.capsys.readouterr()
            assert status == 0, printed.err
            return printed.out
        if words[0] == "pip":
            return ""
        return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout

    def small(self, arguments):
        """The arguments of a command, with `values` if it begins a run."""
        words = list(arguments)
        if words[0] == "train" and "--resume" not in words:
            for flag, value in self.values.items():
                if flag in words:
                    words[words.index(flag) + 1] = value
                else:
                    words += [flag, value]
        return words

    def copy(self, words):
        """rsync -a SOURCE … HOST:FOLDER, to a folder that stands for the other machine, and goes there."""
        program, flag, *sources, target = words
        assert (program, flag) == ("rsync", "-a")
        folder = self.folder.parent / "other-machine" / target.partition(":")[2]
        for source in map(self.folder.joinpath, sources):
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, folder / source.name)
        self.enter(folder)


@pytest.fixture
def reader(tmp_path, models, launch_server, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(loop, "draw_curves", lambda *_: None)
    monkeypatch.setattr(evaluation, "SAMPLE_TOKENS", 10)
    sizes = ARCHITECTURES["llama"].SIZES
    monkeypatch.setitem(sizes, "8b", sizes["tiny"])
    (tmp_path / "work").mkdir()
    return Reader(tmp_path / "work", models, launch_server, monkeypatch, capsys)


def write_texts(folder):
    """The text of the page's recipe for continued pretraining: files, lines, and rows of parquet."""
    from pyarrow import parquet, table

    (folder / "texts").mkdir()
    (folder / "web").mkdir()
    (folder / "texts/one.txt").write_text(TEXTS[0])
    records = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    for name in ("texts/more.jsonl", "code.jsonl"):
        (folder / name).write_text(records)
    parquet.write_table(table({"text": TEXTS}), folder / "web/part.parquet")


def section_commands(title):
    """The commands of a section that run here."""
    return [
        words
        for block in blocks_of(SECTIONS[title])
        if block.language == "sh" and block.reason is None
        for words in commands_of(block.code)
    ]


def promised(title):
    """The files and folders that a section names in the paragraph "You get"."""
    paragraphs = [part for part in SECTIONS[title].split("\n\n") if part.startswith("**You get**")]
    assert len(paragraphs) == 1
    return [name for name in re.findall(r"`([^`\s…]+)`", paragraphs[0]) if "/" in name]


def assert_promised(title, folder):
    for name in promised(title):
        assert (folder / name).exists(), f"{title}: promises {name}"


def weights(folder):
    return load_file(folder / "model.safetensors")


def changed(before, after):
    """The names of the tensors that differ between two model folders with the same names."""
    old, new = weights(before), weights(after)
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name].float(), new[name].float())}


def lora_adapter(reader):
    """The adapter that the recipe for LoRA leaves, made in less time: no update of it is zero."""
    model = ligermodels.load("Qwen/Qwen3-8B")
    ligermodels.add_lora(model, rank=16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.02)
    ligermodels.export_adapter(model, reader.folder / "runs/Qwen3-8B/adapter")


def write_pairs(reader):
    pairs = [{"prompt": f"{n} + {n} =", "chosen": f" {2 * n}.", "rejected": f" {2 * n + 1}?"} for n in range(40)]
    (reader.folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))


def check_preferences(folder):
    first, *_ = [record for record in read_metrics(folder / "runs/Qwen3-8B/metrics.jsonl") if "loss" in record]
    assert first["rewards/margins"] == 0


def check_lora(folder):
    settings = json.loads((folder / "runs/Qwen3-8B/adapter/adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA" and settings["r"] == 16


def check_longer(folder):
    """The second command takes as many steps again."""
    records = read_metrics(folder / "runs/Qwen3-1.7B/metrics.jsonl")
    steps = [record["step"] for record in records if "loss" in record]
    once, twice = (record["step"] for record in records if "exported" in record)
    assert steps == list(range(1, twice + 1)) and twice in (2 * once - 1, 2 * once)  # an epoch may end within a step


def check_all_weights(folder):
    base, trained = folder / "Qwen/Qwen3-8B", folder / "runs/Qwen3-8B/model"
    assert changed(base, trained) == weights(base).keys()


def check_experts(folder):
    """LoRA changed all projections of all experts and of attention, and nothing else."""
    base = folder / "Qwen/Qwen3-30B-A3B"
    names = {name for name in weights(base) if "_proj" in name}
    assert changed(base, folder / "runs/Qwen3-30B-A3B/model") == names
    assert any(".experts.0.down_proj" in name for name in names) and any("q_proj" in name for name in names)


def check_llama_cpp(folder):
    """The merged folder has the files and fields from which llama.cpp's script writes a GGUF file."""
    base, merged = folder / "Qwen/Qwen3-8B", folder / "merged"
    assert json.loads((merged / "config.json").read_text()).keys() >= READ_BY_LLAMA_CPP
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (merged / name).read_bytes() == (base / name).read_bytes()
    projections = {name for name in weights(base) if "_proj" in name}
    assert changed(base, merged) >= projections
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights(merged).values())


def check_gguf(folder):
    """The file has the merged weights, each rounded to 8 bits, and the tokenizer."""
    written, merged = ligermodels.load(folder / "model.gguf", dtype="float32"), ligermodels.load(folder / "merged")
    for a, b in zip(written.parameters(), merged.float().parameters(), strict=True):
        assert (a - b).norm() < 0.01 * b.norm()
    tokenizers = [ligermodels.load_tokenizer(folder / name) for name in ("model.gguf", "merged")]
    assert tokenizers[0].encode("How much?") == tokenizers[1].encode("How much?")


def check_vllm(folder):
    """vLLM knows the merged folder's class, the chat template and the adapter's rank and names."""
    (name,) = json.loads((folder / "merged/config.json").read_text())["architectures"]
    assert name in VLLM["own implementation"]
    assert "chat_template" in json.loads((folder / "merged/tokenizer_config.json").read_text())
    adapter = folder / "runs/Qwen3-8B/adapter"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA" and settings["r"] <= 16 and settings["bias"] == "none"
    names = load_file(adapter / "adapter_model.safetensors")
    assert all(re.match(r"base_model\.model\.model\.layers\.\d+\..+_proj\.lora_[AB]\.weight$", name) for name in names)


# What makes what a section says one has, beside models, texts and chats.
WITH_ADAPTER = ("Continue an adapter", "Export to Hugging Face", "Export to GGUF", "Serve with vLLM")
BEFORE = dict.fromkeys(WITH_ADAPTER, lora_adapter) | {DPO: write_pairs}
MERGED = ("Export to GGUF", "Serve with vLLM")  # begin with what "Export to Hugging Face" leaves
CHECKS = {
    "LoRA on one GPU": check_lora, DPO: check_preferences, LONGER: check_longer,
    "Full fine-tuning on eight GPUs": check_all_weights,
    "Mixture of experts: LoRA on the experts": check_experts, "Export to Hugging Face": check_llama_cpp,
    "Export to GGUF": check_gguf, "Serve with vLLM": check_vllm,
}  # fmt: skip
RUN_ALONE = [title for title in SECTIONS if title not in (ON_A_CPU, RESUME)]


@pytest.mark.parametrize("title", RUN_ALONE)
def test_the_commands_of_a_recipe_run_and_leave_what_it_promises(title, reader):
    reader.values = VALUES.get(title, SMALL)
    BEFORE.get(title, lambda _: None)(reader)
    first = section_commands("Export to Hugging Face") if title in MERGED else []
    for words in [*first, *section_commands(title)]:
        printed = reader.run(words)
        assert printed or words[0] == "pip", words
    assert_promised(title, reader.folder)
    CHECKS.get(title, lambda _: None)(reader.folder)


def test_four_commands_lead_from_200_chats_to_the_answer_that_was_taught(reader):
    """They run as they are written."""
    reader.values = {}
    assert len((reader.folder / "chats.jsonl").read_text().splitlines()) == 200
    commands = section_commands(ON_A_CPU)
    assert len(commands) == 4 and commands[0] == ["pip", "install", "-c", "constraints.txt", "-e", "."]
    _, plan, trained, answer = map(reader.run, commands)
    (expected,) = (block.code for block in blocks_of(SECTIONS[ON_A_CPU]) if block.language == "text")
    assert answer == expected == "The lamp costs 12 euros.\n"
    assert "120 steps" in plan and "Saved runs/qwen2/model" in trained
    assert_promised(ON_A_CPU, reader.folder)
    assert right_answers(reader.folder) >= 190


def right_answers(folder):
    """How many of the chats' questions the model answers with the chats' own words."""
    model, tokenizer = (load(folder / "runs/qwen2/model") for load in (ligermodels.load, ligermodels.load_tokenizer))
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines()]
    prompts = [tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True) for chat in chats]
    answers = map(tokenizer.decode, ligermodels.generate(model, prompts, max_new_tokens=24))
    return sum(text == answer["content"] for text, (_, answer) in zip(answers, chats, strict=True))


def test_a_stopped_run_resumes_on_another_machine(reader):
    start, copy, resume, check = section_commands(RESUME)
    reader.values = SMALL | {"--steps": "60"}
    run = reader.launcher.start(*reader.small(ligermodels_arguments(start))[1:], ranks=2)
    run.read_until("step 2/")
    assert run.kill(signal.SIGTERM).wait().status == 143
    reader.copy(copy)
    assert "resumes after step" in reader.run(resume)
    assert len(reader.run(check).splitlines()) == 60
    records = read_metrics(reader.folder / "runs/Qwen3-8B/metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 61))
    assert_promised(RESUME, reader.folder)


@pytest.mark.parametrize("title", [title for title in SECTIONS if title != MEASURE])
def test_no_command_has_more_than_four_flags(title):
    for block in blocks_of(SECTIONS[title]):
        for words in commands_of(block.code) if block.language == "sh" else []:
            assert sum(word.startswith("-") for word in words) <= MAX_FLAGS, words


def test_the_two_recipes_for_a_first_run_have_four_commands():
    for title in (FOUR_COMMANDS, ON_A_CPU):
        assert [words[:2] for words in section_commands(title)] == [
            ["pip", "install"], ["ligermodels", "train"], ["ligermodels", "train"], ["ligermodels", "generate"],
        ]  # fmt: skip
