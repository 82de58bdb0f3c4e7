"""Several ranks, with FSDP2 over gloo, have the losses and metrics of one."""

import json

import pytest

from ligermodels.training.optimizers.update_check import CHANGED, CHANGED_EXACTLY, SIZE
from tests.images.folders import picture, png
from tests.images.models import save_image_model
from tests.training.launching import records
from tests.training.small_models import save_model

RUN = ("--model", "qwen2", "--steps", "3", "--eval-every", "9", "--learning-rate", "1e-3", "--warmup", "0",
       "--no-export", "--checkpoint-every", "2")  # fmt: skip
PAIRS = ("--data", "pairs.jsonl", "--max-length", "64")
KINDS = {
    "precomputed": (*PAIRS, "--objective", "dpo", "--pairs", "5", "--sequence-length", "32"),
    "ema": (*PAIRS, "--objective", "dpo", "--pairs", "5", "--reference", "ema:0.5/1"),
    "kto": (*PAIRS, "--objective", "kto", "--examples", "7", "--sequence-length", "32", "--lora-rank", "4"),
    "simpo": (*PAIRS, "--objective", "simpo", "--pairs", "5", "--sequence-length", "32", "--nll-weight", "0.2"),
    "reward": (*PAIRS, "--objective", "reward", "--pairs", "5", "--sequence-length", "32", "--center-rewards", "0.1"),
    "grpo": ("--objective", "grpo", "--prompts", "3", "--generations", "4", "--max-completion-length", "6", "--beta",
             "0.1", "--steps-per-generation", "2", "--data", "prompts.jsonl", "--reward", "rewards.py:even"),
    # Every number of ranks writes states of its own.
    "distill": ("--objective", "distill", "--model", "student", "--teacher", "teacher", "--data", "texts.jsonl",
                "--batch-size", "6", "--sequence-length", "32", "--micro-batch-size", "1"),
    # A trained tower; some steps have images on one rank alone.
    "images": ("--data", "pictures.jsonl", "--objective", "dpo", "--model", "reader", "--pairs", "2", "--reference",
               "model", "--max-length", "100"),
    "model": (*PAIRS, "--objective", "dpo", "--pairs", "1", "--reference", "model"),  # one rank has padding alone
}  # fmt: skip
SHARING = {
    "precomputed": (4, 2),
    "kto": (2, 2),
    "reward": (2, 2),
    "images": (2, 2),
    "grpo": (4, 4),
}  # ranks, and how many share a row
MEASURED = (
    *("peak_memory_gib", "tokens_per_second", "seconds_left", "step_time"),
    *("time/sample", "time/reward", "time/score"),
    *(CHANGED, CHANGED_EXACTLY, SIZE),  # of weights that each rank samples from its shards
)


@pytest.fixture(scope="module", autouse=True)
def data(launcher):
    write_data(launcher.folder)


def write_data(folder):
    """All that the runs of `KINDS` read."""
    pairs = [{"prompt": f"{n} plus {n} is", "chosen": f" {2 * n}." + " Good." * (n % 3), "rejected": f" {2 * n}? No."}
             for n in range(60)]  # fmt: skip
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    prompts = [{"prompt": record["prompt"]} for record in pairs]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    texts = [f"{who} went to the {where}." for who in ("Ann", "Bob") for where in ("barn", "lake", "shop")] * 20
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    save_model(folder / "student", texts)
    save_model(folder / "teacher", texts, seed=1)
    for number, size in enumerate([(12, 20), (8, 8)]):
        (folder / f"{number}.png").write_bytes(png(picture(*size, seed=number)))
    sides = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    pictures = [{"prompt": [{"role": "user", "content": f"{n}?"}], "images": [f"{n % 2}.png"] * (n % 3 > 0)} | sides
                for n in range(40)]  # fmt: skip
    (folder / "pictures.jsonl").write_text("\n".join(map(json.dumps, pictures)))
    (folder / "reader").mkdir()
    save_image_model(folder / "reader", "qwen2_5_vl")
    (folder / "rewards.py").write_text(
        "def even(completion_ids, **_):\n    return [sum(t % 2 for t in ids) / len(ids) for ids in completion_ids]\n"
    )


def assert_same_records(alone, shared):
    for one, other in zip(alone, shared, strict=True):
        names = {name for name in one if name not in MEASURED}
        assert {name: other[name] for name in names} == pytest.approx({name: one[name] for name in names}, abs=5e-4)


def test_ranks_share_rows_in_which_tokens_of_an_image_see_those_behind_them(launcher):
    (launcher.folder / "ahead").mkdir()
    save_image_model(launcher.folder / "ahead", "gemma3")
    run = (*RUN, *KINDS["images"], "--model", "ahead", "--steps", "1", "--checkpoint-every", "0")
    launcher.succeed(*run, "--output", "ahead-whole")
    launcher.succeed(*run, "--context-parallel", "2", "--output", "ahead-rows", ranks=2)
    assert_same_records(*(records(launcher.folder / f"ahead-{name}") for name in ("whole", "rows")))


@pytest.mark.parametrize("kind", KINDS)
def test_several_ranks_have_the_losses_and_metrics_of_one(launcher, kind):
    for ranks in (1, 2):
        states = ("--teacher-states", f"states-{ranks}") if kind == "distill" else ()
        launcher.succeed(*RUN, *KINDS[kind], *states, "--output", f"{kind}-{ranks}", ranks=ranks)
    alone, shared = (records(launcher.folder / f"{kind}-{ranks}") for ranks in (1, 2))
    assert len(alone) == len(shared) == 4 + (kind in ("distill", "images"))  # pretrained weights are validated first
    assert_same_records(alone, shared)
    if kind in SHARING:
        ranks, sharing = SHARING[kind]
        options = "--context-parallel", str(sharing), "--output", f"{kind}-rows"
        launcher.succeed(*RUN, *KINDS[kind], *options, ranks=ranks)
        assert_same_records(alone, records(launcher.folder / f"{kind}-rows"))
