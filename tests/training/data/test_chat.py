"""The tokens of texts, completions and conversations, and which of them are supervised."""

import json
import re
import unicodedata

import pytest
import tokenizers

from ligermodels.errors import InputError
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data import chat
from ligermodels.training.data.chat import tokenize_records
from ligermodels.training.data.formats import records, text_files
from ligermodels.training.data.formats.records import BadLines, Completion, Conversation, Text
from ligermodels.training.data.rows.store import Document
from tests.tokenizer.chat_templates import CHAT_TEMPLATES
from tests.tokenizer.folders import FORMS, TEXTS, write_folder
from tests.training.data.source_files import read, read_counting

END = 7
SYSTEM = {"role": "system", "content": "You are terse."}
ASKED, ASKED_AGAIN = {"role": "user", "content": "What is the weather?"}, {"role": "user", "content": "\nIn Paris? "}
SAID, SAID_AGAIN = {"role": "assistant", "content": "It's 21 degrees."}, {"role": "assistant", "content": "Yes, Paris."}
TURNS = [ASKED, SAID, ASKED_AGAIN, SAID_AGAIN]


def tokenizer_of(folder, family, **template):
    form, source = CHAT_TEMPLATES[family]
    return Tokenizer.from_folder(write_folder(folder, form, template.get("source", source)))


def conversation(*messages, line=1, tools=None):
    return Conversation(list(messages), tools, f"d.jsonl:{line}")


def documents_of(tokenizer, *records, allowed=0):
    return list(tokenize_records(records, tokenizer, END, BadLines(allowed)))


def supervised_texts(tokenizer, document):
    """The text of each run of supervised tokens."""
    runs, inside = [], False
    for token, flag in zip(document.ids, document.supervised, strict=True):
        if flag:
            runs = runs if inside else [*runs, []]
            runs[-1].append(token)
        inside = flag
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


# family -> the end of an answer: before another turn, and at the end of the conversation
ENDS = {
    "llama 2": (" </s>", " </s>"),
    "llama 3": ("<|eot_id|>", "<|eot_id|>"),
    "llama 3.1": ("<|eot_id|>", "<|eot_id|>"),
    "mistral 1": ("</s>", "</s>"),
    "mistral 3": ("<|end|>", "<|end|>"),
    "qwen 2": ("<|im_end|>", "<|im_end|>"),
    "qwen 2.5": ("<|im_end|>", "<|im_end|>"),
    "gemma 2": ("<end_of_turn>", "<end_of_turn>"),
    "gemma 3": ("<end_of_turn>", "<end_of_turn>"),
    "phi 3": ("<|end|>", "<|end|> \n<|end|>"),  # the template writes eos_token at the end, which is <|end|> here
    "phi 4 mini": ("<|end|>", "<|end|><|eot_id|>"),
    "granite": ("<|im_end|>", "<|im_end|>"),
    "olmo 2": ("<|eot_id|>", "<|eot_id|>"),
    "ernie 4.5": ("<|end_of_text|>", "<|end_of_text|>"),
}
NO_SYSTEM, ALL_TURNS_CHANGE_WITH_SYSTEM = {"mistral 1", "gemma 2"}, {"mistral 3"}


@pytest.mark.parametrize("family", ENDS)
def test_every_answer_is_supervised_together_with_the_token_that_ends_it(tmp_path, family):
    tokenizer = tokenizer_of(tmp_path, family)
    within, at_end = ENDS[family]
    system = [] if family in NO_SYSTEM | ALL_TURNS_CHANGE_WITH_SYSTEM else [SYSTEM]
    for messages in ([*system, *TURNS], TURNS, TURNS[:2], [*TURNS, ASKED]):
        (document,) = documents_of(tokenizer, conversation(*messages))
        assert document.ids == tokenizer.apply_chat_template(messages)
        assert document.place == "d.jsonl:1"
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        last = at_end if messages[-1]["role"] == "assistant" else within
        expected = [f"{text}{within}" for text in answers[:-1]] + [f"{answers[-1]}{last}"]
        assert supervised_texts(tokenizer, document) == expected


