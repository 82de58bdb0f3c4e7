"""The chat template of a run: where it comes from, the token that ends a turn, and what an export gets."""

import json

import pytest
from transformers import AutoTokenizer

from ligermodels.errors import InputError
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.chat_template import BUILT_IN_TEMPLATES
from ligermodels.training import TrainConfig
from ligermodels.training.data.reader import SourceReader
from ligermodels.training.data.run_tokenizer import (
    GENERATION_CONFIG,
    end_of_turn,
    generation_config,
    train_tokenizer,
    use_template,
    write_tokenizer,
)
from tests.tokenizer.chat_templates import CHAT_TEMPLATES
from tests.tokenizer.folders import write_folder

CHAT = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer.from_folder(write_folder(tmp_path / "base", "llama3", CHAT_TEMPLATES["llama 3.1"][1]))


def test_a_built_in_template_or_that_of_a_file_replaces_those_of_the_tokenizer(tokenizer, tmp_path, capsys):
    use_template(tokenizer, "llama3")
    assert tokenizer.templates.keys() == {"default"} and tokenizer.chat_template == BUILT_IN_TEMPLATES["llama3"]
    file = tmp_path / "own.jinja"
    file.write_text(PLAIN.replace("\n", "<|eot_id|>"))
    use_template(tokenizer, str(file))
    assert tokenizer.render_chat_template(CHAT) == "user: Hi!<|eot_id|>assistant: Hello.<|eot_id|>"
    assert capsys.readouterr().err == ""
    file.write_text(PLAIN)
    use_template(tokenizer, str(file))
    assert capsys.readouterr().err == (
        f"warning: {file}: no special token ends an answer, so generation may run to its limit of tokens\n"
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "chatml",
            "--chat-template chatml: {base} has no token <|im_start|>, <|im_end|>; use --chat-template llama3, or "
            "tulu, zephyr, mistral, llama2 or a Jinja file",
        ),
        (
            "chat_ml",
            "--chat-template chat_ml: is neither a file nor one of chatml, llama3, gemma, granite, phi3, tulu, zephyr, "
            "mistral, llama2; did you mean 'chatml'?",
        ),
        (("a.jinja", "\n{% for m in %}"), "{file}, line 2: is not a Jinja template: Expected an expression, got"),
        (("a.jinja", "Hello"), "{file}: does not write the user's message; it is not a chat template"),
        (("a.json", '{"chat_template": "…"}'), "--chat-template {file}: must be a Jinja file; save the field chat_"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(tokenizer, tmp_path, template, reason):
    name = template
    if isinstance(template, tuple):
        name = str(tmp_path / template[0])
        (tmp_path / template[0]).write_text(template[1])
    with pytest.raises(InputError) as refused:
        use_template(tokenizer, name)
    assert str(refused.value).startswith(reason.format(base=tmp_path / "base", file=name))


def test_a_template_that_does_not_fit_a_new_tokenizer_names_no_folder_of_the_cache():
    config = TrainConfig(model="qwen2", chat_template="llama3")
    with pytest.raises(InputError, match=r"^--chat-template llama3: the new tokenizer has no token <.start_header"):
        SourceReader(["stories"], None, 1024, config, 64)


def test_the_end_of_a_turn_is_the_token_after_an_answer_or_before_the_next_turn(tmp_path):
    ends = {}
    for name, (form, source) in (
        CHAT_TEMPLATES | {"chatml": ("qwen", BUILT_IN_TEMPLATES["chatml"]), "plain": ("llama3", PLAIN)}
    ).items():
        tokenizer = Tokenizer.from_folder(
            write_folder(tmp_path / name, form, source, additional_special_tokens=["<|user|>", "<|end|>"])
        )
        end = end_of_turn(tokenizer)
        ends[name] = None if end is None else tokenizer.tokenizer.id_to_token(end)
    named = ("chatml", "llama 2", "llama 3.1", "mistral 1", "gemma 3", "phi 3", "smollm 3", "glm 4", "plain")
    assert [ends[name] for name in named] == [
        *("<|im_end|>", "</s>", "<|eot_id|>", "</s>", "<end_of_turn>", "<|end|>", "<|im_end|>", "<|user|>", None),
    ]


def test_the_end_of_a_turn_is_added_to_the_stop_tokens(tokenizer):
    eot = tokenizer.eos_token_id
    config = {"bos_token_id": 384, "eos_token_id": 385, "vocab_size": 389}
    wanted = {"bos_token_id": 384, "eos_token_id": [385, eot]}
    assert generation_config(tokenizer, {}, config, chats=True) == wanted
    given = {"eos_token_id": [5], "temperature": 0.6}
    wanted = {"bos_token_id": 384, "eos_token_id": [5, eot], "temperature": 0.6}
    assert generation_config(tokenizer, given, config, chats=True) == wanted
    given = {"eos_token_id": [eot, 5]}
    assert generation_config(tokenizer, given, config, chats=True) == given
    assert generation_config(tokenizer, {"eos_token_id": 5}, config, chats=False) == {"eos_token_id": 5}
    assert generation_config(None, {}, {}, chats=True) == {}


def test_an_export_has_the_template_alone_and_all_else_as_it_was(tmp_path):
    """The written folder is an adapter's, without tokenizer files, or a model's, which has those of its source."""
    base = write_folder(tmp_path / "base", "llama2", "old", model_max_length=10**30, sp_model_kwargs={}, unk_token=None)
    (base / "chat_template.jinja").write_text("old")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("old tools")
    described = json.loads((base / "tokenizer_config.json").read_text())
    for name in ("adapter", "again"):
        folder = tmp_path / "adapter"
        folder.mkdir(exist_ok=True)
        write_tokenizer(folder, base, None, BUILT_IN_TEMPLATES["tulu"], {"eos_token_id": [2]})
        written = json.loads((folder / "tokenizer_config.json").read_text())
        assert written == described | {"chat_template": BUILT_IN_TEMPLATES["tulu"]}, name
        assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
        assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [2]}
        ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
        assert ours.templates.keys() == {"default"}
        text = "<s><|user|>\nHi!\n<|assistant|>\nHello.</s>"
        assert ours.render_chat_template(CHAT) == theirs.apply_chat_template(CHAT, tokenize=False) == text
    write_tokenizer(base, None, None, None, {})
    assert json.loads((base / "tokenizer_config.json").read_text()) == described
    assert not (base / "generation_config.json").exists()


def test_a_new_tokenizer_is_written_with_the_template_of_the_run(tmp_path):
    new = train_tokenizer(["Hi! Hello. " * 20], 300)
    use_template(new, "zephyr")
    config = generation_config(new, GENERATION_CONFIG, {}, chats=True)
    write_tokenizer(tmp_path, None, new, new.chat_template, config)
    text = "<|user|>\nHi!<|endoftext|>\n<|assistant|>\nHello.<|endoftext|>\n"
    for tokenizer in (Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer.apply_chat_template(CHAT, tokenize=False) == text
    assert json.loads((tmp_path / "generation_config.json").read_text()) == GENERATION_CONFIG
