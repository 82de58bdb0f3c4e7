"""Preference training with images: losses and gradients are those of every sequence alone, and runs around them."""

import copy
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ligermodels
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.layers.reward_model import initialize_new_parameters
from ligermodels.training import TrainConfig, train
from ligermodels.training.checkpoints import Progress
from ligermodels.training.objectives import RunSetup
from ligermodels.training.optimizers import building as optimizers
from ligermodels.training.preparing import prepare
from ligermodels.training.reporting.flops import flops_per_token
from ligermodels.training.settings.settings import config_of_run
from ligermodels.weights.loading import load_weights
from tests.conftest import DEVICE
from tests.images.folders import picture, png
from tests.images.models import save_image_model
from tests.sabotage import Sabotage
from tests.suites import quick, slow

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
HERE = World(torch.device(DEVICE))
LOSS, GRADIENT = (2e-6, 1e-4) if DEVICE == "cpu" else (1e-4, 2e-3)  # relative; other kernels, other orders of addition
SIZES = [(12, 20), (8, 8), (16, 12)]
ROW = 220  # tokens: several rows, one of them without images
BETA, GAMMA = 0.5, 0.3
IMAGE = {"type": "image"}


def text(content):
    return {"type": "text", "text": content}


def part(number):
    return IMAGE | {"path": f"{number}.png"}


# Of each record: the content of the prompt, of chosen and of rejected; how it is written in the file is below.
RECORDS = [
    ([part(0), text("What is it?")], "A cat.", "No."),
    ([part(1), part(2), text("Which?")], "The first one, I think.", "Both"),
    ("Hello there, how are you?", "Well.", "Go away, please."),
    ([text("Like"), part(2), text("this")], [text("so: "), part(0), text("or so")], "not at all"),
    ([part(0), text("Where?")], [part(1)], [part(2)]),
    ("And with no image, what is there?", "Text alone.", "Nothing."),
]


def message(role, content):
    return [{"role": role, "content": content}]


def written(number, record):
    """The first record as TRL writes it, a text with images beside it; the second with bare parts; others as above."""
    prompt, chosen, rejected = record
    images = {}
    if number == 0:
        prompt, images = "What is it?", {"images": ["0.png"]}
    elif number == 1:
        prompt, images = [IMAGE, IMAGE, text("Which?")], {"images": ["1.png", {"bytes": None, "path": "2.png"}]}
    sides = {"chosen": message("assistant", chosen), "rejected": message("assistant", rejected)}
    return {"prompt": message("user", prompt), **sides, **images}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of models and of their references, by family, and the folder of the data."""
    folder = tmp_path_factory.mktemp("models")
    for number, size in enumerate(SIZES):
        (folder / f"{number}.png").write_bytes(png(picture(*size, seed=number)))
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(written(*pair)) for pair in enumerate(RECORDS)))
    (folder / "held.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
    made = {}

    def of(family):
        if family not in made:
            made[family] = [folder / f"{family}-{seed}" for seed in (0, 1)]
            for seed, path in enumerate(made[family]):
                path.mkdir()
                save_image_model(path, family, seed)
        return (*made[family], folder)

    return of


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


OPTIONS = {
    "dpo": {"beta": BETA}, "orpo": {"beta": BETA}, "simpo": {"beta": BETA, "gamma": GAMMA},
    "kto": {"beta": BETA}, "reward": {},
}  # fmt: skip


def config_of(models, family, objective, **settings):
    folder, reference, data = models(family)
    units = {"examples": 12} if objective == "kto" else {"pairs": 6}
    given = OPTIONS[objective] | ({"reference": f"model:{reference}"} if objective in ("dpo", "kto") else {})
    common = {
        "model": str(folder), "objective": objective, "data": (str(data / "pairs.jsonl"),), "sequence_length": ROW,
        "validation_data": (str(data / "held.jsonl"),), "max_length": 200, "steps": 1, "eval_every": 9,
        "no_export": True, "warmup": 0, "dtype": "float32", "learning_rate": 1e-3,
    }  # fmt: skip
    return TrainConfig(**{**common, **units, **given, **settings})


def of_run(config):
    """The step's loss, the model with its gradients, the rows, and the data."""
    made = prepare(config, HERE)
    model = made.model.to_empty(device=DEVICE)
    load_weights(model, made.pretrained)
    initialize_new_parameters(model, seed=0)
    made.objective.prepare(model, RunSetup(Path()))
    work = made.objective.work(model, Progress())
    losses = []
    for batch in work.batches:
        share = made.objective.loss(model, batch, work)
        share.loss.backward()
        losses.append(share.loss.detach())
    return torch.stack(losses).sum(), model, work.batches, made.objective.data.training