def test_an_answer_without_an_end_token_ends_with_the_next_turns_token_or_the_end_of_text(tmp_path):
    form, source = CHAT_TEMPLATES["glm 4"]
    folder = write_folder(tmp_path, form, source, additional_special_tokens=["<|user|>", "<|system|>"])
    tokenizer = Tokenizer.from_folder(folder)
    (document,) = documents_of(tokenizer, conversation(*TURNS))
    assert document.ids == [*tokenizer.apply_chat_template(TURNS), END]
    end = tokenizer.decode([END], skip_special_tokens=False)
    assert supervised_texts(tokenizer, document) == ["\nIt's 21 degrees.<|user|>", f"\nYes, Paris.{end}"]
    assert document.supervised[-1]
    (open_end,) = documents_of(tokenizer, conversation(*TURNS, ASKED))
    assert open_end.ids == tokenizer.apply_chat_template([*TURNS, ASKED])
    assert supervised_texts(tokenizer, open_end)[1] == "\nYes, Paris.<|user|>"


CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
TOOL = {"type": "function", "function": {"name": "get_weather"}}
CALLED = [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "21"}, SAID]


@pytest.mark.parametrize(
    ("chat", "tools", "field"),
    [([ASKED, SAID], [TOOL], "tools"), ([ASKED, CALLED[1] | {"content": ""}], None, "messages[1].tool_calls")],
)
def test_tools_that_a_template_passes_over_are_refused(tmp_path, chat, tools, field):
    tokenizer = tokenizer_of(tmp_path, "gemma 2")
    with pytest.raises(InputError) as refused:
        documents_of(tokenizer, conversation(*chat, tools=tools))
    problem = f"d.jsonl:1: field {field}: the chat template does not write 'get_weather'"
    assert str(refused.value).startswith(f"{problem}; use one with tools, or remove the field")


def test_tool_calls_are_supervised_and_tool_results_are_not(tmp_path):
    tokenizer = tokenizer_of(tmp_path, "qwen 2.5")
    (document,) = documents_of(tokenizer, conversation(*CALLED, tools=[TOOL]))
    assert document.ids == tokenizer.apply_chat_template(CALLED, tools=[TOOL])
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
    assert supervised_texts(tokenizer, document) == [call, "It's 21 degrees.<|im_end|>"]


CONCATENATING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for call in m.tool_calls or [] %}"
    "{{ call.function.name + call.function.arguments }}{% endfor %}{{ m.content or '' }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def called_with(arguments):
    call = CALL | {"function": {"name": "get_weather", "arguments": arguments}}
    return [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, *CALLED[2:]]


@pytest.mark.parametrize("arguments", ['{"city":"Paris"}', "[1]", "3", "null", "{bad", "Paris, please"])
def test_a_template_that_concatenates_the_arguments_of_a_call_gets_them_as_they_were_written(tmp_path, arguments):
    tokenizer = tokenizer_of(tmp_path / "model", "qwen 2", source=CONCATENATING)
    turns = called_with(arguments)
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": turns}))
    (document,) = documents_of(tokenizer, *read(tmp_path / "d.jsonl"))
    assert document.ids == tokenizer.apply_chat_template(turns)
    answers = [f"get_weather{arguments}<|im_end|>", "It's 21 degrees.<|im_end|>"]
    assert supervised_texts(tokenizer, document) == answers


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ("x=1", "is a string that is not JSON: Expecting value"),
        ("[" + "[]," * 2**21 + "0]", "is a string of more than 2,000,000 JSON values"),
    ],
    ids=["not JSON", "too many values"],
)
def test_a_template_that_takes_objects_refuses_arguments_that_cannot_be_decoded(tmp_path, arguments, fault):
    tokenizer = tokenizer_of(tmp_path / "model", "qwen 2.5")
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": called_with(arguments)}))
    place = re.escape(f"{tmp_path / 'd.jsonl'}:1: field messages[1].tool_calls[0].function.arguments {fault}")
    with pytest.raises(InputError, match=f"^{place}"):
        documents_of(tokenizer, *read(tmp_path / "d.jsonl"))


