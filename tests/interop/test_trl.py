"""TRL's trainers train our models with their face as they train transformers' own with the same weights.

All weights, or LoRA of PEFT that has the same initial values.
"""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.interop.models import KINDS, VOCABULARY

TOLERANCE = 1e-5  # relative and absolute: of fp32 sums in another order
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
WORDS = ["[pad]", "[bos]", "[eos]", "<user>", "<assistant>", *(f"w{n}" for n in range(5, VOCABULARY))]
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% if m.role == 'assistant' %}[eos] {% endif %}"
TEMPLATE += "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w5"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[pad]", "bos_token": "[bos]", "eos_token": "[eos]"}
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE, **special)


def sentence(seed, length):
    draw = torch.randint(5, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{n}" for n in draw.tolist())


def turn(role, seed, length):
    return [{"role": role, "content": sentence(seed, length)}]


TEXTS = Dataset.from_list([{"text": sentence(n, 4 + n % 9)} for n in range(12)])
CHATS = Dataset.from_list(
    [{"messages": turn("user", n, 3 + n % 4) + turn("assistant", 50 + n, 2 + n % 5)} for n in range(12)]
)
COMPLETIONS = Dataset.from_list(
    [{"prompt": sentence(n, 4), "completion": sentence(50 + n, 3 + n % 4)} for n in range(12)]
)
PREFERENCES = Dataset.from_list(
    [
        {"prompt": sentence(n, 3 + n % 3), "chosen": sentence(50 + n, 4), "rejected": sentence(90 + n, 3 + n % 4)}
        for n in range(12)
    ]
)
PROMPTS = Dataset.from_list([{"prompt": sentence(n, 3 + n % 3)} for n in range(12)])


def settings(output, **further):
    return {
        "output_dir": str(output), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2,
        "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "optim": "sgd",  # the first steps of AdamW amplify gradients that are nothing but rounding
    } | further  # fmt: skip


def records(trainer, names):
    """What the steps have logged under these names."""
    trainer.train()
    steps = [record for record in trainer.state.log_history if "loss" in record]
    return torch.tensor([[float(step[name]) for name in names] for step in steps], dtype=torch.float64)


def adapters(weights):
    if weights == "all weights":
        return {}
    return {"peft_config": LoraConfig(r=4, target_modules=PROJECTIONS, init_lora_weights=False, task_type="CAUSAL_LM")}


def seeded(trainer_class, *arguments, **options):
    """A trainer whose adapters have values that depend on their names alone."""
    trainer = trainer_class(*arguments, **options)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_" in name:
                generator = torch.Generator().manual_seed(sum(map(ord, name)))
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return trainer


def assert_same(make, names, tolerance=TOLERANCE):
    got, expected = (records(make(kind), names) for kind in ("face", "transformers"))
    assert len(expected) == 2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


SFT = {
    "text": (TEXTS, {}),
    "chat": (CHATS, {}),
    "completion": (COMPLETIONS, {}),
    "packed": (TEXTS, {"packing": True, "max_length": 32}),
    "padding-free": (TEXTS, {"padding_free": True, "max_length": None}),
    "dft": (TEXTS, {"loss_type": "dft"}),
    "checkpointed": (TEXTS, {"gradient_checkpointing": True}),
}


@pytest.mark.parametrize(
    ("family", "weights", "case"),
    [
        *(("llama", "all weights", case) for case in SFT),
        *(("qwen3_moe", "all weights", case) for case in ("text", "packed", "checkpointed")),
        *(("llama", "LoRA", "checkpointed"), ("qwen3_moe", "LoRA", "text"), ("gemma2", "LoRA", "packed")),
    ],
)
def test_sft_equals_that_of_transformers_own_model(family, weights, case, folders, tokenizer, tmp_path):
    data, options = SFT[case]

    def make(kind):
        model, arguments = KINDS[kind](folders[family]), SFTConfig(**settings(tmp_path, **options))
        return seeded(SFTTrainer, model, arguments, train_dataset=data, processing_class=tokenizer, **adapters(weights))

    assert_same(make, ["loss", "grad_norm", "entropy", "mean_token_accuracy"])


@pytest.mark.parametrize(("family", "weights"), [("llama", "LoRA"), ("gemma2", "all weights")])
def test_dpo_equals_that_of_transformers_own_model(family, folders, tokenizer, tmp_path, weights):
    def make(kind):
        model, reference = (KINDS[kind](folders[family]) for _ in range(2))
        options = {"train_dataset": PREFERENCES, "processing_class": tokenizer, "args": DPOConfig(**settings(tmp_path))}
        return seeded(
            DPOTrainer, model, reference if weights == "all weights" else None, **options, **adapters(weights)
        )

    assert_same(make, ["loss", "grad_norm", "rewards/margins", "logits/chosen"])


def count_even_words(completions, **_):
    return [float(sum(int(word[1:]) % 2 == 0 for word in text.split() if word[0] == "w")) for text in completions]


@pytest.mark.parametrize(("family", "weights"), [("llama", "all weights"), ("qwen3_moe", "LoRA")])
def test_grpo_equals_that_of_transformers_own_model(family, folders, tokenizer, tmp_path, weights):
    """With the same samples: rewards depend on each."""

    def make(kind):
        sampling = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1, "per_device_train_batch_size": 4}
        arguments = GRPOConfig(**settings(tmp_path, **sampling))
        model = KINDS[kind](folders[family])
        options = {"args": arguments, "train_dataset": PROMPTS, "processing_class": tokenizer}
        return seeded(GRPOTrainer, model, count_even_words, **options, **adapters(weights))

    assert_same(make, ["loss", "grad_norm", "reward", "kl", "completions/mean_length"])