class Plain:
    """Log-probabilities from a model's logits on one sequence at a time, without packing or shared prompts."""

    def __init__(self, folder, data):
        self.model, self.processor = ligermodels.load(folder, device=DEVICE), ligermodels.load_processor(folder)
        self.data = data

    def content(self, content):
        if isinstance(content, str):
            return content
        return [each | {"path": str(self.data / each["path"])} if "path" in each else each for each in content]

    def inputs(self, prompt, answer):
        """The messages of the prompt, and the inputs of the whole sequence."""
        asked = message("user", self.content(prompt))
        whole = self.processor.apply_chat_template([*asked, *message("assistant", self.content(answer))])
        return asked, {name: tensor.to(DEVICE) for name, tensor in whole.items()}

    def __call__(self, prompt, answer):
        """The log-probabilities of the supervised tokens of the answer."""
        asked, whole = self.inputs(prompt, answer)
        before = self.processor.apply_chat_template(asked, add_generation_prompt=True)["input_ids"].shape[1]
        ids = whole["input_ids"][0]
        tokenizer = self.processor.tokenizer.tokenizer
        ends = [token for name in ("<|im_end|>", "<pad>") if (token := tokenizer.token_to_id(name)) is not None]
        last = max(place for place, token in enumerate(ids.tolist()) if token in ends)
        kept = [n for n in range(before, last + 1) if int(ids[n]) not in self.processor.image_tokens]
        logprobs = self.model(**whole).logits[0].double().log_softmax(-1)
        return torch.stack([logprobs[n - 1, ids[n]] for n in kept])


def log_odds(mean):
    return mean - torch.log(-torch.expm1(mean))


def expected_loss(objective, policy, reference, training):
    """The mean over the pairs, or over the examples, by the formulas of the papers."""
    sides = [(policy(prompt, chosen), policy(prompt, rejected)) for prompt, chosen, rejected in RECORDS]
    with torch.no_grad():
        others = [(reference(prompt, chosen), reference(prompt, rejected)) for prompt, chosen, rejected in RECORDS]
    ratios = [
        [one.sum() - other.sum() for one, other in zip(*pair, strict=True)] for pair in zip(sides, others, strict=True)
    ]
    means = [[side.mean() for side in pair] for pair in sides]
    if objective == "dpo":
        return torch.stack([-F.logsigmoid(BETA * (won - lost)) for won, lost in ratios]).mean()
    if objective == "kto":
        z = divergence(policy, reference, training)
        terms = [1 - (BETA * x).sigmoid() for won, lost in ratios for x in (won - z, z - lost)]
        return torch.stack(terms).mean()
    if objective == "simpo":
        return torch.stack([-F.logsigmoid(BETA * (won - lost) - GAMMA) for won, lost in means]).mean()
    nll = -torch.cat([won for won, _ in sides]).mean()
    odds = torch.stack([log_odds(won) - log_odds(lost) for won, lost in means])
    return nll - BETA * F.logsigmoid(odds).mean()


@torch.no_grad()
def divergence(policy, reference, training):
    """z of KTO: each prompt with the answer of the example that the step's order of the seed puts before it."""
    examples = [(prompt, answer) for prompt, *answers in RECORDS for answer in answers]
    taken = [examples[number] for number in training.numbers(0, len(examples))]
    order = np.random.default_rng([0, 0]).permutation(len(taken)).tolist()
    pairs = [(taken[one][0], taken[other][1]) for one, other in zip(order, order[-1:] + order[:-1], strict=True)]
    return torch.stack([policy(*pair).sum() - reference(*pair).sum() for pair in pairs]).mean().clamp(min=0)


def check(models, family, objective, **settings):
    config = config_of(models, family, objective, **settings)
    loss, model, batches, training = of_run(config)
    assert len(batches) > 1 and any(batch.images for batch in batches)
    folder, reference, data = models(family)
    policy = Plain(folder, data)
    policy.model.train()
    expected = expected_loss(objective, policy, Plain(reference, data), training)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=LOSS)
    compare_gradients(model, policy.model)