def test_generation_blocks_of_a_template_define_what_is_supervised(tmp_path):
    tokenizer = tokenizer_of(tmp_path / "a", "smollm 3")
    (document,) = documents_of(tokenizer, conversation(SYSTEM, *TURNS))
    assert (document.ids, document.supervised) == tokenizer.apply_chat_template_with_mask([SYSTEM, *TURNS])
    answers = [f"<|im_start|>assistant\n{message['content']}<|im_end|>\n" for message in (SAID, SAID_AGAIN)]
    assert supervised_texts(tokenizer, document) == answers
    # The same if earlier turns change (here the numbers), and if the blocks leave out the token that ends the answer.
    source = (
        "{% for m in messages %}{{ loop.revindex }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    )
    tokenizer = tokenizer_of(tmp_path / "b", "qwen 2", source=source)
    (document,) = documents_of(tokenizer, conversation(*TURNS))
    assert document.ids == tokenizer.apply_chat_template(TURNS)
    assert supervised_texts(tokenizer, document) == [SAID["content"], SAID_AGAIN["content"]]


def test_an_answer_of_weight_zero_is_context_only(tmp_path):
    tokenizer = tokenizer_of(tmp_path / "a", "glm 4")
    (first,) = documents_of(
        tokenizer, conversation(ASKED, SAID | {"weight": 0}, ASKED_AGAIN, SAID_AGAIN | {"weight": 1})
    )
    (last,) = documents_of(tokenizer, conversation(*TURNS[:3], SAID_AGAIN | {"weight": 0}))
    assert first.ids == [*tokenizer.apply_chat_template(TURNS), END]
    assert last.ids == tokenizer.apply_chat_template(TURNS)
    assert supervised_texts(tokenizer, last) == [f"\n{SAID['content']}"]
    assert supervised_texts(tokenizer, first)[0].startswith(f"\n{SAID_AGAIN['content']}")
    with pytest.raises(
        InputError, match=r"d\.jsonl:1: field messages: no assistant message with a weight other than 0"
    ):
        documents_of(tokenizer, conversation(ASKED, SAID | {"weight": 0}))
    marked = tokenizer_of(tmp_path / "b", "smollm 3")
    (last,) = documents_of(marked, conversation(*TURNS[:3], SAID_AGAIN | {"weight": 0}))
    assert supervised_texts(marked, last) == [f"<|im_start|>assistant\n{SAID['content']}<|im_end|>\n"]
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}a{% endgeneration %}"
    marked = tokenizer_of(tmp_path / "c", "qwen 2", source=source)
    with pytest.raises(
        InputError, match=r"d\.jsonl:1: .*a weight of 0 needs a chat template with one {% generation %} block per ans"
    ):
        documents_of(marked, conversation(*TURNS[:3], SAID_AGAIN | {"weight": 0}))


THINK = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt's 21 degrees."}


def test_an_answer_that_the_template_changes_when_more_turns_follow_gets_its_own_document(tmp_path):
    """Its context is that of generation: Qwen 3 drops earlier reasoning and adds an empty one to the last answer."""
    tokenizer = tokenizer_of(tmp_path / "qwen", "qwen 3")
    first, last = documents_of(tokenizer, conversation(ASKED, THINK, ASKED_AGAIN, SAID_AGAIN, line=4))
    (alone,) = documents_of(tokenizer, conversation(ASKED, THINK, line=4))
    assert first == alone and supervised_texts(tokenizer, alone) == [f"{THINK['content']}<|im_end|>"]
    assert supervised_texts(tokenizer, last) == ["<think>\n\n</think>\n\nYes, Paris.<|im_end|>"]
    whole = tokenizer.decode(last.ids, skip_special_tokens=False)
    assert "It's 21 degrees.<|im_end|>" in whole and "hm" not in whole


OPENING = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user: {{ m.content }}{% else %}<|im_start|>assistant: "
    "BEGIN{{ 'WRITTEN' + m.content.split('</think>')[-1] }}<|im_end|>END{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: PROMPT{% endif %}"
)


