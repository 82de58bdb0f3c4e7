"""The benchmarks of whole steps of DPO and GRPO run at a tiny shape, and their figures follow from the times."""

import pytest

from benchmarks import dpo_step, grpo_step, processes

pytest.importorskip("trl")
DPO = ("--model", "tiny", "--prompt", "12", "--completion", "8", "--pairs", "4", "--row-tokens", "80", "--steps", "1")
GRPO = ("--model", "tiny", "--prompts", "2", "--generations", "2", "--prompt", "6", "--completion", "4",
        "--row-tokens", "40", "--steps", "1")  # fmt: skip


@pytest.mark.parametrize("provider", dpo_step.PROVIDERS)
def test_a_row_of_dpo(provider):
    found = dpo_step.measure(provider, dpo_step.parse([*DPO, "--lora-rank", "2"]), checkpointing=False)
    assert found["useful_tokens_per_second"] == pytest.approx(2 * 4 * 20 / found["step_ms"] * 1e3, rel=0.02)


@pytest.mark.parametrize("provider", grpo_step.PROVIDERS)
def test_a_row_of_grpo(provider):
    found = grpo_step.measure(provider, grpo_step.parse([*GRPO]))
    assert found["step_s"] == pytest.approx(found["sample_s"] + found["update_s"], abs=2e-3) and found["sample_s"] > 0


def test_a_provider_that_fails_or_takes_too_long_has_a_row_that_says_so():
    environment: dict[str, str] = {}
    assert processes.row_of(["/bin/sh", "-c", "echo no wheel >&2; exit 1"], environment, 9) == {"error": "no wheel"}
    assert processes.row_of(["/bin/sh", "-c", "exec sleep 9"], environment, 0.1) == {"error": "took longer than 0.1 s"}
    assert processes.row_of(["/bin/sh", "-c", "echo first; echo '{\"a\": 1}'"], environment, 9) == {"a": 1}