def compare_gradients(model, expected):
    of_images = 0
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        grad = torch.zeros_like(other) if other.grad is None else other.grad
        found = torch.zeros_like(other) if parameter.grad is None else parameter.grad
        scale = grad.abs().max().item()
        torch.testing.assert_close(
            found, grad, rtol=GRADIENT, atol=GRADIENT / 10 * scale + 1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )
        of_images += scale > 0 and name.startswith(("visual", "projector"))
    assert of_images > 10


CASES = [
    ("qwen2_vl", "dpo"), ("qwen2_vl", "orpo"), ("qwen2_vl", "simpo"), ("qwen2_vl", "kto"), ("qwen2_5_vl", "dpo"),
    ("gemma3", "dpo"), ("llava", "dpo"), ("mllama", "dpo"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "objective"), quick(CASES, [("qwen2_vl", "dpo"), ("qwen2_vl", "kto"), ("mllama", "dpo")])
)
def test_loss_and_gradients_are_those_of_every_sequence_alone(models, family, objective):
    check(models, family, objective)


@pytest.mark.parametrize("family", ["qwen2_vl", "mllama"])
def test_a_reward_model_scores_every_sequence_as_alone(family, models):
    loss, model, batches, _ = of_run(config_of(models, family, "reward"))
    assert len(batches) > 1
    plain = Plain(models(family)[0], models(family)[2])
    alone = copy.deepcopy(model)
    alone.zero_grad()
    scores = [
        [alone(**plain.inputs(prompt, answer)[1]).logits[0, 0] for answer in answers] for prompt, *answers in RECORDS
    ]
    expected = torch.stack([-F.logsigmoid(won - lost) for won, lost in scores]).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=LOSS)
    compare_gradients(model, alone)


COLLATION = "ligermodels.training.data.preferences.layout"
TOKENS = "ligermodels.training.data.preferences.tokenization"
LAYOUT = "ligermodels.training.data.preferences.layout"
BREAKS = {
    "positions of completions that ignore the prompt's images": Sabotage(
        "ligermodels.vision.image_placer:Images.continuing", ".max() + 1", ".shape[-1]", "qwen2_vl dpo"
    ),
    "positions of completions from 0": Sabotage(
        f"{COLLATION}:image_arguments", "if layout.shares and", "if False and", "qwen2_vl dpo"
    ),
    "images of rows in another order": Sabotage(
        f"{COLLATION}:image_arguments", "in layout.images]", "in layout.images[::-1]]", "gemma3 dpo"
    ),
    "supervised image tokens": Sabotage(
        "ligermodels.training.data.rows.image_documents:ImageChats.unsupervised", "kept and token not in never", "kept",
        "qwen2_vl orpo",
    ),
    "images of answers in the shared prompt": Sabotage(
        f"{TOKENS}:whole_images_border", "number >= of_prompt or image.stop > border", "False", "llava dpo"
    ),
    "filled up over images": Sabotage(f"{TOKENS}:filled", "if border <= image.start < first", "if False", "llava dpo"),
    "the images of another example's answer": Sabotage(
        "ligermodels.training.data.preferences.steps:Groups.mismatched",
        "source.images_of",
        "own[unit].group.images_of",
        "qwen2_vl kto",
    ),
    "no image of answers": Sabotage(f"{LAYOUT}:group_documents", "*group.images_of(part)", "*()", "llava dpo"),
}  # fmt: skip


@slow
@pytest.mark.parametrize("name", BREAKS)
def test_each_break_is_found(name, models, monkeypatch):
    BREAKS[name].apply(monkeypatch)
    with pytest.raises((AssertionError, InputError)):
        check(models, *BREAKS[name].case.split())


def test_weights_after_a_step_are_those_of_the_plain_gradients(models):
    result = train(config_of(models, "qwen2_vl", "dpo", weight_decay=0.1))
    folder, reference, data = models("qwen2_vl")
    policy = Plain(folder, data)
    policy.model.train()
    loss = expected_loss("dpo", policy, Plain(reference, data), None)
    loss.backward()
    [record] = [record for record in result.metrics if "loss" in record]
    assert record["loss"] == pytest.approx(loss.item(), rel=LOSS)
    optimizer = optimizers.build_optimizer(policy.model, weight_decay=0.1)
    optimizers.set_learning_rate(optimizer, 1e-3)
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.model.parameters() if p.grad is not None])
    assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    optimizers.clip_and_step(optimizer, loss.float(), norm, 1.0)
    before = ligermodels.load(folder, device=DEVICE)
    for (name, found), expected, old in zip(
        result.model.named_parameters(), policy.model.parameters(), before.parameters(), strict=True
    ):
        assert not torch.equal(found, old), name
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def losses_of(result):
    return [record["loss"] for record in result.metrics if "loss" in record]