@pytest.mark.parametrize(
    ("prompt", "written"),
    [("<think>\n", ""), ("<think>\n\n</think>\n\n", ""), ("<think>", "</think>"), ("[THINK]", "[/THINK]")],
    ids=["DeepSeek R1", "an empty thought", "GLM 4.7", "Magistral"],
)
def test_an_answer_begins_where_it_parts_from_a_generation_prompt_that_opens_a_thought(tmp_path, prompt, written):
    """The same tokens are supervised as with marks around what the template writes for an answer."""
    source = OPENING.replace("PROMPT", prompt).replace("WRITTEN", written)
    marked = source.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")
    plain = source.replace("BEGIN", "").replace("END", "")
    for number, chat_of in enumerate(([ASKED, THINK], TURNS, [ASKED, THINK, ASKED_AGAIN, SAID_AGAIN])):
        exact, found = (
            documents_of(tokenizer_of(tmp_path / f"{kind}{number}", "qwen 2", source=template), conversation(*chat_of))
            for kind, template in (("marked", marked), ("plain", plain))
        )
        assert found == exact and sum(found[0].supervised) > 5


def test_a_template_that_changes_the_question_of_an_answer_is_refused_naming_line_and_template(tmp_path):
    """The template writes a system message into the last question, but not into earlier ones."""
    tokenizer = tokenizer_of(tmp_path, "mistral 3")
    with pytest.raises(InputError) as refused:
        documents_of(tokenizer, conversation(SYSTEM, *TURNS, line=4))
    file = tmp_path / "tokenizer_config.json"
    assert str(refused.value).startswith(f"d.jsonl:4: {file}: field chat_template: the text up to messages[2] changes")
    assert "to 'What is the weather?[/INST] It'" in str(refused.value) and "from 'You are terse." in str(refused.value)
    assert "{% generation %} … {% endgeneration %}" in str(refused.value)


@pytest.mark.parametrize(
    ("messages", "source", "complaint"),
    [
        (
            [SYSTEM, ASKED],
            None,
            "field messages: no assistant message with a weight other than 0: nothing",
        ),
        ([SAID, ASKED], None, r"field messages\[0\].role is 'assistant'; .* before an answer: add the user's"),
        (TURNS, "{{ messages[0].content }}", r"field messages\[1\]: the chat template writes nothing for it"),
        (TURNS, "{% generation %}{% endgeneration %}{{ 'a' }}", "no token is supervised, because the assistant says"),
        (TURNS, "{{ raise_exception('no\nway') }}", r"tokenizer_config.json: field chat_template, line 1: no"),
        (TURNS, "{{ messages | length }}{{ add_generation_prompt }}", r"the text up to messages\[1\] changes"),
    ],
)
def test_a_conversation_without_a_usable_answer_is_an_error_and_counts_as_a_bad_line(
    tmp_path, messages, source, complaint
):
    tokenizer = tokenizer_of(tmp_path, "qwen 2", **({"source": source} if source else {}))
    with pytest.raises(InputError, match=rf"^d\.jsonl:3: .*{complaint}"):
        documents_of(tokenizer, conversation(*messages, line=3))
    bad = BadLines(1)
    assert list(tokenize_records([Text("a", "x"), conversation(*messages)], tokenizer, END, bad))[1:] == []
    assert bad.skipped == 1


def test_a_missing_chat_template_is_an_error_that_allow_bad_lines_does_not_skip(tmp_path):
    tokenizer = tokenizer_of(tmp_path, "qwen 2", source=None)
    with pytest.raises(
        InputError,
        match=rf"^d\.jsonl:1: {tmp_path} has no chat template for messages; use --chat-template chatml, or tulu,",
    ):
        documents_of(tokenizer, conversation(*TURNS), allowed=9)


def test_a_text_begins_as_the_tokenizer_begins_one_and_ends_with_the_end_of_text_token(tmp_path):
    tokenizer = tokenizer_of(tmp_path, "llama 3")
    texts = [Text(text, f"d.jsonl:{line}") for line, text in enumerate(TEXTS)]
    assert documents_of(tokenizer, *texts) == [
        Document([tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False), END], None, place)
        for text, place, _, _ in texts
    ]


