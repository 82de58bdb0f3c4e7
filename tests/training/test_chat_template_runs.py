"""A base model without a chat template learns chats by --chat-template, and its export ends an answer by itself."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import ligermodels
from ligermodels.cli import main
from ligermodels.errors import InputError
from ligermodels.tokenizer import Tokenizer
from ligermodels.training import TrainConfig, plan, train
from tests.tokenizer.folders import write_folder

QUESTION, ANSWER = {"role": "user", "content": "Paris?"}, {"role": "assistant", "content": "It's 21 degrees."}
PROMPT = (
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nParis?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """The settings of a run on chats from a tiny Llama, whose eos_token_id is <|end_of_text|> alone."""
    root = tmp_path_factory.mktemp("base")
    tokenizer = Tokenizer.from_folder(write_folder(root / "tokenizer", "llama3"))
    end = tokenizer.tokenizer.token_to_id("<|end_of_text|>")
    raw = ligermodels.create("llama", size="tiny", device="meta").config.raw
    model = ligermodels.create(raw | {"vocab_size": tokenizer.vocab_size, "bos_token_id": None, "eos_token_id": end})
    ligermodels.export(model, root / "model", also=lambda folder: write_folder(folder, "llama3"))
    for name, answer, times in (("chats", ANSWER, 60), ("others", ANSWER | {"content": "Yes, Paris."}, 1)):
        (root / f"{name}.jsonl").write_text((json.dumps({"messages": [QUESTION, answer]}) + "\n") * times)
    data, validation_data = str(root / "chats.jsonl"), str(root / "others.jsonl")
    return {
        "model": str(root / "model"), "data": data, "validation_data": validation_data,
        "sequence_length": 32, "batch_size": 4, "steps": 15, "warmup": 2, "learning_rate": 1e-2,
    }  # fmt: skip


def test_without_a_template_the_error_names_one_that_fits(settings, tmp_path):
    with pytest.raises(InputError, match="has no chat template for messages; use --chat-template llama3, or tulu,"):
        train(TrainConfig(**settings, output=tmp_path / "run"))


def test_an_export_renders_chats_by_the_template_and_stops_at_the_end_of_a_turn(settings, tmp_path, capsys):
    exported = train(TrainConfig(**settings, chat_template="llama3", output=tmp_path / "run")).exported
    ours, theirs = ligermodels.load_tokenizer(exported), AutoTokenizer.from_pretrained(exported)
    for tokenizer in (ours, theirs):
        assert tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, tokenize=False) == PROMPT
    ids = ours.apply_chat_template([QUESTION], add_generation_prompt=True)
    end_of_text, end_of_turn = (ours.tokenizer.token_to_id(text) for text in ("<|end_of_text|>", "<|eot_id|>"))
    assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == [end_of_text, end_of_turn]

    capsys.readouterr()
    assert main(["generate", str(exported), "--chat", "--prompt", "Paris?"]) == 0
    assert capsys.readouterr().out == "It's 21 degrees.\n"
    reference = AutoModelForCausalLM.from_pretrained(exported)
    prompt = theirs(PROMPT, add_special_tokens=False, return_tensors="pt")
    new = reference.generate(**prompt, max_new_tokens=64, do_sample=False)[0, len(ids) :].tolist()
    answer = ours.encode("It's 21 degrees.", add_special_tokens=False)
    assert new == [*answer, end_of_turn]


def test_a_template_that_no_record_uses_is_said(settings, tmp_path, capsys):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f'{{"prompt": "Paris?", "completion": " It\'s {n} degrees."}}\n' for n in range(60)))
    plan(TrainConfig(**settings, chat_template="tulu"))
    assert capsys.readouterr().err == ""
    plan(TrainConfig(**settings | {"data": str(texts), "validation_data": None}, chat_template="tulu"))
    assert capsys.readouterr().err == (
        "warning: --chat-template tulu: no record of --data is a chat; the template is exported, but the model does "
        "not learn it\n"
    )


def test_an_adapter_carries_the_template(settings, tmp_path):
    changes = {"lora_rank": 2, "lora_export": "adapter", "steps": 1, "warmup": 0}
    exported = train(TrainConfig(**settings | changes, chat_template="llama3", output=tmp_path / "run")).exported
    assert exported.name == "adapter"
    tokenizer = ligermodels.load_tokenizer(settings["model"], adapter=exported)
    assert tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, tokenize=False) == PROMPT
    assert tokenizer.eos_token_id in json.loads((exported / "generation_config.json").read_text())["eos_token_id"]
