"""Which records of preference data are read, as what, and which are refused with which remedy."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from ligermodels.errors import InputError
from ligermodels.training.data.formats import sources
from ligermodels.training.data.formats.record_formats import parse_record
from ligermodels.training.data.formats.records import BadLines
from ligermodels.training.data.formats.streams import ReadingProgress
from ligermodels.training.data.preferences.formats import GroupFormats

ASKED, AGAIN = {"role": "user", "content": "2 + 2?"}, {"role": "user", "content": "Sure?"}
GOOD, BAD = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "Answer in one word."}
TOOL = {"type": "function", "function": {"name": "add"}}


def parse(kind, **fields):
    return parse_record(fields, "d:1", GroupFormats(kind))


def read(file, kind):
    return list(sources.read_records(str(file), BadLines(0), ReadingProgress("", None), GroupFormats(kind)))


def test_pairs_are_strings_or_messages():
    pair = parse("pairs", prompt="2 + 2?", chosen=" 4", rejected=" 5", margin=0.5, other=1)
    assert (pair.prompt, pair.completions, pair.value, pair.place) == ("2 + 2?", (" 4", " 5"), 0.5, "d:1")
    pair = parse("pairs", prompt=[ASKED], chosen=[GOOD], rejected=[BAD], tools=[TOOL], chat_template_kwargs={"a": 1})
    assert (pair.prompt, pair.completions) == ([ASKED], ([GOOD], [BAD]))
    assert (pair.tools, pair.template_kwargs, pair.value) == ([TOOL], {"a": 1}, None)


def test_an_implicit_prompt_leaves_no_answer_empty():
    pair = parse("pairs", chosen="The sum is 4", rejected="The sum is 4, is it?")
    assert (pair.prompt, pair.completions) == ("The sum is", (" 4", " 4, is it?"))
    pair = parse("pairs", chosen=[ASKED, GOOD, AGAIN, BAD], rejected=[ASKED, GOOD])
    assert (pair.prompt, pair.completions) == ([ASKED], ([GOOD, AGAIN, BAD], [GOOD]))


def test_a_question_beside_answers_that_begin_with_it_is_their_prompt():
    chosen, rejected = "2 + 2? It is 4", "2 + 2? It is 5"
    assert parse("pairs", question="2 + 2?", chosen=chosen, rejected=rejected).prompt == "2 + 2? It is"
    chat = parse("pairs", question=ASKED["content"], chosen=[ASKED, GOOD], rejected=[ASKED, BAD])
    assert chat.prompt == [ASKED]


def test_blank_options_are_absent():
    pair = parse("pairs", prompt="p", chosen="a", rejected="b", tools=" ", chat_template_kwargs="", question=None)
    assert (pair.tools, pair.template_kwargs) == (None, None)


def test_an_implicit_prompt_is_what_both_sides_begin_with():
    pair = parse("pairs", chosen=[ASKED, BAD, AGAIN, GOOD], rejected=[ASKED, BAD, AGAIN, BAD])
    assert (pair.prompt, pair.completions) == ([ASKED, BAD, AGAIN], ([GOOD], [BAD]))
    pair = parse("pairs", chosen="The sky is blue.", rejected="The sky is green.")
    assert (pair.prompt, pair.completions) == ("The sky is", (" blue.", " green."))


@pytest.mark.parametrize(("label", "value"), [(True, 1.0), (False, 0.0), ("True", 1.0), ("false", 0.0)])
def test_judged_completions_have_a_label(label, value):
    record = parse("judged", prompt="p", completion="c", label=label)
    assert (record.completions, record.value) == (("c",), value)


def test_pairs_are_judged_completions_too():
    assert parse("judged", prompt="p", chosen="a", rejected="b").completions == ("a", "b")


def test_a_prompt_keeps_all_other_columns():
    record = parse("prompts", prompt=[ASKED], answer="4", tags=["a"], none=None)
    assert (record.prompt, record.completions, record.columns) == ([ASKED], (), {"answer": "4", "tags": ["a"]})


def test_distillation_takes_records_of_supervised_training_and_a_teacher():
    record = parse("distillation", text="abc", teacher_ids=[[1, 2], [3, 4]], teacher_logprobs=[[-1, -2.5], [-3, -4]])
    assert record.record.text == "abc" and record.teacher_ids == [[1, 2], [3, 4]]
    assert parse("distillation", messages=[ASKED, GOOD]).teacher_ids is None


def with_image(message):
    return message | {"content": [{"type": "image"}, {"type": "text", "text": message["content"]}]}


SHOWN = with_image(ASKED)
SIDES = {"chosen": [GOOD], "rejected": [BAD]}
WITH_IMAGES = {
    "TRL: beside a text": ("pairs", {"prompt": [ASKED], **SIDES, "images": ["a"]}, [SHOWN], (["a"], [], [])),
    "TRL: one image": ("pairs", {"prompt": [ASKED], **SIDES, "image": "a"}, [SHOWN], (["a"], [], [])),
    "beside parts": (
        "pairs", {"prompt": [SHOWN], "chosen": [with_image(GOOD)], "rejected": [BAD], "images": ["a", "b"]},
        [SHOWN], (["a"], ["b"], []),
    ),
    "without a prompt": (
        "pairs", {"chosen": [SHOWN, GOOD], "rejected": [SHOWN, BAD], "images": ["a"]}, [SHOWN], (["a"], [], []),
    ),
    "marks": (
        "judged", {"prompt": [ASKED | {"content": "<image>" + ASKED["content"]}], "completion": [GOOD], "label": False,
            "images": [{"bytes": b"x", "path": None}]}, [SHOWN], ([b"x"], []),
    ),
    "a text with the model's token": ("pairs", {"prompt": "<i> p", "chosen": "a", "rejected": "b", "images": ["a"]},
        "<i> p", (["a"], [], [])),
    "none": ("pairs", {"prompt": [ASKED], **SIDES, "images": []}, [ASKED], ()),
}  # fmt: skip


@pytest.mark.parametrize("form", WITH_IMAGES)
def test_images_belong_to_the_prompt_or_to_a_completion(form):
    kind, fields, prompt, images = WITH_IMAGES[form]
    record = parse(kind, **fields)
    assert (record.prompt, record.images) == (prompt, images)


def test_a_side_of_a_pair_keeps_its_own_images():
    record = parse("pairs", prompt=[SHOWN], chosen=[with_image(GOOD)], rejected=[BAD], images=["a", "b"])
    chosen, rejected = record.side(0), record.side(1)
    assert (chosen.completions, chosen.images) == ((record.completions[0],), (["a"], ["b"]))
    assert (rejected.completions, rejected.images) == (([BAD],), (["a"], []))


REFUSED = {
    "images beside a prompt for rewards": (
        "prompts", {"prompt": [ASKED], "images": ["a.png"]},
        "d:1: has images, but this objective trains on text alone; leave the field out",
    ),
    "more image parts than images": (
        "pairs", {"prompt": [SHOWN], "chosen": [GOOD], "rejected": [BAD]},
        "field images has 0 images, but the messages have 1 image parts without an image; give one for each",
    ),
    "more images than image parts": (
        "judged", {"prompt": [SHOWN], "completion": [GOOD], "label": True, "images": ["a.png", "b.png"]},
        "field images has 2 images, but the messages have 1 image parts without an image; give one for each",
    ),
    "an image from the network": (
        "pairs", {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD], "images": ["https://a.b/c.png"]},
        "field images[0] is the address https://a.b/c.png; download the image",
    ),
    "images in a prompt": (
        "prompts", {"prompt": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]},
        "only text is supported here",
    ),
    "equal sides": ("pairs", {"prompt": "p", "chosen": "a", "rejected": "a"}, "are equal, which teaches nothing"),
    "an empty side": ("pairs", {"prompt": "p", "chosen": "a", "rejected": ""}, "field rejected is empty"),
    "an empty message": ("pairs", {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD | {"content": ""}]},
        "field rejected is empty"),
    "an empty prompt": ("pairs", {"prompt": "", "chosen": "a", "rejected": "b"}, "field prompt is empty"),
    "a prompt that ends with the assistant": ("pairs", {"prompt": [ASKED, BAD], "chosen": [GOOD], "rejected": [BAD]},
        "field prompt ends with a message of the assistant; move it"),
    "an answer of the user": ("pairs", {"prompt": [ASKED], "chosen": [GOOD], "rejected": [AGAIN]},
        "field rejected must end with a message of the assistant"),
    "different prompts": ("pairs", {"chosen": [SYSTEM, ASKED, GOOD], "rejected": [SYSTEM, AGAIN, BAD]},
        "field chosen: behind the prompt comes a message of the user; give all completions of a record the same"),
    "a question in a completion": ("judged", {"prompt": [SYSTEM], "completion": [ASKED, GOOD], "label": True},
        "field completion: behind the prompt comes a message of the user"),
    "no common start": ("pairs", {"chosen": "a", "rejected": "b"}, "begin differently; add the field prompt"),
    "a repeated prompt": ("pairs", {"prompt": [ASKED], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        "repeat the messages of prompt; leave out prompt"),
    "a string beside messages": ("pairs", {"prompt": "2 + 2?", "chosen": [GOOD], "rejected": [BAD]},
        "field prompt is a string, but chosen is a list of messages"),
    "single messages": ("pairs", {"prompt": [ASKED], "chosen": GOOD, "rejected": BAD},
        "field chosen is a single message; make it a list"),
    "a prompt named conversations": ("pairs", {"conversations": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        "rename it to prompt"),
    "Argilla's names": ("pairs", {"instruction": "a", "chosen_response": "b", "rejected_response": "c"},
        "rename chosen_response to chosen, rejected_response to rejected; rename instruction to prompt"),
    "judged completions as pairs": ("pairs", {"prompt": "a", "completion": "b", "label": True}, "--objective kto"),
    "a question without a prompt": ("prompts", {"question": "a", "answer": "b"}, "; rename question to prompt"),
    "messages without a prompt": ("prompts", {"messages": [ASKED, GOOD]}, "without the answer at its end"),
    "a column of a reward function's argument": ("prompts", {"prompt": "a", "completion_ids": [1]}, "rename it"),
    "a label in words": ("judged", {"prompt": "a", "completion": "b", "label": "good"}, "field label is 'good'"),
    "a number as a label": ("judged", {"prompt": "a", "completion": "b", "label": 1}, "field label is 1; must be true"),
    "a margin in words": ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"}, "field margin"),
    "tools for strings": ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "tools": [TOOL]}, "no effect"),
    "variables that training sets": ("pairs", {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD],
        "chat_template_kwargs": {"add_generation_prompt": False}}, "has add_generation_prompt, which training sets"),
    "NaN of a teacher": ("distillation", {"text": "a", "teacher_ids": [[1]], "teacher_logprobs": [[float("nan")]]},
        "field teacher_logprobs has NaN"),
    "a token twice": ("distillation", {"text": "a", "teacher_ids": [[1, 2], [3, 3]],
        "teacher_logprobs": [[-1, -2], [-1, -1]]}, "field teacher_ids[1] has a token twice; give each one"),
    "half a teacher": ("distillation", {"text": "a", "teacher_ids": [[1]]}, "has only one of the fields"),
    "an uneven teacher": ("distillation", {"text": "a", "teacher_ids": [[1], [2]], "teacher_logprobs": [[-1, -2]]},
        "same number of tokens"),
    "nothing known": ("pairs", {"a": 1}, "has no field chosen with rejected; its fields are a"),
}  # fmt: skip


for name in ("question", "instruction", "input"):
    REFUSED[f"a prompt named {name}"] = (
        "pairs", {name: "2 + 2?", "chosen": "The sum is 4", "rejected": "The sum is 5"},
        f"field {name} is beside chosen and rejected; rename it to prompt",
    )  # fmt: skip
for name in ("system", "context"):
    REFUSED[f"a {name} without a prompt"] = (
        "pairs", {name: "Be brief.", "chosen": "Say the sum is 4", "rejected": "Say the sum is 5"},
        f"field {name} is beside chosen and rejected; put it into the prompt",
    )  # fmt: skip
for margin in (float("nan"), float("inf"), "-inf", 1e39, -1e308):
    fields = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}
    message = f"field margin is {float(margin)}; must be a finite number of 32 bits"
    REFUSED[f"a margin of {margin}"] = "pairs", fields, message
for number in (float("inf"), 10**400, -(10**400), 5.0):
    fields = {"text": "a", "teacher_ids": [[1]], "teacher_logprobs": [[number]]}
    REFUSED[f"a log-probability of {str(number)[:5]}"] = "distillation", fields, "field teacher_logprobs has NaN, or a"
for name in ("videos", "audio"):
    fields = {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD], name: ["a.mp4"]}
    REFUSED[f"{name} beside messages"] = "pairs", fields, f"has a field {name}, but training reads images alone"


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_names_the_record_the_field_and_the_remedy(case):
    kind, fields, message = REFUSED[case]
    with pytest.raises(InputError) as error:
        parse(kind, **fields)
    assert str(error.value).startswith("d:1: ") and message in str(error.value)


def test_all_kinds_of_files_are_read(tmp_path):
    rows = [{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "c", "rejected": "d"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.csv").write_text("prompt,chosen,rejected,extra\np,a,b,1\nq,c,d,2\n")
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    for name in ("a.jsonl", "b.csv", "c.parquet"):
        assert [(r.prompt, *r.completions) for r in read(tmp_path / name, "pairs")] == [
            ("p", "a", "b"),
            ("q", "c", "d"),
        ]
    (tmp_path / "e.csv").write_text("question,chosen,rejected\n2 + 2?,It is 4,It is 5\n")
    with pytest.raises(InputError, match=r"e\.csv:2: field question is beside chosen and rejected"):
        read(tmp_path / "e.csv", "pairs")
    (tmp_path / "d.csv").write_text("prompt,answer,level\np,4,easy\n")
    assert [record.columns for record in read(tmp_path / "d.csv", "prompts")] == [{"answer": "4", "level": "easy"}]
    with pytest.raises(InputError, match=r"b\.csv:1: the header has no column prompt with completion with label"):
        (tmp_path / "b.csv").write_text("prompt,text\np,a\n")
        read(tmp_path / "b.csv", "judged")