def test_an_end_of_text_token_that_the_tokenizer_adds_itself_is_not_added_twice(tmp_path):
    tokenizer = tokenizer_of(tmp_path, "llama 3")
    ids = tokenizer.encode("a b")
    tokenizer.tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "$A <|eot_id|>", special_tokens=[("<|eot_id|>", tokenizer.eos_token_id)]
    )
    (document,) = tokenize_records([Text("a b", "")], tokenizer, tokenizer.eos_token_id, BadLines(0))
    assert document.ids == [*ids[1:], tokenizer.eos_token_id]
    pieces = [Text("a b\n", "", last=False), Text("c", "", before="a b\n")]
    first, second = tokenize_records(pieces, tokenizer, tokenizer.eos_token_id, BadLines(0))
    whole = tokenizer.encode("a b\nc", add_special_tokens=False)
    assert [*first.ids, *second.ids[1:]] == [*whole, tokenizer.eos_token_id]


@pytest.mark.parametrize("form", FORMS)
def test_a_text_that_begins_with_bos_gets_no_second_one(tmp_path, form):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, form))
    bos = tokenizer.bos_token or tokenizer.eos_token
    text = f"{bos}In Paris? Yes."
    ids = [*tokenizer.encode(text, add_special_tokens=False), END]
    (whole,) = documents_of(tokenizer, Text(text, ""))
    (completion,) = documents_of(tokenizer, Completion(text[:-5], text[-5:], ""))
    assert whole.ids == completion.ids == ids
    answer = [token for token, due in zip(completion.ids, completion.supervised, strict=True) if due]
    assert tokenizer.decode(answer[:-1]).strip() == "Yes."
    assert tokenizer.encode_prompt(text) == ids[:-1]
    assert tokenizer.encode_prompt("In Paris?") == tokenizer.encode("In Paris?")


@pytest.mark.parametrize("form", FORMS)
def test_completion_only_loss_supervises_the_completion_and_the_end_of_text_token(tmp_path, form):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, form))
    prompt, answer = "The cafe\u0301 in Paris asks: what is the weather", " today?\n\nIt's 21 degrees."
    (document,) = documents_of(tokenizer, Completion(prompt, answer, "d.jsonl:1"))
    assert document.ids == [*tokenizer.encode(prompt + answer), END] and document.place == "d.jsonl:1"
    first = document.supervised.index(True)
    assert all(document.supervised[first:])
    before, after = (tokenizer.decode(ids).strip() for ids in (document.ids[:first], document.ids[first:-1]))
    assert unicodedata.normalize("NFC", before) == unicodedata.normalize("NFC", prompt) and after == answer.strip()


def test_a_token_of_both_prompt_and_completion_is_supervised_and_the_end_of_text_is_added_once(tmp_path):
    tokenizer = tokenizer_of(tmp_path, "llama 3")
    assert len(tokenizer.encode(" Paris", add_special_tokens=False)) == 1
    (document,) = documents_of(tokenizer, Completion("in Par", "is", "d.jsonl:1"))
    assert supervised_texts(tokenizer, document)[0].startswith(" Paris")
    assert document.supervised == [False] * (len(document.ids) - 2) + [True, True]
    tokenizer.tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "$A <|eot_id|>", special_tokens=[("<|eot_id|>", tokenizer.eos_token_id)]
    )
    (ended,) = tokenize_records([Completion("in Par", "is", "")], tokenizer, tokenizer.eos_token_id, BadLines(0))
    assert ended.ids == [*document.ids[1:-1], tokenizer.eos_token_id]
    assert ended.supervised == document.supervised[1:]


@pytest.mark.parametrize("form", FORMS)
def test_the_pieces_of_a_long_text_have_the_tokens_of_the_whole_text_each_a_target_once(tmp_path, monkeypatch, form):
    monkeypatch.setattr(text_files, "PIECE_CHARACTERS", 200)
    monkeypatch.setattr(records, "TOKENIZATION_RECORDS", 3)
    lines = [line for text in TEXTS for line in text.split("\n") if "-" not in line]  # "\n-" is a token of these forms
    text = "".join(f"{line}{'  ' * (n % 3)}\n{chr(10) * (n % 2)}" for n, line in enumerate(lines * 9))
    text += " ".join(lines * 3)  # a line longer than a piece
    (tmp_path / "a.txt").write_text(text)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path / form, form))
    pieces = documents_of(tokenizer, *read(tmp_path / "a.txt"))
    assert len(pieces) > 10
    joined = pieces[0].ids
    for piece in pieces[1:]:
        assert piece.ids[0] == joined[-1] and piece.supervised is None
        joined = joined + piece.ids[1:]
    assert joined == [*tokenizer.encode(text), END]


