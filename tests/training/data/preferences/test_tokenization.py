"""The border between prompt and completions, end tokens, and what happens to groups that are too long."""

import pytest

from ligermodels.errors import InputError
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data.formats.records import BadLines, Completion, GroupRecord, TeacherRecord
from ligermodels.training.data.preferences.store import GroupOptions
from ligermodels.training.data.preferences.tokenization import GroupTokenizer, Side, common_border
from tests.tokenizer.chat_templates import CHAT_TEMPLATES
from tests.tokenizer.folders import write_folder

END = 7
SYSTEM = {"role": "system", "content": "You are terse."}
ASKED, SAID = {"role": "user", "content": "What is the weather?"}, {"role": "assistant", "content": "It's 21 degrees."}
ASKED_AGAIN = {"role": "user", "content": "In Paris?"}
YES, NO = {"role": "assistant", "content": "Yes, Paris."}, {"role": "assistant", "content": "No, Rome."}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return tokenizer_of(tmp_path_factory.mktemp("qwen"), "qwen 2.5")


def tokenizer_of(folder, family):
    form, source = CHAT_TEMPLATES[family]
    return Tokenizer.from_folder(write_folder(folder, form, source))


def test_a_prompt_that_begins_with_bos_gets_no_second_one(tmp_path):
    tokenizer = tokenizer_of(tmp_path, "llama 3")
    written, added = (
        grouped(tokenizer, GroupRecord(f"{bos}In Paris?", (" Yes.", " No."), "")) for bos in (tokenizer.bos_token, "")
    )
    assert written == added and written[0][0].prompt.count(tokenizer.bos_token_id) == 1


def grouped(tokenizer, *records, allowed=0, **options):
    """The groups, and the counts of lengths."""
    grouping = GroupTokenizer(tokenizer, END, GroupOptions(**options), BadLines(allowed))
    return list(grouping.groups(records)), grouping.lengths


def pair(prompt, chosen, rejected):
    return GroupRecord(prompt, (chosen, rejected), "d:1")


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_strings_are_tokenised_together_and_end_with_the_end_token_once(qwen):
    [group], _ = grouped(qwen, pair("What is", " the weather?", " the price?" + qwen.tokenizer.id_to_token(END)))
    prompt = qwen.encode("What is")
    assert group.prompt == prompt
    assert [[*prompt, *ids] for ids in group.completions] == [
        [*qwen.encode("What is the weather?"), END], [*qwen.encode("What is the price?"), END],
    ]  # fmt: skip
    assert [all(mask) and len(mask) == len(ids) for mask, ids in zip(group.supervised, group.completions, strict=True)]


def test_a_token_over_the_border_is_supervised_on_both_sides():
    """Ids 5 6 | 7 and 5 | 8: the second side's first token has characters of the prompt."""
    assert common_border([Side([5, 6, 7], [False, False, True]), Side([5, 8], [False, True])]) == 1
    assert common_border([Side([5, 6, 7], [False, False, True]), Side([5, 6, 9], [False, False, True])]) == 2
    assert common_border([Side([5, 6], [False, True])]) == 1


@pytest.mark.parametrize("family", ["qwen 2.5", "llama 3", "gemma 3", "llama 2"])
def test_chats_have_the_prompt_with_the_generation_prompt_and_each_side_whole(tmp_path, family):
    tokenizer = tokenizer_of(tmp_path, family)
    prompt = [SYSTEM, ASKED, SAID, ASKED_AGAIN]
    [group], _ = grouped(tokenizer, pair(prompt, [YES], [NO]))
    assert group.prompt == tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
    for ids, mask, answer in zip(group.completions, group.supervised, (YES, NO), strict=True):
        assert [*group.prompt, *ids] == tokenizer.apply_chat_template([*prompt, answer])
        said = [token for token, flag in zip(ids, mask, strict=True) if flag]
        assert decoded(tokenizer, said).strip().startswith(answer["content"]) and mask[0]
    [alone], _ = grouped(tokenizer, GroupRecord(prompt, (), "d:1", columns={"answer": 1}), kind="prompts")
    assert (alone.prompt, alone.text, alone.columns) == (group.prompt, prompt, {"answer": 1})


