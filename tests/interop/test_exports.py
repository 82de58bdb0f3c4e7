"""transformers and lm-eval use exported folders, for every family, with the results of ligermodels.

vLLM is not installed here: the class that an export names is looked up in a copy of its registry.
"""

import json
from functools import cache
from pathlib import Path

import lm_eval
import pytest
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoConfig, AutoTokenizer

import ligermodels
from ligermodels.integrations.transformers import wrap
from tests.interop.folders import export_with_tokenizer, new_tokenizer, tiny_model
from tests.suites import quick

FAMILIES = ligermodels.list_architectures()
# What runs a model knows classes of models and tokenizers, not families: one of each kind.
RUN = ("gemma2", "gpt_oss", "granitemoehybrid", "llama", "qwen2_vl", "qwen3_moe")
TEXTS = ("Once upon a time there was a fox.", " It had 12 red balls, didn't it?\n\n", "café ½ 你好 <|im_end|>")
QUESTIONS = [
    {"question": "Tim has a red", "choices": ["ball", "big house", "tree."], "label": 0},
    {"question": "The dog\nand the", "choices": ["cat", "cats and the birds"], "label": 1},
]
NOT_IN_VLLM = {"mllama"}
VLLM = json.loads((Path(__file__).parents[1] / "data/vllm_architectures.json").read_text())
TASK = {
    "task": "offline",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "label",
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Of a family a tiny model, and the folder of its export."""

    @cache
    def export(family):
        model = tiny_model(family)
        return model, export_with_tokenizer(model, tmp_path_factory.mktemp("exports") / family)

    return export


def log_likelihood(model, context, continuation):
    """The log probability of `continuation` after `context`."""
    ids = new_tokenizer().encode(context + continuation)
    first = len(new_tokenizer().encode(context))
    with torch.no_grad():
        log_probs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return float(log_probs[torch.arange(first - 1, len(ids) - 1), ids[first:]].sum())


@pytest.mark.parametrize("family", quick(FAMILIES, RUN))
def test_transformers_reads_the_configuration_and_the_tokenizer(family, exports):
    model, folder = exports(family)
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert config.architectures == [model.hub_class]
    assert getattr(transformers, model.hub_class).config_class is type(config)
    for text in TEXTS:
        ids = new_tokenizer().encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == new_tokenizer().decode(ids)
    chat = [{"role": "user", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("family", RUN)
def test_the_text_generation_pipeline_continues_as_generate_does(family, exports):
    model, folder = exports(family)
    pipeline = transformers.pipeline("text-generation", model=str(folder), dtype=torch.float32)
    (result,) = pipeline(TEXTS[0], max_new_tokens=8, do_sample=False, return_full_text=False)
    (tokens,) = ligermodels.generate(model, [new_tokenizer().encode(TEXTS[0])], max_new_tokens=8, temperature=0.0)
    assert result["generated_text"] == new_tokenizer().decode(tokens) != ""


def scores(tmp_path, monkeypatch, model, **arguments):
    """The log-likelihood of every answer by lm-eval, by question and answer."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # lists all installed packages
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(file)}}}
    no_other_tasks = TaskManager(include_defaults=False)  # reading the list of all takes a minute
    results = lm_eval.simple_evaluate(model, tasks=[task], bootstrap_iters=0, task_manager=no_other_tasks, **arguments)
    return {
        (sample["doc"]["question"], answer): float(response[0])
        for sample in results["samples"]["offline"]
        for answer, (response,) in zip(sample["doc"]["choices"], sample["resps"], strict=True)
    }


def expected_scores(model):
    return {
        (question["question"], answer): log_likelihood(model, question["question"], f" {answer}")
        for question in QUESTIONS
        for answer in question["choices"]
    }


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen2_vl"])
def test_lm_eval_scores_answers_as_the_model_does(family, exports, tmp_path, monkeypatch):
    model, folder = exports(family)
    arguments = {"pretrained": str(folder), "dtype": "float32", "device": "cpu"}
    if family == "qwen2_vl":  # to transformers a model of images and text only
        with pytest.raises(ValueError, match="Unrecognized configuration class"):
            scores(tmp_path, monkeypatch, "hf", model_args=arguments)
        return
    found = scores(tmp_path, monkeypatch, "hf", model_args=arguments)
    assert found == pytest.approx(expected_scores(model), rel=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_lm_eval_scores_the_face_as_the_model(family, tmp_path, monkeypatch):
    model = tiny_model(family)
    tokenizer = AutoTokenizer.from_pretrained(export_with_tokenizer(model, tmp_path / "out"))
    evaluated = HFLM(pretrained=wrap(model), tokenizer=tokenizer)
    assert scores(tmp_path, monkeypatch, evaluated) == pytest.approx(expected_scores(model), rel=1e-5)


@pytest.mark.parametrize("family", quick(FAMILIES, RUN))
def test_vllm_knows_the_class_that_an_export_names(family, exports):
    _, folder = exports(family)
    config = json.loads((folder / "config.json").read_text())
    (name,) = config["architectures"]
    known = any(name in names for key, names in VLLM.items() if key != "origin")
    assert known == (config["model_type"] not in NOT_IN_VLLM)
