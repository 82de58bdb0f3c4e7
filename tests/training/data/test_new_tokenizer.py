import json

import pytest
import torch
from tokenizers import Tokenizer as LibraryTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

import ligermodels
from ligermodels.architectures import ARCHITECTURES
from ligermodels.errors import InputError
from ligermodels.hub.models import read_preset_or_config
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data.embedded_stories import conversations, vocabulary_texts
from ligermodels.training.data.reader import read_tokenizer_and_end
from ligermodels.training.data.run_tokenizer import SPECIAL_IDS, SPECIAL_TOKENS, save_tokenizer, train_tokenizer
from ligermodels.training.planning.model import take_special_ids
from ligermodels.verify import reference
from ligermodels.verify.round_trip import TEXTS, text_checks

# transformers builds the tokenizer of a family by a class of its own: one family of each class.
FAMILY_OF_CLASS = {
    TOKENIZER_MAPPING_NAMES.get(name): name for name, architecture in ARCHITECTURES.items() if architecture.SIZES
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(vocabulary_texts(), 1024)


def test_the_embedded_corpus_gives_1024_entries_whose_first_three_are_special(tokenizer):
    assert tokenizer.vocab_size == 1024
    assert [tokenizer.tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert tokenizer.special_ids == {0, 1, 2}
    assert train_tokenizer(vocabulary_texts(), 1024).tokenizer.to_str() == tokenizer.tokenizer.to_str()


def test_a_text_begins_with_the_end_of_text_token_and_each_digit_is_a_token(tokenizer):
    ids = tokenizer.encode("Ada hat 12 Äpfel.")
    assert ids[0] == 0
    assert tokenizer.decode(ids) == "Ada hat 12 Äpfel."
    assert tokenizer.encode("A\u0308pfel") == tokenizer.encode("Äpfel")
    pieces = [tokenizer.tokenizer.id_to_token(index) for index in tokenizer.encode(" 7 + 15 = 22.")]
    assert pieces == ["<|endoftext|>", *["Ġ", "7", "Ġ+", "Ġ", "1", "5", "Ġ=", "Ġ", "2", "2", "."]]


@pytest.mark.parametrize("name", FAMILY_OF_CLASS.values())
def test_transformers_gives_the_same_ids_for_the_folder_of_every_kind_of_family(name, tokenizer, tmp_path):
    """For Qwen 2, transformers builds its own tokenizer and takes only vocabulary and merges from the folder."""
    ligermodels.export(ligermodels.create(name, size="tiny"), tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    checks = text_checks(tmp_path)
    assert [check.passed for check in checks] == [True, True], checks
    theirs = reference.load_reference_tokenizer(tmp_path)
    for messages in conversations(seed=3, count=4):
        ids, mask = tokenizer.apply_chat_template_with_mask(messages)
        read = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert (read["input_ids"], [bool(flag) for flag in read["assistant_masks"]]) == (ids, mask)
        assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    assert theirs.eos_token_id == theirs.pad_token_id == 0


def test_the_assistant_mask_covers_the_assistants_messages_and_the_end_of_its_turns(tokenizer):
    for messages in conversations(seed=4, count=10):
        ids, mask = tokenizer.apply_chat_template_with_mask(messages)
        supervised = tokenizer.decode([i for i, flag in zip(ids, mask, strict=True) if flag], skip_special_tokens=False)
        assert supervised == "".join(f"{m['content']}<|im_end|>" for m in messages if m["role"] == "assistant")


@pytest.mark.parametrize("given", ["tools", "tool_calls"])
def test_tools_which_the_template_would_drop_are_refused(given, tokenizer):
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    answer = {"role": "assistant", "content": "12"} | ({"tool_calls": [call]} if given == "tool_calls" else {})
    tools = [{"type": "function", "function": {"name": "add"}}] if given == "tools" else None
    with pytest.raises(InputError, match="this chat template does not support tool"):
        tokenizer.apply_chat_template([{"role": "user", "content": "5 + 7?"}, answer], tools=tools)


def test_a_tokenizer_that_cannot_be_written_raises_the_os_error_which_callers_explain(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError):
        save_tokenizer(tokenizer, tmp_path / "none")


def test_a_saved_tokenizer_is_read_back_unchanged_and_generation_stops_after_a_text_or_turn(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    read = Tokenizer.from_folder(tmp_path)
    assert read.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert (read.named, read.special_ids) == (tokenizer.named, tokenizer.special_ids)
    assert read.chat_template == tokenizer.chat_template
    library = LibraryTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert library.to_str() == tokenizer.tokenizer.to_str()
    ids = {"bos_token_id": 0, "eos_token_id": [0, 2], "pad_token_id": 0}
    assert json.loads((tmp_path / "generation_config.json").read_text()) == ids


def test_transformers_stops_where_ours_does_also_by_config_json_alone(tokenizer, tmp_path):
    """A preset may name the special tokens of its own tokenizer, and a row that is never trained for padding."""
    raw, _ = read_preset_or_config("phi3", "tiny")
    raw |= {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 7}
    model, prompt = ligermodels.create(raw).eval(), [3, 4]
    (free,) = ligermodels.generate(model, [prompt], max_new_tokens=4, stop_tokens=())
    with torch.no_grad():
        model.lm_head.weight[2] = 1.01 * model.lm_head.weight[free[3]]  # <|im_end|> is then the fourth token
    take_special_ids(model)
    ligermodels.export(model, tmp_path / "out", also=lambda folder: save_tokenizer(tokenizer, folder))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert {name: config[name] for name in SPECIAL_IDS} == {
        "bos_token_id": 0, "eos_token_id": [0, 2], "pad_token_id": None,
    }  # fmt: skip
    for _ in range(2):
        (ours,) = ligermodels.generate(ligermodels.load(tmp_path / "out"), [prompt], max_new_tokens=8)
        theirs = reference.load_reference_model(tmp_path / "out", torch.float32, "cpu")
        row = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0]
        assert row.tolist() == prompt + ours and ours[-1] == 2 and len(ours) <= 4
        (tmp_path / "out/generation_config.json").unlink(missing_ok=True)


def test_the_row_of_every_token_is_trained_when_a_preset_names_one_for_padding(tokenizer):
    raw, _ = read_preset_or_config("phi3", "tiny")
    model = ligermodels.create(raw | {"pad_token_id": 7})
    take_special_ids(model)
    ids = torch.tensor([[7, 8, 9]])
    model(ids, labels=ids).loss.backward()
    assert model.model.embed_tokens.weight.grad[7].abs().sum() > 0


def test_the_end_of_text_token_comes_from_config_json_then_generation_config_json_or_raises(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    config = tmp_path / "config.json"
    config.write_text('{"eos_token_id": 5}')
    assert read_tokenizer_and_end(tmp_path)[1] == 5
    config.write_text("{}")
    assert read_tokenizer_and_end(tmp_path)[1] == 0
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json: eos_token_id is missing"):
        read_tokenizer_and_end(tmp_path)
