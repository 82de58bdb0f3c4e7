"""Distillation: a student learns from a teacher beside it, or from what a teacher has left in the data."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

import ligermodels
from ligermodels.cli import main
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.training import TrainConfig, plan, train
from ligermodels.training.checkpoints import Progress
from ligermodels.training.objectives import RunSetup
from ligermodels.training.objectives.distillation import teachers
from ligermodels.training.objectives.distillation.distill import parse_divergence
from ligermodels.training.preparing import prepare
from ligermodels.training.reporting.flops import forward_flops
from tests.suites import quick, slow
from tests.training.small_models import RAW, save_model, validations

NAMES, PLACES, THINGS = (
    ("Ann", "Bob", "Cat", "Dan"),
    ("barn", "lake", "shop"),
    ("a hat", "a cup", "two eggs", "nothing"),
)
TEXTS = [f"{who} went to the {where} and bought {what}. Then {who} left the {where} with {what}."
         for who in NAMES for where in PLACES for what in THINGS] * 4  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts, a teacher that was trained on them, and a narrower student with new weights."""
    folder = tmp_path_factory.mktemp("distill")
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    save_model(folder / "untrained", TEXTS)
    save_model(folder / "student", TEXTS, seed=1, hidden_size=16, vocab_size=333)  # padded further
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        run = train(settings(folder, "untrained", steps=120, eval_every=120, output=folder / "taught"))
    return folder, validations(run)[120]["validation_loss"]


def settings(folder, model, **fields):
    usual = {"sequence_length": 32, "batch_size": 16, "learning_rate": 1e-2, "warmup": 5, "checkpoint_every": 0}
    return TrainConfig(**(usual | {"model": str(folder / model), "data": (str(folder / "texts.jsonl"),)} | fields))


def distillation(folder, **fields):
    teacher = {"objective": "distill", "teacher": str(folder / "taught" / "model")}
    return settings(folder, **({"model": "student"} | teacher | fields))


def test_a_student_closes_half_of_the_gap_to_its_teacher(folder, capsys):
    folder, teacher = folder
    run = train(distillation(folder, steps=60, eval_every=60, output=folder / "distilled"))
    tokens = tokenizers.Tokenizer.from_file(str(folder / "student" / "tokenizer.json")).get_vocab_size()
    assert f"the {tokens} tokens of the tokenizer are compared" in capsys.readouterr().out
    before, after = (validations(run)[step] for step in (0, 60))
    assert after["validation_nll"] - teacher < 0.5 * (before["validation_nll"] - teacher)
    assert after["validation_loss"] == after["validation_divergence"] < 0.5 * before["validation_divergence"]
    steps = [record for record in run.metrics if "loss" in record]
    assert all(record["divergence"] == pytest.approx(record["loss"], rel=1e-4) for record in steps)
    assert 0 < steps[-1]["entropy"] < steps[0]["entropy"]