REFERENCES = {
    "precomputed": {"reference": "precomputed"},
    "base": {"reference": "base", "lora_rank": 4, "lora_targets": ("all-linear", "vision")},
    "model": {"reference": "model", "train_parts": ("projector", "text")},
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_a_policy_that_equals_its_reference_has_a_loss_of_ln_2_to_the_bit(kind, models):
    first, second = losses_of(train(config_of(models, "qwen2_vl", "dpo", **{"steps": 2} | REFERENCES[kind])))
    assert first == torch.tensor(math.log(2)).item() and second < first


def test_a_precomputed_reference_is_not_that_of_an_image_that_has_changed(models, tmp_path, capsys):
    """Another picture of the same size under the same name: its log-probabilities are computed again."""
    folder, _, data = models("gemma3")
    for file in data.glob("*.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = config_of(lambda _: (folder, folder, tmp_path), "gemma3", "dpo", reference="precomputed")

    def computed():
        train(config)
        return "precomputed in" in capsys.readouterr().out

    assert computed() and not computed()
    (tmp_path / "0.png").write_bytes(png(picture(*SIZES[0], seed=9)))
    assert computed()


@pytest.mark.parametrize(("family", "objective"), [("qwen2_vl", "dpo"), ("gemma3", "kto")])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(family, objective, models, tmp_path):
    units = {"examples": 2} if objective == "kto" else {"pairs": 2}
    settings = {"reference": "model", "steps": 4, "checkpoint_every": 3, **units}
    whole = train(config_of(models, family, objective, output=tmp_path / "whole", **settings))
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed/checkpoints/step-000004")
    resumed = train(config_of_run(tmp_path / "killed"))
    assert losses_of(resumed) == losses_of(whole)
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_plan_counts_the_patches_of_images_once_for_a_shared_prompt(models):
    """15 + (4 + 12) + (9 + 15) + (15 + 4 + 9) features of 4 patches of the records with images."""

    def plan(**settings):
        made = prepare(config_of(models, "qwen2_vl", "dpo", **settings), HERE)
        return made.plan, made.objective.data.training.step(0, 6, HERE)

    shared, step = plan()
    features = [15, 4 + 12, 12 + 15, 15 + 4 + 12]
    assert shared.data.images.tokens == sum(features)
    assert shared.data.images.share == pytest.approx(sum(features) / step.tokens)
    most = max(len(batch.images["images"].pixels) for batch in step.batches if batch.images)
    assert most <= shared.data.images.most_patches <= 4 * sum(features)
    alone, step = plan(share_prompts=False)
    assert alone.data.images.tokens == sum(features) + 15 + (4 + 12) + 12 + 15
    assert alone.data.images.share == pytest.approx(alone.data.images.tokens / step.tokens)
    patches = sum(len(batch.images["images"].pixels) for batch in step.batches if batch.images)
    assert patches == 4 * alone.data.images.tokens
    assert "images" in dict(shared.table())
    per_token = flops_per_token(ligermodels.load(models("qwen2_vl")[0]), ROW)
    assert shared.flops > per_token and alone.flops > shared.flops
    assert alone.flops - per_token == pytest.approx(
        (shared.flops - per_token) * alone.data.images.share / shared.data.images.share, rel=1e-3
    )


REFUSED = {
    "distill": {"teacher": True, "batch_size": 1},
    "distill on groups": {"objective": "distill", "teacher": True, "on_policy": 0.5, "batch_size": 1},
    "grpo": {"reward": ("length",), "prompts": 1, "max_completion_length": 8},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_objectives_that_take_text_alone_refuse_images_before_anything_is_loaded(kind, models):
    folder, reference, data = models("qwen2_vl")
    asked = [message("user", [part(0), text(f"What {n}?")]) for n in range(4)]
    answer = message("assistant", "a cat")
    records = [{"prompt": one} if kind == "grpo" else {"messages": [*one, *answer]} for one in asked]
    file = data / f"{kind}.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    given = {"objective": kind, **REFUSED[kind]}
    given |= {"teacher": str(reference)} if "teacher" in given else {}
    with pytest.raises(InputError, match=r"has images, which|only text is supported here"):
        prepare(TrainConfig(model=str(folder), data=(str(file),), **given), HERE)