def test_variables_of_the_template_are_used(tmp_path):
    source = "{{ mode }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + (
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "qwen", source))
    record = GroupRecord([ASKED], ([YES], [NO]), "d:1", template_kwargs={"mode": "fast"})
    [group], _ = grouped(tokenizer, record)
    assert decoded(tokenizer, group.prompt).startswith("fast<|im_start|>user")


def test_a_long_prompt_loses_its_middle_but_not_its_system_message(qwen):
    prompt = [SYSTEM, ASKED, SAID, ASKED_AGAIN]
    [whole], _ = grouped(qwen, pair(prompt, [YES], [NO]))
    system, limit = qwen.apply_chat_template([SYSTEM]), len(whole.prompt) - 4
    [cut], lengths = grouped(qwen, pair(prompt, [YES], [NO]), max_prompt_length=limit)
    assert decoded(qwen, cut.prompt).startswith(decoded(qwen, system).strip()) and len(cut.prompt) == limit
    assert cut.prompt[-4:] == whole.prompt[-4:] and cut.completions == whole.completions
    assert (lengths.cut_prompts, lengths.dropped) == (1, 0)
    with pytest.raises(InputError, match="--max-prompt-length 3: a system message has"):
        grouped(qwen, pair(prompt, [YES], [NO]), max_prompt_length=3)


def test_a_long_text_keeps_the_token_that_begins_it(tmp_path):
    tokenizer = tokenizer_of(tmp_path, "llama 2")
    record = pair("What is the weather in Paris today", " good", " bad")
    [whole], _ = grouped(tokenizer, record)
    [cut], _ = grouped(tokenizer, record, max_prompt_length=4)
    assert whole.prompt[0] == tokenizer.bos_token_id
    assert cut.prompt == [tokenizer.bos_token_id, *whole.prompt[-3:]]


def test_groups_that_are_too_long_are_dropped_or_cut_and_counted(qwen):
    record = pair("What is", " the weather in Paris?", " it?")
    [whole], _ = grouped(qwen, record)
    size = len(whole.prompt) + len(whole.completions[0])
    assert grouped(qwen, record, max_length=size)[0] == [whole]
    none, lengths = grouped(qwen, record, max_length=size - 1)
    assert none == [] and lengths.dropped == 1
    [cut], lengths = grouped(qwen, record, max_length=size - 1, too_long="cut")
    assert cut.completions == [whole.completions[0][:-1], whole.completions[1]] and lengths.cut_completions == 1
    same = pair("What is", " the weather in Paris?", " the weather in Rome?")
    none, lengths = grouped(qwen, same, max_length=len(whole.prompt) + 2, too_long="cut")
    assert none == [] and lengths.dropped == 1  # nothing that differs is left


def test_bad_groups_name_their_place_and_count_as_bad_lines(qwen, tmp_path):
    user = {"role": "user", "content": "x"}
    bad, good = pair([ASKED], [YES | {"weight": 0}], [NO]), pair([user], [YES], [NO])
    with pytest.raises(InputError, match="d:1: field messages: no assistant message"):
        grouped(qwen, bad, good)
    assert len(grouped(qwen, bad, good, allowed=1)[0]) == 1
    plain = Tokenizer.from_folder(write_folder(tmp_path, "qwen", None))
    with pytest.raises(InputError, match="no chat template for messages; use --chat-template"):
        grouped(plain, good)
    with pytest.raises(InputError, match="no token comes before the completions"):
        grouped(qwen, pair("W", "hat is", "e are"))


def test_a_teacher_has_a_row_for_each_supervised_token(qwen):
    record = Completion("What is", " the weather?", "d:1")
    rows = len(qwen.encode("What is the weather?")) - len(qwen.encode("What is")) + 1
    teacher = [[1, 2]] * rows, [[-1.0, -2.0]] * rows
    [group], _ = grouped(qwen, TeacherRecord(record, *teacher), kind="distillation")
    assert group.prompt == qwen.encode("What is") and len(group.teacher_ids) == rows == sum(group.supervised[0])
    with pytest.raises(InputError, match=f"has {rows - 1} rows, but the record has {rows} supervised tokens"):
        grouped(qwen, TeacherRecord(record, *(x[1:] for x in teacher)), kind="distillation")