def test_a_run_is_resumed_to_the_bit_and_micro_batches_change_nothing(folder):
    folder, _ = folder
    recipe = {"steps": 4, "eval_every": 4, "divergence": "jsd:0.3", "temperature": 2.0, "ce_weight": 0.5}
    train(distillation(folder, **recipe, output=folder / "whole"))
    part = distillation(folder, **recipe | {"checkpoint_every": 2, "keep_checkpoints": 9}, output=folder / "part")
    train(part)
    for newer in ("checkpoints/step-000004", "model"):  # as if it had been killed after step 2
        shutil.rmtree(folder / "part" / newer)
    metrics = folder / "part/metrics.jsonl"
    metrics.write_text("".join(line for line in metrics.open() if "exported" not in line))
    assert main(["train", "--resume", str(folder / "part")]) == 0
    train(distillation(folder, **recipe, micro_batch_size=4, output=folder / "split"))
    weights = [load_file(folder / run / "model/model.safetensors") for run in ("whole", "part", "split")]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name])
        torch.testing.assert_close(value, weights[2][name], rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_stored_log_probabilities_of_the_teacher_itself_have_no_divergence(folder):
    folder, _ = folder
    model = ligermodels.load(folder / "taught" / "model")
    tokenizer = ligermodels.load_tokenizer(folder / "taught" / "model")
    records = []
    for text in TEXTS[:48]:
        best = model(torch.tensor([tokenizer.encode(text)])).logits[0].log_softmax(-1).topk(4)
        records.append({"text": text, "teacher_ids": best.indices.tolist(), "teacher_logprobs": best.values.tolist()})
    file = folder / "top.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    with torch.enable_grad():
        own = {"teacher": "top-k", "data": (str(file),), "steps": 1, "batch_size": 8}
        run = train(distillation(folder, model="taught/model", **own, output=folder / "itself"))
    assert abs(validations(run)[0]["validation_divergence"]) < 1e-5
    with pytest.raises(
        InputError, match="--divergence tvd needs a whole distribution, and --teacher top-k has k tokens"
    ):
        plan(distillation(folder, teacher="top-k", divergence="tvd"))


STORED = [("texts", {}), ("texts", {"packing": False}), ("conversations", {"sequence_length": 64})]


@pytest.fixture(scope="module")
def conversations(folder):
    """Prompts with completions: some places of a row are supervised, and the head takes these alone."""
    folder, _ = folder
    records = [{"prompt": f"{who} went to the {where}", "completion": f" and bought {what}. Then {who} left the house."}
               for who in NAMES for where in PLACES for what in THINGS] * 4  # fmt: skip
    (folder / "conversations.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


@pytest.mark.parametrize("data, more", quick(STORED, STORED[-1:]))
def test_stored_states_train_as_the_teacher_beside_the_student(conversations, capsys, data, more, request):
    """To the bit: the states are those of the same passes. Of the second run no weight of the teacher is read."""
    folder, name = conversations, request.node.callspec.id
    recipe = {"steps": 3, "eval_every": 3, "divergence": "jsd:0.3", "temperature": 2.0, "micro_batch_size": 4,
              "data": (str(folder / f"{data}.jsonl"),), **more}  # fmt: skip
    states = folder / f"states-{name}"
    online = train(distillation(folder, **recipe, output=folder / f"{name}-online"))
    dry = plan(distillation(folder, **recipe, teacher_states=states))
    assert set(dry.phases) == {"teacher", "train"} and "written once to" in dry.facts["teacher"]
    capsys.readouterr()
    for run in ("written", "read"):
        stored = distillation(folder, **recipe, teacher_states=states, output=folder / f"{name}-{run}")
        with pytest.MonkeyPatch.context() as patch:
            if run == "read":
                patch.setattr(teachers, "load_weights", lambda *_: pytest.fail("reads the teacher"))
            found = train(stored)
        assert f"{run.replace('read', 'in').replace('written', 'written once to')} {states}" in capsys.readouterr().out
        assert validations(found)[3]["validation_loss"] == validations(online)[3]["validation_loss"]
        for one, other in zip(found.model.parameters(), online.model.parameters(), strict=True):
            assert torch.equal(one, other)
    after = plan(stored)
    places, width = json.loads((states / "teacher.json").read_text())["shape"]
    assert (states / "states").stat().st_size == places * width * 4 and set(after.phases) == {"train"}
    assert after.memory.beside < dry.phases["teacher"] - dry.memory.weights


def test_states_of_other_data_or_another_teacher_are_refused(conversations):
    folder = conversations
    recipe = {"steps": 1, "no_export": True, "sequence_length": 48, "data": (str(folder / "texts.jsonl"),)}
    states = folder / "states"
    train(distillation(folder, **recipe, teacher_states=states, output=folder / "first"))
    for changes, words in (
        ({"sequence_length": 40}, "was written for another data; name a new folder"),
        ({"teacher": str(folder / "student")}, "was written for another teacher"),
        ({"dtype": "bfloat16"}, "was written for another dtype"),
        ({"teacher_states": folder / "untrained"}, "untrained: has no states of a teacher: .*; name a new folder"),
        ({"teacher": "top-k"}, "--teacher-states: --teacher top-k reads the data"),
        ({"on_policy": 0.5}, "--teacher-states has no effect with --on-policy"),
    ):
        with pytest.raises(InputError, match=words):
            plan(distillation(folder, **recipe | {"teacher_states": states} | changes))
    again = distillation(folder, **recipe, teacher_states=states, output=folder / "again")
    for file, content, words in (
        ("states", b"x", "states: has 1 bytes instead of"),
        ("head.safetensors", b"", "head.safetensors: cannot be read"),
        ("teacher.json", b"[" * 5000, "has no states of a teacher: .*nested too deeply"),
        ("teacher.json", b"[]", "has no states of a teacher: .*not a JSON object"),
    ):
        whole = (states / file).read_bytes()
        (states / file).write_bytes(content)
        with pytest.raises(InputError, match=words):
            train(again)
        (states / file).write_bytes(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teachers, "free_space", lambda _: (folder, 10))
        with pytest.raises(
            InputError, match=r"--teacher-states .*nowhere: needs .*, and .* has 10 B; name a folder on"
        ):
            plan(distillation(folder, **recipe, teacher_states=folder / "nowhere"))


PROMPTS = [{"prompt": f"{who} went to the {where}"} for who in NAMES for where in PLACES]


def on_policy(folder, **fields):
    """A run on the student's own completions."""
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    given = {"on_policy": 1.0, "data": (str(folder / "prompts.jsonl"),), "max_completion_length": 24, "batch_size": 8}
    return distillation(folder, **(given | {"validation_fraction": 0.3, "learning_rate": 1e-2} | fields))


@slow
def test_a_student_learns_on_its_own_completions(folder):
    folder, _ = folder
    run = train(on_policy(folder, steps=40, eval_every=40, output=folder / "sampled"))
    before, after = (validations(run)[step] for step in (0, 40))
    assert after["validation_divergence"] < 0.6 * before["validation_divergence"]  # on its own held-out completions
    assert after["validation_loss"] == pytest.approx(after["validation_divergence"], rel=1e-5)
    steps = [record for record in run.metrics if "loss" in record]
    assert all(record["divergence"] == pytest.approx(record["loss"], rel=1e-4) for record in steps)
    assert all(1 <= record["completions/mean_length"] <= 24 for record in steps)


def test_a_run_that_samples_in_half_of_its_steps_is_resumed_to_the_bit(folder):
    """The first step after the resume takes the data, the second samples with a new engine."""
    folder, _ = folder
    records = [record | {"completion": f" and bought {what}."} for record in PROMPTS for what in THINGS]
    (folder / "completions.jsonl").write_text("\n".join(map(json.dumps, records)))
    mixed = {"on_policy": 0.5, "data": (str(folder / "completions.jsonl"),), "steps": 4, "eval_every": 4,
             "divergence": "jsd:0.5", "temperature": 0.8}  # fmt: skip
    train(on_policy(folder, **mixed, checkpoint_every=2, keep_checkpoints=9, output=folder / "mixed"))
    shutil.copytree(folder / "mixed", folder / "killed")
    for newer in ("checkpoints/step-000004", "model"):  # as if it had been killed after step 2
        shutil.rmtree(folder / "killed" / newer)
    metrics = folder / "killed/metrics.jsonl"
    metrics.write_text("".join(line for line in metrics.open() if "exported" not in line))
    assert main(["train", "--resume", str(folder / "killed")]) == 0
    whole, resumed = (load_file(folder / run / "model/model.safetensors") for run in ("mixed", "killed"))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    sampled = ["completions/mean_length" in json.loads(line) for line in metrics.open() if '"grad_norm"' in line]
    assert sampled == [False, True, False, True]


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_a_sampled_step_is_a_loop_over_completions(folder, kind):
    """KL(q || p) or KL(p || q) of teacher q and student p over the tokens of each completion, both at temperature 0.7,
    divided by their number; the completions are drawn from the student."""
    folder, _ = folder
    run = prepare(on_policy(folder, steps=1, divergence=kind, temperature=0.7), World(torch.device("cpu")))
    objective, student = run.objective, ligermodels.load(folder / "student")
    teacher = ligermodels.load(folder / "taught/model")
    assert objective.passes_beside == forward_flops(teacher) / forward_flops(student) > 1
    objective.prepare(student, RunSetup(Path()))
    work = objective.work(student, Progress())
    loss = sum(objective.loss(student, batch, work).loss for batch in work.batches)
    loss.backward()
    mine, expected, count = student.head.weight.grad.clone(), 0.0, 0
    student.zero_grad()
    groups = objective.data.training.groups
    prompts = {tuple(groups.piece(n, 0).group.prompt.tolist()) for n in range(len(groups))}
    for batch in work.batches:
        bounds = batch.cu_seqlens.tolist()[: len(batch.completions)]
        for begin, end in itertools.pairwise(bounds):
            ids = batch.input_ids[:, begin:end]
            length = max(len(p) for p in prompts if tuple(ids[0, : len(p)].tolist()) == p)
            p, q = ((model(ids).logits[0, length - 1 : -1, : objective.vocab] / 0.7).log_softmax(-1)
                    for model in (student, teacher))  # fmt: skip
            expected += ((p.exp() * (p - q)) if kind == "reverse_kl" else (q.exp() * (q - p))).sum()
            count += ids.shape[1] - length
    (expected / count).backward()
    assert count == int(work.counts[0]) and loss.item() == pytest.approx(expected.item() / count, rel=1e-5)
    torch.testing.assert_close(mine, student.head.weight.grad, rtol=1e-3, atol=1e-6)


def test_bad_teachers_and_settings_without_effect_are_refused(folder):
    folder, _ = folder
    save_model(folder / "foreign", ["completely", "different", "letters"])
    with pytest.raises(
        InputError, match=r"--teacher .*foreign: token \d+ is '.+' in the tokenizer of .*; take a model"
    ):
        plan(distillation(folder, teacher=str(folder / "foreign")))
    ligermodels.export(ligermodels.create(RAW | {"vocab_size": 400}), folder / "bare")
    with pytest.raises(
        InputError, match=r"--teacher .*bare: has 400 classes, .*student has 333, and no tokenizer of both"
    ):
        plan(distillation(folder, teacher=str(folder / "bare")))
    ligermodels.export(ligermodels.create(RAW, reward_model=True), folder / "scores")
    with pytest.raises(InputError, match=r"--teacher .*: is a reward model, without logits of tokens"):
        plan(distillation(folder, teacher=str(folder / "scores")))
    for fields, words in (
        ({"teacher": None}, "--teacher is missing: a Hub id or a folder of the model to learn from"),
        ({"divergence": "cosine", "temperature": 2.0}, "--temperature has no effect on --divergence cosine"),
        ({"max_completion_length": 64}, "--max-completion-length goes with --on-policy, which is missing"),
        ({"on_policy": 0.5, "ce_weight": 0.1}, "--ce-weight has no effect with --on-policy"),
        ({"on_policy": 0.5, "teacher": "top-k"}, "--on-policy: --teacher top-k has nothing to say of completions"),
        ({"on_policy": 1.0, "max_completion_length": 128}, "--max-completion-length 128: leaves no room for a prompt"),
        ({"max_length": 64}, "--max-length .*has no effect under --objective distill"),
        ({"objective": "sft"}, "--teacher .*has no effect under --objective sft"),
    ):
        with pytest.raises(InputError, match=words):
            plan(distillation(folder, **fields))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_default_limit_of_samples_is_what_the_longest_prompt_leaves(folder, share):
    """Of 128 positions; a limit that is given and does not fit is refused, in front of completions of the data too."""
    folder, _ = folder
    records = [record | {"completion": " and left."} for record in PROMPTS]
    (folder / "few.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = {"on_policy": share, **({"data": (str(folder / "few.jsonl"),)} if share < 1 else {})}
    run = prepare(on_policy(folder, **data, max_completion_length=None), World(torch.device("cpu")))
    limit = 128 - run.objective.longest_prompt
    assert run.config.max_completion_length == limit < 128
    assert f"--max-completion-length {limit}: 128 positions less the longest prompt" in run.plan.chosen
    with pytest.raises(InputError, match=r"--max-completion-length( 126: |\);)"):
        plan(on_policy(folder, **data, max_completion_length=126))


def test_texts_without_prompts_are_refused_where_a_student_samples(folder):
    folder, _ = folder
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    with pytest.raises(InputError, match=r"texts.jsonl:1: is a text without a prompt, and --on-policy samples"):
        plan(on_policy(folder, on_policy=0.5, data=(str(folder / "texts.jsonl"),)))


def test_divergences_are_named_with_the_share_of_the_teacher_in_jsd():
    assert parse_divergence("jsd:0.3") == ("jsd", 0.3) and parse_divergence("jsd") == ("jsd", 0.5)
    assert parse_divergence("cosine")[0] == "cosine"
    for text, words in {
        "jsd:0": "did you mean forward_kl", "jsd:1": "did you mean reverse_kl", "jsd:x": "did you mean jsd:0.5",
        "tvd:1": "write tvd", "reverse-kl": "did you mean 'reverse_kl'",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=words):
            parse_divergence(text)


def test_the_plan_counts_the_teacher(folder):
    folder, _ = folder
    beside = (
        plan(distillation(folder, steps=1)).phases["train"] - plan(settings(folder, "student", steps=1)).phases["train"]
    )
    weights = sum(x.nbytes for x in load_file(folder / "taught/model/model.safetensors").values())
    assert weights <= beside < 2 * weights