def test_a_split_within_a_token_loses_no_text(tmp_path):
    tokenizer = tokenizer_of(tmp_path, "llama 3")
    whole, parts = " Paris", [Text(" Par", "", last=False), Text("is", "", before=" Par")]
    assert len(tokenizer.encode(whole, add_special_tokens=False)) == 1
    first, second = documents_of(tokenizer, *parts)
    assert tokenizer.decode([*first.ids, *second.ids[1:-1]]) == whole


def test_records_of_all_kinds_keep_their_order_for_any_batch_size(tmp_path, monkeypatch):
    tokenizer = tokenizer_of(tmp_path, "qwen 2")
    lines = [
        (
            Text(TEXTS[line % 4], f"d.jsonl:{line}")
            if line % 5 < 3
            else conversation(ASKED, SAID, line=line)
            if line % 2
            else Completion("a", TEXTS[line % 4], f"d.jsonl:{line}")
        )
        for line in range(40)
    ]
    expected = documents_of(tokenizer, *lines)
    assert [document.place for document in expected] == [f"d.jsonl:{line}" for line in range(40)]
    monkeypatch.setattr(records, "TOKENIZATION_RECORDS", 2)
    assert documents_of(tokenizer, *lines) == expected
    monkeypatch.setattr(records, "TOKENIZATION_CHARACTERS", 100)
    assert documents_of(tokenizer, *lines) == expected


def test_records_are_tokenised_as_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "TOKENIZATION_RECORDS", 4)
    tokenizer = tokenizer_of(tmp_path, "qwen 2")
    taken = []
    texts = (taken.append(line) or Text("a b", f"{line}") for line in range(1000))
    next(tokenize_records(texts, tokenizer, END, BadLines(0)))
    assert len(taken) == 5  # the last did not fit into the batch


def test_a_conversation_that_would_be_rendered_for_too_many_answers_is_a_bad_line(tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "MAX_RENDERED_ANSWERS", 1)
    tokenizer, long, short = tokenizer_of(tmp_path, "qwen 2"), conversation(*TURNS), conversation(ASKED, SAID, line=2)
    with pytest.raises(InputError, match=r"^d.jsonl:1: field messages: has 2 answers, more than 1; split it, or mark"):
        documents_of(tokenizer, long)
    assert [document.place for document in documents_of(tokenizer, long, short, allowed=1)] == ["d.jsonl:2"]


def test_a_long_record_is_a_batch_of_its_own(monkeypatch):
    monkeypatch.setattr(records, "TOKENIZATION_CHARACTERS", 10)
    batches = list(records.record_batches(Text("x" * size, "a") for size in (4, 6, 1, 30, 10, 2)))
    assert [[len(text.text) for text in batch] for batch in batches] == [[4, 6], [1], [30], [10], [2]]


def test_a_file_becomes_token_ids_and_masks(tmp_path):
    tokenizer = tokenizer_of(tmp_path / "model", "qwen 2")
    file = tmp_path / "a.jsonl"
    file.write_text(
        "\n".join(json.dumps(line) for line in ({"messages": TURNS}, {"text": "It's"}, {"messages": TURNS[:2]}))
    )
    bad = BadLines(0)
    turns, text, turn = tokenize_records(read_counting(file, bad), tokenizer, END, bad)
    assert (turns.place, text.place, turn.place) == (f"{file}:1", f"{file}:2", f"{file}:3")
    assert supervised_texts(tokenizer, turns)[:1] == supervised_texts(tokenizer, turn) == ["It's 21 degrees.<|im_end|>"]
    assert text.supervised is None


def test_only_later_pieces_of_a_text_are_encoded_with_the_text_before_them(tmp_path, monkeypatch):
    tokenizer = tokenizer_of(tmp_path, "qwen 2")
    batches = []
    encode = tokenizer.encode_batch
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: batches.append(list(texts)) or encode(texts))
    texts = [Text("one", ""), Text("two\n", "", last=False), Text("three", "", "two\n"), Text("four", "")]
    assert len(documents_of(tokenizer, *texts)) == 4
    assert batches == [["two\n"], ["one", "two\n", "two\nthree", "four"]]
