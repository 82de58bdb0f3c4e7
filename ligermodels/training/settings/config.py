"""TrainConfig: the settings of a training run, from Python, from the command line and from a TOML file.

Each field is declared once, with its type, default, rule and help text; `ligermodels train` makes its flags from them.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from ligermodels.errors import InputError
from ligermodels.hub.names import DEFAULT_SIZE, list_architectures
from ligermodels.tokenizer.chat_template import BUILT_IN_TEMPLATES
from ligermodels.training.settings.fields import (
    ABOVE_ZERO,
    BELOW_HALF,
    BELOW_ONE,
    COUNT,
    DISTILL_ALONE,
    DPO_ALONE,
    FINITE,
    FRACTION,
    FROM_0_TO_1,
    FROM_A_MILLISECOND,
    IMAGE_TOKENS,
    LENGTH,
    NORM,
    NOT_NEGATIVE,
    ON_EXAMPLES,
    ON_GROUPS,
    ON_PAIRS,
    PAIR_POLICIES,
    POSITIVE,
    POSITIVE_FRACTION,
    REWARD_ALONE,
    RL,
    SEED,
    SIMPO_ALONE,
    SUPERVISED,
    UNIT_SETTINGS,
    WITH_IMAGES,
    WITH_REFERENCE,
    Given,
    OptionalPath,
    OptionalValues,
    Values,
    checked_value,
    hint_of_key,
    setting,
)

Offloaded = Literal["none", "optimizer", "activations", "weights"]
TrainedPart = Literal["vision", "projector", "text"]
LoggerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a run. Every field is also a flag of `ligermodels train` and a key of its TOML files.

    Raises InputError, which names the field, its value and the rule, for a value that a field cannot have; for a field
    that does not exist, with what it is called here.
    """

    def __new__(cls, *_: Any, **given: Any) -> Self:
        for name, value in given.items():
            if name not in FIELDS:
                raise InputError(f"{cls.__name__}: {name}: no such field{hint_of_key(name, value, FIELDS)}")
        return super().__new__(cls)

    # fmt: off
    model: str | None = setting("model", None, "a family (new weights), with its size as llama:8b, a Hub id or a "
        "folder; list prints the families", names="model", built_in=list_architectures())
    size: str = setting("model", DEFAULT_SIZE, "preset of the family")
    revision: str | None = setting("model", None, "branch, tag or commit of a Hub id")

    objective: Literal["sft", "distill", "dpo", "orpo", "cpo", "simpo", "reward", "kto", "grpo"] = setting(
        "model", "sft", "what is minimised: sft, the cross-entropy of the next token; distill, the divergence from a "
        "teacher; reward, the loss of a reward model; a loss of preferences; grpo, reinforcement learning")

    data: OptionalValues[str] = setting("data", None, "training data", metavar="SPEC",
        shown="the embedded stories for a new tiny model", names="data")
    validation_data: OptionalValues[str] = setting("data", None, "validation data", metavar="SPEC",
        shown="a part of --data", names="data")
    text_field: str | None = setting("data", None, "field or column that has the text, or the messages", metavar="NAME",
        shown="the fields of a known format", objectives=SUPERVISED)
    prompt_field: str | None = setting("data", None, "field or column that has the prompt; goes with "
        "--completion-field", metavar="NAME", objectives=SUPERVISED)
    completion_field: str | None = setting("data", None, "field or column that has the completion; only this "
        "is trained on", metavar="NAME", objectives=SUPERVISED)
    validation_fraction: float | None = setting("data", None, "fraction of --data that is held out for validation",
        FRACTION, shown="0.01; of small data up to 0.05, of large data at most about 131,000 tokens")
    sequence_length: int | None = setting("data", None, "tokens per sequence; of preferences, of a packed row", LENGTH,
        shown="2048, or the longest document's if shorter; of preferences twice --max-length; tiny: 256")
    packing: bool = setting("data", True, "sequence packing with document masking", objectives=SUPERVISED)
    chat_template: str | None = setting("data", None, "the chat template that renders chats and is exported: a Jinja "
        f"file, or {', '.join(BUILT_IN_TEMPLATES)}", metavar="FILE|NAME", shown="the model's own",
        names="template", built_in=BUILT_IN_TEMPLATES)
    image_tokens: str | None = setting("data", None, "the most tokens of an image, or fewest:most; larger and smaller "
        "images are resized", IMAGE_TOKENS, metavar="MOST", shown="1024, of models whose images have any size",
        objectives=WITH_IMAGES)
    allow_bad_lines: int = setting("data", 0, "skip up to this many lines that cannot be read", COUNT)

    epochs: float | None = setting("training", None, "passes over the data", ABOVE_ZERO,
        shown="3 for chats and completions, 1 for text and preferences; tiny: by its steps")
    steps: int | None = setting("training", None, "optimizer steps, in place of --epochs", POSITIVE,
        shown="by the epochs; tiny: 800")
    batch_size: int | None = setting("training", None, "global batch: sequences per step, over all ranks and "
        "micro-batches", POSITIVE, shown="32,768 tokens, of text 131,072, at most 1/40 of the data; tiny: 4",
        objectives=SUPERVISED)
    micro_batch_size: int | None = setting("training", None, "sequences per forward pass of a rank; the rest of its "
        "batch is gradient accumulation", POSITIVE, shown="as many as fit into memory; tiny: no accumulation",
        objectives=SUPERVISED)
    optimizer: Literal["adamw", "adamw8bit", "muon"] | None = setting("training", None, "adamw8bit: moments in 8 bits",
        shown="adamw, or adamw8bit to fit into memory; tiny: muon")
    optimizer_state_dtype: Literal["float32", "bfloat16"] | None = setting("training", None, "dtype of the optimizer "
        "states; bfloat16 changes an update by 0.4 %", shown="that of the parameters, or bfloat16 to fit into memory")
    optimizer_in_backward: bool | None = setting("training", None, "update each parameter as soon as its gradient is "
        "complete, which frees the gradient; clips by the running norm of the steps before",
        shown="off, or on to fit into memory", objectives=("sft",))
    offload: OptionalValues[Offloaded] = setting("training", None, "what is kept "
        "in pinned host memory: optimizer, its states; activations, the inputs of checkpointed blocks; weights, "
        "those of blocks in few bits",
        shown="none, or optimizer to fit into memory", may_be_empty=True)
    learning_rate: float | None = setting("training", None, "peak learning rate", ABOVE_ZERO,
        shown="2e-5; LoRA: 2e-4; new weights: 4.5e-3 at width 128, with images 1e-3, 1/width; of preferences and "
        "rewards a quarter to a half of these")
    train_parts: OptionalValues[TrainedPart] = setting("training", None, "parts of a "
        "model with images that are trained; the others are frozen", shown="all; with LoRA its updates alone",
        objectives=WITH_IMAGES)
    vision_learning_rate: float | None = setting("training", None, "peak learning rate of the vision tower", ABOVE_ZERO,
        shown="--learning-rate", objectives=WITH_IMAGES)
    projector_learning_rate: float | None = setting("training", None, "peak learning rate of the projector",
        ABOVE_ZERO, shown="--learning-rate", objectives=WITH_IMAGES)
    schedule: Literal["cosine", "linear", "wsd"] = setting("training", "cosine", "wsd: warmup, stable, decay")
    warmup: int | None = setting("training", None, "steps of linear warmup", COUNT, shown="3 % of the steps; tiny: 30")
    weight_decay: float = setting("training", 0.1, "not applied to norms, biases and embeddings", NOT_NEGATIVE)
    max_grad_norm: float = setting("training", 1.0, "gradient clipping; inf: none", NORM)
    dtype: Literal["float32", "tf32", "bfloat16"] | None = setting("training", None, "compute dtype",
        shown="bfloat16 on a GPU, else float32; tiny: float32")
    param_dtype: Literal["float32", "bfloat16"] | None = setting("training", None, "dtype of the trained parameters",
        shown="bfloat16 for --dtype bfloat16 on one process without LoRA, else float32")
    param_rounding: Literal["exact", "nearest", "stochastic"] = setting("training", "exact", "of updated bfloat16 "
        "parameters; exact: the curve of float32 parameters, 2 more bytes a parameter; nearest: loses small updates; "
        "stochastic: makes them noise")
    float8: bool = setting("training", False, "float8 matrix products in the blocks: of a base that is quantised in "
        "fp8, else through torchao, which needs --compile")
    activation_checkpointing: Literal["none", "auto", "selective", "full"] | None = setting("training", None, "full: "
        "blocks keep only their inputs for the backward pass; selective: attention and the products around it too; "
        "auto: as little of it as memory demands", shown="auto; tiny: none")
    low_memory_loss: bool = setting("training", False, "few logits at a time and no gradient of the head in fp32; the "
        "head takes a third more time", objectives=("sft",))
    compile: bool = setting("training", False, "torch.compile each block")
    seed: int = setting("training", 0, "seed of new weights, data order and dropout", SEED)
    deterministic: bool = setting("training", False, "the same bits in every run on the same devices; slower attention")

    pairs: int | None = setting("preferences", None, "pairs of a step, over all ranks", POSITIVE,
        shown="64, at most 1/40 of the data", objectives=ON_PAIRS)
    examples: int | None = setting("preferences", None, "judged completions of a step, over all ranks", LENGTH,
        shown="64, at most 1/40 of the data", objectives=ON_EXAMPLES)
    max_length: int = setting("preferences", 1024, "most tokens of a prompt with one completion", LENGTH,
        objectives=ON_GROUPS)
    max_prompt_length: int | None = setting("preferences", None, "a longer prompt loses its beginning", LENGTH,
        shown="no limit", objectives=(*ON_GROUPS, *RL))
    too_long: Literal["drop", "cut"] = setting("preferences", "drop", "what becomes of a prompt with a completion "
        "longer than --max-length", objectives=ON_GROUPS)
    share_prompts: bool = setting("preferences", True, "the completions of a prompt share one copy of it",
        objectives=(*ON_PAIRS, *RL))
    loss: OptionalValues[str] = setting("preferences", None, "the loss of a pair, or several that are added, such "
        "as sigmoid sft=0.2; grpo: grpo, dapo, bnpo, dr_grpo, luspo, cispo, sapo, vespo, gmpo or rloo", metavar="NAME",
        shown="sigmoid; kto: kto; grpo: dapo", objectives=("dpo", "cpo", "kto", *RL))
    beta: float | None = setting("preferences", None, "how closely the policy keeps to the reference; of losses "
        "without one, their scale", ABOVE_ZERO, shown="0.1; simpo: 2; grpo: no reference",
        objectives=(*PAIR_POLICIES, *ON_EXAMPLES, *RL))
    label_smoothing: float | None = setting("preferences", None, "fraction of pairs whose label is wrong", BELOW_HALF,
        shown="0", objectives=("dpo", "cpo", "simpo"))
    f_divergence: str | None = setting("preferences", None, "divergence from the reference: reverse_kl, forward_kl, "
        "js_divergence or alpha_divergence:ALPHA", metavar="NAME", shown="reverse_kl", objectives=DPO_ALONE)
    ld_alpha: float | None = setting("preferences", None, "weight of the tokens beyond the length of the shorter side "
        "(LD-DPO)", FROM_0_TO_1, shown="1", objectives=DPO_ALONE)
    wpo: bool = setting("preferences", False, "weight pairs by how probable they are under the policy (WPO)",
        objectives=DPO_ALONE)
    discopop_tau: float | None = setting("preferences", None, "temperature of --loss discopop", ABOVE_ZERO,
        shown="0.05", objectives=DPO_ALONE)
    gamma: float | None = setting("preferences", None, "margin between the rewards of the sides", NOT_NEGATIVE,
        shown="0.5", objectives=SIMPO_ALONE)
    alpha: float | None = setting("preferences", None, "exponent of AlphaPO's rewards", FINITE, shown="0: SimPO",
        objectives=SIMPO_ALONE)
    nll_weight: float | None = setting("preferences", None, "weight of the chosen side's negative log-likelihood",
        NOT_NEGATIVE, shown="cpo: 1; simpo: 0", objectives=("cpo", "simpo"))
    desirable_weight: float | None = setting("preferences", None, "weight of good completions", NOT_NEGATIVE,
        shown="1", objectives=ON_EXAMPLES)
    undesirable_weight: float | None = setting("preferences", None, "weight of bad completions", NOT_NEGATIVE,
        shown="1", objectives=ON_EXAMPLES)
    reference: str | None = setting("preferences", None, "the model that the policy is compared with: base, adapter, "
        "precomputed, model, model:FOLDER, or ema:ALPHA/STEPS", metavar="KIND",
        shown="base with LoRA, the adapter with --adapter, else precomputed", objectives=WITH_REFERENCE,
        names="reference")
    mean_logits: bool = setting("preferences", False, "log the mean logit of each side's tokens, as logits/chosen and "
        "logits/rejected", objectives=(*PAIR_POLICIES, *ON_EXAMPLES))

    center_rewards: float | None = setting("preferences", None, "weight of the squared sum of a pair's rewards, which "
        "keeps them around 0", NOT_NEGATIVE, shown="0", objectives=REWARD_ALONE)

    teacher: str | None = setting("distillation", None, "the model to learn from: a Hub id or a folder; or top-k: "
        "teacher_ids and teacher_logprobs of the data", metavar="NAME", objectives=DISTILL_ALONE, names="model",
        built_in=("top-k",))
    teacher_states: OptionalPath = setting("distillation", None, "store the teacher's hidden states here once, and "
        "train from them, without the teacher in memory", metavar="FOLDER", objectives=DISTILL_ALONE, names="folder")
    divergence: str = setting("distillation", "forward_kl", "from the teacher: forward_kl, reverse_kl, jsd:B, tvd or "
        "cosine", metavar="KIND", objectives=DISTILL_ALONE)
    temperature: float | None = setting("distillation", None, "divides the logits: of both models, and of sampling; "
        "grpo: of sampling and of the loss", ABOVE_ZERO, shown="1", objectives=(*DISTILL_ALONE, *RL))
    ce_weight: float = setting("distillation", 0.0, "weight of the cross-entropy of the data beside the divergence",
        NOT_NEGATIVE, objectives=DISTILL_ALONE)
    on_policy: float = setting("distillation", 0.0, "fraction of the steps on completions that the student samples",
        FROM_0_TO_1, objectives=DISTILL_ALONE)

    prompts: int | None = setting("reinforcement", None, "prompts of a step, over all ranks", POSITIVE,
        shown="16; tiny: 4", objectives=RL)
    generations: int = setting("reinforcement", 8, "completions that are sampled of each prompt", LENGTH, objectives=RL)
    max_completion_length: int | None = setting("reinforcement", None, "most tokens of a completion that is sampled",
        POSITIVE, shown="512, or what fits behind the longest prompt; tiny: 64", objectives=(*RL, *DISTILL_ALONE))
    stop: Values[str] = setting("reinforcement", (), "texts that end a completion, beside the model's stop tokens",
        metavar="TEXT", objectives=RL)
    reward: OptionalValues[str] = setting("reinforcement", None, "reward functions, each with a weight or without: "
        "FILE.py:FUNCTION=1.0, model:FOLDER of a reward model, or the built-in exact, number, format:REGEX, "
        "length[:TOKENS]", metavar="NAME",
        objectives=RL, names="reward")
    reward_timeout: float = setting("reinforcement", 300.0, "seconds that a reward function may take",
        FROM_A_MILLISECOND, objectives=RL)
    reward_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = setting("reinforcement",
        "sum_then_normalize", "how several rewards become one advantage; normalize_then_sum is GDPO", objectives=RL)
    scale_rewards: Literal["group", "batch", "none"] | None = setting("reinforcement", None, "whose standard deviation "
        "divides the advantages", shown="group", objectives=RL)
    steps_per_generation: int = setting("reinforcement", 1, "steps that the prompts sampled at a time are divided into",
        POSITIVE, objectives=RL)
    iterations: int = setting("reinforcement", 1, "times that each completion is trained on", POSITIVE, objectives=RL)
    epsilon: float | None = setting("reinforcement", None, "how far the importance ratio may fall below 1", ABOVE_ZERO,
        shown="0.2; gmpo: 0.4", objectives=RL)
    epsilon_high: float | None = setting("reinforcement", None, "how far it may rise above 1; cispo: its bound",
        ABOVE_ZERO, shown="--epsilon; cispo: 5", objectives=RL)
    delta: float | None = setting("reinforcement", None, "bound of the ratio where the advantage is negative",
        ABOVE_ZERO, shown="no bound", objectives=RL)
    importance_sampling_level: Literal["token", "sequence"] | None = setting("reinforcement", None, "whose ratio a "
        "token has; sequence is GSPO", shown="token; luspo: sequence", objectives=RL)
    kl_correction: bool = setting("reinforcement", True, "multiply the KL divergence by the importance ratio",
        objectives=RL)
    sampler: Literal["own", "vllm"] = setting("reinforcement", "own", "what samples completions: own, the engine of "
        "this package; vllm, in the same process", objectives=RL)
    sampler_correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = (
        setting("reinforcement", None, "weight by the ratio of the policy and the sampler", shown="none; with "
        "--sampler vllm: sequence_mask", objectives=RL))
    sampler_clip: float = setting("reinforcement", 3.0, "upper bound of that ratio", ABOVE_ZERO, objectives=RL)
    sampler_clip_min: float | None = setting("reinforcement", None, "lower bound of that ratio", ABOVE_ZERO,
        shown="no bound", objectives=RL)
    off_policy_threshold: float | None = setting("reinforcement", None, "leave out completions with a negative "
        "advantage whose mean log-probability fell by more than this", ABOVE_ZERO, shown="leave out none",
        objectives=RL)
    top_entropy: float = setting("reinforcement", 1.0, "fraction of the tokens, those with the highest entropy, that "
        "are trained on", POSITIVE_FRACTION, objectives=RL)
    entropy_coef: float = setting("reinforcement", 0.0, "weight of the entropy, which the loss then raises",
        NOT_NEGATIVE, objectives=RL)
    entropy_target: float | None = setting("reinforcement", None, "adapt --entropy-coef by 0.005 a step, up where the "
        "entropy is at most this", ABOVE_ZERO, shown="--entropy-coef stays", objectives=RL)
    pass_at: int | None = setting("reinforcement", None, "validate also with this many sampled completions of each "
        "held-out prompt, as pass@K", LENGTH, metavar="K", shown="greedy completions alone", objectives=RL)
    mask_truncated: bool = setting("reinforcement", False, "leave out completions that reached "
        "--max-completion-length", objectives=RL)
    keep_zero_spread: bool = setting("reinforcement", False, "keep prompts whose completions all got the same reward",
        objectives=RL)
    completions_every: int = setting("reinforcement", 1, "steps between generations that are written to "
        "completions.jsonl; 0: none", COUNT, objectives=RL)

    lora_rank: int | None = setting("LoRA", None, "rank of the LoRA updates", POSITIVE, shown="train all weights")
    lora_alpha: float | None = setting("LoRA", None, "the updates are scaled by alpha / rank", ABOVE_ZERO,
        shown="2 x rank")
    lora_dropout: float = setting("LoRA", 0.0, "dropout on the input of the updates", BELOW_ONE)
    lora_targets: Values[str] = setting("LoRA", ("all-linear",), "projections, as q_proj v_proj or q_proj,v_proj; "
        "experts for routed experts", metavar="NAME")
    modules_to_save: Values[str] = setting("LoRA", (), "train these as a whole beside the updates: embed_tokens, "
        "lm_head, norm", metavar="NAME")
    adapter: str | None = setting("LoRA", None, "continue this adapter in PEFT's format, with its rank, alpha, targets "
        "and base model", metavar="FOLDER", names="model")
    quantize: Literal["nf4", "fp8", "mxfp4"] | None = setting("LoRA", None, "QLoRA: the format of the frozen linears "
        "and experts in memory", shown="that of --dtype; NF4 as it is stored")
    lora_export: Literal["merged", "adapter"] | None = setting("LoRA", None, "a whole model, or an adapter in PEFT's "
        "format", shown="merged; with --adapter: adapter")

    output: OptionalPath = setting("run", None, "a new folder", metavar="FOLDER",
        shown="runs/MODEL, numbered if it exists", names="folder")
    resume: OptionalPath = setting("run", None, "continue the run in this folder, with the settings of its train.toml",
        metavar="FOLDER", names="folder")
    allow_changes: bool = setting("run", False, "resume although settings that change the result differ")
    checkpoint_every: int | None = setting("run", None, "steps between checkpoints, with one at the end; 0: only when "
        "stopped", COUNT, shown="by time, and one at the end")
    checkpoint_minutes: float = setting("run", 30.0, "minutes between checkpoints without --checkpoint-every",
        ABOVE_ZERO)
    keep_checkpoints: int = setting("run", 2, "number of checkpoints kept, the newest", POSITIVE)
    best_checkpoint: bool = setting("run", False, "export the weights with the lowest validation loss, whose "
        "checkpoint is kept, instead of the last")
    early_stopping: int | None = setting("run", None, "end the run after this many validations in a row without a "
        "lower loss", POSITIVE, shown="take all steps")
    no_export: bool = setting("run", False, "do not write a model at the end")
    push_to_hub: str | None = setting("run", None, "upload the export to this repository of the Hub", metavar="NAME",
        names="repository")
    on_nan: Literal["stop", "skip"] = setting("run", "stop", "at a loss or gradient norm that is not finite")
    context_parallel: int = setting("run", 1, "context parallelism: ranks that share each row of tokens", POSITIVE,
        objectives=("sft", *ON_GROUPS, *RL))
    expert_parallel: int = setting("run", 1, "expert parallelism: ranks over which routed experts are distributed",
        POSITIVE, objectives=("sft",))
    dp_replicate: int = setting("run", 1, "HSDP: model replicas, each sharded over ranks / replicas ranks", POSITIVE)

    eval_every: int | None = setting("monitoring", None, "steps between validations", POSITIVE,
        shown="a tenth of the steps; tiny: 400")
    log_every: int = setting("monitoring", 1, "steps between lines where there is no progress bar, with one at the "
        "end; 0: no lines, no bar", COUNT)
    log_to: Values[LoggerName] = setting("monitoring", (), "loggers beside "
        "metrics.jsonl; without it nothing is sent anywhere")
    profile: int | None = setting("monitoring", None, "trace three steps from this one on", POSITIVE, metavar="STEP")
    # fmt: on

    def __post_init__(self) -> None:
        for name, field in FIELDS.items():
            self._set(name, checked_value(field, *type_of(name), getattr(self, name)))
        family, colon, size = (self.model or "").partition(":")
        if colon and family in list_architectures():
            if self.size not in (DEFAULT_SIZE, size):
                raise InputError(f"size is {self.size!r}, but model is {self.model!r}; leave one size out")
            self._set("model", family)
            self._set("size", size)
        for name in ("lora_targets", "modules_to_save"):
            values = getattr(self, name)
            self._set(name, tuple(" ".join(values).replace(",", " ").split()) or values)
        if self.offload is not None and "none" in self.offload:
            if len(self.offload) > 1:
                raise InputError(f"--offload {' '.join(self.offload)}: none goes without another; leave one out")
            self._set("offload", ())
        if self.resume is not None and self.output is None:
            self._set("output", self.resume)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def has_new_weights(self) -> bool:
        """Whether the model is a family, not a checkpoint."""
        return self.model in list_architectures()

    @property
    def is_tiny(self) -> bool:
        """Whether the model is a new one of the smallest preset, whose defaults suit the embedded data."""
        return self.has_new_weights and self.size == DEFAULT_SIZE

    @property
    def longest_completion(self) -> int:
        """The most tokens of a sampled completion. Tiny models have few positions."""
        return self.max_completion_length or (64 if self.is_tiny else 512)

    @property
    def title(self) -> str:
        """The model as `model` takes it: a family with its size, where that is not the default."""
        return f"{self.model}" if self.size == DEFAULT_SIZE else f"{self.model}:{self.size}"

    @property
    def float8_by_torchao(self) -> bool:
        """Whether torchao makes products float8; those of a quantised base are its layout's."""
        return self.float8 and not self.quantize

    @property
    def with_lora(self) -> bool:
        """Whether LoRA is trained, new or that of an adapter."""
        return self.lora_rank is not None or self.adapter is not None

    @property
    def exports_adapter(self) -> bool:
        """Whether the run ends with an adapter, and not with a whole model."""
        return self.with_lora and (self.lora_export or ("adapter" if self.adapter else "merged")) == "adapter"


class RunConfig(TrainConfig):
    """The settings of a run, with those chosen that were not given (planning/defaults.py).

    The settings of its placement are None until the run is fitted into memory (planning/placement.py). The micro-batch
    size stays so: it depends on the devices, and a run may resume on others.
    """

    sequence_length: int
    steps: int
    learning_rate: float
    warmup: int
    dtype: Literal["float32", "tf32", "bfloat16"]
    param_dtype: Literal["float32", "bfloat16"]
    activation_checkpointing: Literal["none", "auto", "selective", "full"]
    eval_every: int
    optimizer: Literal["adamw", "adamw8bit", "muon"]
    optimizer_in_backward: bool
    offload: tuple[Offloaded, ...]  # empty for none

    @property
    def loses_updates(self) -> bool:
        """Whether rounding loses updates that are small beside their weight."""
        return self.param_dtype == "bfloat16" and self.param_rounding != "exact"

    @property
    def units(self) -> int:
        """What a step takes, over all ranks: sequences, pairs, examples or prompts."""
        return getattr(self, UNIT_SETTINGS[self.objective])


@functools.cache
def type_of(name: str) -> tuple[Any, bool]:
    """The type of one value of a field, without None, and whether the field holds several of them."""
    kind = TYPES[name]
    if typing.get_origin(kind) is Given:
        kind = typing.get_args(kind)[0]
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(option for option in typing.get_args(kind) if option is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        return typing.get_args(kind)[0], True
    return kind, False


TYPES: Mapping[str, Any] = typing.get_type_hints(TrainConfig)
FIELDS: Mapping[str, dataclasses.Field] = {field.name: field for field in dataclasses.fields(TrainConfig)}
