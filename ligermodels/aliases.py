"""What the flags of other training tools are called here, for the hint of an error: `--lr` is `--learning-rate`.

The other tools are Hugging Face's TrainingArguments and TRL, axolotl, Unsloth, LLaMA-Factory, torchtune and
Liger-Kernel; to generate, also llm, ollama, llama.cpp and vLLM. Knows flags and values as text; must not know what they
do. Names are written with underscores here: on a command line and in a file they may have either.
"""

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import PurePath
from typing import NamedTuple


def flag_of(name: str) -> str:
    """A flag as it is written on a command line."""
    return f"--{name.replace('_', '-')}"


def first_of(values: Sequence[str]) -> str | None:
    return values[0] if values else None


class Alias(NamedTuple):
    """Names that other tools have for one of our flags.

    names: separated by spaces. flag: ours; None where there is none. value: our value for the values given, which may
    be none; None where no value is the same. note: what else differs, or what to do where there is no flag.
    """

    names: str
    flag: str | None = None
    value: Callable[[Sequence[str]], str | None] = first_of
    note: str = ""


def switch(on: str, off: str | None) -> Callable[[Sequence[str]], str | None]:
    """The value for one that switches something on or off; no value switches it on."""
    return lambda values: off if values and values[0].lower() in ("false", "off", "no", "none", "0") else on


def one_of(**ours: str) -> Callable[[Sequence[str]], str | None]:
    """The value that begins as one of these keys does, in any case."""
    return lambda values: next((ours[key] for key in ours if values and values[0].lower().startswith(key)), None)


def no_value(values: Sequence[str]) -> None:
    """For values that cannot be converted."""


def constant(value: str) -> Callable[[Sequence[str]], str]:
    return lambda values: value


def hub_source(values: Sequence[str]) -> str | None:
    """A data set of the Hub, or a file, as a source of --data."""
    if len(values) != 1:
        return None
    is_name = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", values[0]) and not PurePath(values[0]).suffix
    return f"hub:{values[0]}" if is_name else values[0]


def below_one(values: Sequence[str]) -> str | None:
    """A fraction; theirs may also be a count, which ours is not."""
    return values[0] if values and values[0].startswith(("0.", ".")) else None


DTYPE_OF = one_of(
    bf="bfloat16", fp16="bfloat16", float16="bfloat16", half="bfloat16", fp32="float32", float32="float32", tf32="tf32"
)  # fmt: skip
GLOBAL_BATCH = "--batch-size is the global batch: sequences per device x devices x accumulation steps"
ALL_CORES = "all cores are used; leave it out"
FUSED = "the kernels are always fused; leave it out"
TORCHRUN = "start one process per GPU: torchrun --nproc-per-node N train.py ...; FSDP2 shards the model over them"
CHATS = "of chats and prompts only the answers are trained on, of texts every token; leave it out"
QUANTISED = "goes with --lora-rank; a checkpoint of bitsandbytes in NF4 needs no flag"
TRAIN_ALIASES = (
    # The model
    Alias("model_name_or_path base_model model_name model_id model_path pretrained_model_name_or_path", "model"),
    Alias("model_revision revision_of_model", "revision"),
    Alias("trust_remote_code", note="remote code is never run; leave it out"),
    Alias("load_in_4bit qlora quantization_bit quantization use_qlora", "quantize", constant("nf4"), QUANTISED),
    Alias("load_in_8bit", note="8-bit integers are not supported; --quantize nf4 with --lora-rank takes less memory"),
    # Data
    Alias("dataset datasets dataset_name dataset_path train_dataset", "data", hub_source),
    Alias("train_data train_file train_files data_path data_files training_data", "data", " ".join),
    Alias("eval_file eval_data eval_dataset validation_file test_datasets val_data", "validation_data", " ".join),
    Alias("val_set_size val_size eval_size val_split", "validation_fraction", below_one),
    Alias(
        "max_seq_length max_seq_len sequence_len seq_length seq_len cutoff_len block_size model_max_length "
        "max_sequence_length context_length",
        "sequence_length",
    ),
    Alias("sample_packing packed use_packing", "packing", switch("on", "off")),
    Alias("padding_free pad_to_sequence_len group_by_length", note="packed sequences have no padding; leave it out"),
    Alias("completion_only_loss assistant_only_loss train_on_inputs train_on_responses_only mask_prompt", note=CHATS),
    Alias("train_on_prompt roles_to_train train_on_eos response_template", note=CHATS),
    Alias("template", "chat_template"),
    Alias("dataset_text_field text_column", "text_field"),
    Alias("dataset_num_proc preprocessing_num_workers dataset_processes dataloader_num_workers num_workers",
        note=ALL_CORES),
    Alias("max_samples max_train_samples", note="name a part of the data, such as --data hub:NAME:train[:1000]"),
    Alias("streaming", note="large data is tokenised once and memory-mapped; leave it out"),
    # Batch and optimizer
    Alias("num_train_epochs num_epochs n_epochs max_epochs", "epochs"),
    Alias("max_steps max_train_steps num_train_steps total_steps train_iters", "steps"),
    Alias("global_batch_size train_batch_size total_batch_size", "batch_size"),
    Alias("per_device_train_batch_size per_gpu_train_batch_size device_batch_size", "micro_batch_size",
        note=GLOBAL_BATCH),
    Alias("gradient_accumulation_steps grad_accum_steps accumulate_grad_batches", "micro_batch_size", no_value,
        "accumulation steps are --batch-size / GPUs / --micro-batch-size, because --batch-size is the global batch"),
    Alias("per_device_eval_batch_size eval_batch_size", note="validation takes --micro-batch-size; leave it out"),
    Alias("auto_find_batch_size", note="--activation-checkpointing auto makes a batch fit; see --dry-run"),
    Alias("optim optimizer_name optimizer_type optim_type", "optimizer",
        one_of(adamw_8bit="adamw8bit", adamw_bnb_8bit="adamw8bit", paged_adamw_8bit="adamw8bit", adamw="adamw",
            muon="muon"), "one of adamw, adamw8bit, muon"),
    Alias("optim_args adam_beta1 adam_beta2 adam_epsilon beta1 beta2", note="these are fixed; leave it out"),
    Alias("lr peak_lr max_lr base_lr", "learning_rate"),
    Alias("lr_scheduler_type lr_scheduler scheduler scheduler_type lr_schedule", "schedule",
        one_of(cosine="cosine", linear="linear", warmup_stable_decay="wsd", wsd="wsd"), "one of cosine, linear, wsd"),
    Alias("min_lr cosine_min_lr_ratio lr_scheduler_kwargs", note="cosine ends at a tenth of the peak; leave it out"),
    Alias("warmup_steps num_warmup_steps lr_warmup_steps", "warmup"),
    Alias("warmup_ratio warmup_fraction", "warmup", no_value, "it is a number of steps: the ratio x --steps"),
    Alias("clip_grad_norm gradient_clipping grad_clip gradient_clip_val max_norm", "max_grad_norm"),
    Alias("random_state random_seed data_seed", "seed"),
    Alias("full_determinism enable_full_determinism", "deterministic", switch("on", "off")),
    # Precision, memory and speed
    Alias("bf16", "dtype", switch("bfloat16", "float32")),
    Alias("fp16", "dtype", switch("bfloat16", "float32"), "training in float16 is not supported"),
    Alias("tf32", "dtype", switch("tf32", "float32")),
    Alias("mixed_precision torch_dtype model_dtype precision compute_dtype", "dtype", DTYPE_OF,
        "one of float32, tf32, bfloat16"),
    Alias("gradient_checkpointing use_gradient_checkpointing enable_activation_checkpointing recompute",
        "activation_checkpointing", switch("auto", "none")),
    Alias("gradient_checkpointing_kwargs use_reentrant", note="checkpointing is never reentrant; leave it out"),
    Alias("torch_compile use_torch_compile compile_model", "compile", switch("on", "off")),
    Alias("fp8 enable_fp8 use_fp8", "float8", switch("on", "off"), "it needs --compile"),
    Alias("liger_kernel use_liger_kernel use_liger enable_liger_kernel liger_rope liger_rms_norm", note=FUSED),
    Alias("liger_glu_activation liger_swiglu liger_cross_entropy liger_fused_linear_cross_entropy", note=FUSED),
    Alias("flash_attention flash_attn flash_attention_2 use_flash_attention_2 attn_implementation sdp_attention",
        note="attention without a mask over packed documents is always used; leave it out"),
    Alias("xformers_attention eager_attention", note="attention is never eager; leave it out"),
    # LoRA
    Alias("lora_r r peft_lora_r lora_dim", "lora_rank"),
    Alias("use_peft use_lora", "lora_rank", switch("16", None)),
    Alias("finetuning_type", "lora_rank", one_of(lora="16"), "leave it out to train all weights"),
    Alias("peft_lora_alpha", "lora_alpha"),
    Alias("lora_target_modules target_modules lora_target lora_attn_modules", "lora_targets",
        lambda values: "all-linear" if list(values) == ["all"] else " ".join(values)),
    Alias("lora_target_linear", "lora_targets", constant("all-linear")),
    Alias("lora_modules_to_save additional_target", "modules_to_save", " ".join),
    Alias("save_adapter_only save_adapter_weights_only", "lora_export", constant("adapter")),
    Alias("merge_lora", "lora_export", constant("merged")),
    Alias("lora_model_dir adapter_name_or_path", "adapter"),
    Alias("use_dora use_rslora peft_use_dora loraplus_lr_ratio pissa_init", note="plain LoRA is trained; leave it out"),
    # Reinforcement learning
    Alias("num_generations", "generations"),
    Alias("num_iterations", "iterations"),
    Alias("reward_funcs reward_functions reward_func", "reward", " ".join),
    Alias("reward_weights", "reward", no_value, "a weight follows its function: --reward FILE.py:FUNCTION=0.5"),
    Alias("mask_truncated_completions", "mask_truncated", switch("on", "off")),
    Alias("multi_objective_aggregation", "reward_aggregation"),
    Alias("use_bias_correction_kl", "kl_correction", switch("on", "off")),
    Alias("top_entropy_quantile", "top_entropy"),
    Alias("off_policy_mask_threshold", "off_policy_threshold"),
    Alias("use_vllm", "sampler", switch("vllm", "own")),
    Alias("vllm_importance_sampling_mode", "sampler_correction"),
    Alias("vllm_importance_sampling_clip_max", "sampler_clip"),
    Alias("vllm_importance_sampling_clip_min", "sampler_clip_min"),
    Alias("top_p top_k min_p repetition_penalty",
        note="completions are drawn from the whole distribution that the loss sees: use --temperature alone"),
    # The run, checkpoints and GPUs
    Alias("output_dir out_dir save_dir", "output"),
    Alias("overwrite_output_dir", note="a run has a new folder; leave it out"),
    Alias("run_name experiment_name wandb_name wandb_run_name exp_name", "output",
        lambda values: f"runs/{values[0]}" if values else None, "loggers name a run by its folder"),
    Alias("resume_from_checkpoint resume_from auto_resume_from_checkpoints", "resume", no_value,
        "the folder of the run; it continues from the newest checkpoint"),
    Alias("save_steps save_interval save_every checkpoint_interval checkpointing_steps", "checkpoint_every"),
    Alias("save_strategy saves_per_epoch", "checkpoint_every", no_value, "a number of steps"),
    Alias("save_total_limit max_checkpoints keep_last_n_checkpoints", "keep_checkpoints"),
    Alias("save_only_model save_safetensors", note="exports are safetensors, and checkpoints are whole; leave it out"),
    Alias("load_best_model_at_end metric_for_best_model save_best", "best_checkpoint", no_value),
    Alias("early_stopping_patience patience", "early_stopping"),
    Alias("hub_model_id push_to_hub_model_id", "push_to_hub"),
    Alias("num_gpus n_gpus gpus devices nproc nproc_per_node num_processes num_nodes nnodes", note=TORCHRUN),
    Alias("deepspeed fsdp fsdp_config ddp use_fsdp strategy distributed_type", note=TORCHRUN),
    Alias("tensor_parallel_size pipeline_parallel_size",
        note="FSDP2 shards the model over the processes of torchrun; leave it out"),
    Alias("context_parallel_size context_parallel_degree sequence_parallel_degree sequence_parallel_size cp_size "
        "sp_size ulysses_size", "context_parallel"),
    Alias("expert_parallel_size expert_parallel_degree expert_model_parallel_size ep_size", "expert_parallel"),
    Alias("data_parallel_replicate_degree hsdp dp_replicate_size", "dp_replicate"),
    Alias("do_train do_eval", note="a run trains and validates; leave it out"),
    Alias("rl stage trainer", "objective",
        one_of(sft="sft", dpo="dpo", ipo="dpo", orpo="orpo", cpo="cpo", simpo="simpo", kto="kto", gkd="distill",
            kd="distill", distill="distill", reward="reward", rm="reward", grpo="grpo")),
    # Preferences
    Alias("loss_type dpo_loss_type pref_loss", "loss", " ".join, "weights go with the names, as sigmoid sft=0.2"),
    Alias("loss_weights", "loss", no_value, "weights go with the names, as sigmoid sft=0.2"),
    Alias("rpo_alpha pref_ftx", "loss", lambda values: f"sigmoid sft={values[0]}" if values else None),
    Alias("rl_beta pref_beta dpo_beta orpo_alpha", "beta"),
    Alias("dpo_label_smoothing", "label_smoothing"),
    Alias("f_divergence_type", "f_divergence"),
    Alias("f_alpha_divergence_coef", "f_divergence",
        lambda values: f"alpha_divergence:{values[0]}" if values else None),
    Alias("simpo_gamma", "gamma"),
    Alias("cpo_alpha", "nll_weight"),
    Alias("kto_desirable_weight kto_chosen_weight", "desirable_weight"),
    Alias("kto_undesirable_weight kto_rejected_weight", "undesirable_weight"),
    Alias("use_weighting dpo_use_weighting", "wpo", switch("on", "off")),
    Alias("precompute_ref_log_probs", "reference", switch("precomputed", None)),
    Alias("ref_model ref_model_name_or_path", "reference", lambda values: f"model:{values[0]}" if values else "model"),
    Alias("force_use_ref_model", "reference", constant("model")),
    Alias("sync_ref_model ref_model_mixup_alpha ref_model_sync_steps", "reference", no_value,
        "a moving average is ema:ALPHA/STEPS, such as ema:0.6/512"),
    Alias("max_prompt_len", "max_prompt_length"),
    Alias("truncation_mode", "too_long", no_value, "drop or cut"),
    Alias("reference_free", note="--objective simpo, cpo and orpo have no reference; leave it out"),
    Alias("disable_dropout", note="there is no dropout but --lora-dropout; leave it out"),
    # Reward models and distillation
    Alias("reward_model", "objective", constant("reward")),
    Alias("center_rewards_coefficient", "center_rewards"),
    Alias("num_labels", note="a reward model has one label; leave it out"),
    Alias("kd_trainer", "objective", constant("distill")),
    Alias("teacher_model_name_or_path teacher_model teacher_name_or_path", "teacher"),
    Alias("kd_temperature", "temperature"),
    Alias("kd_ce_alpha hard_loss_weight", "ce_weight"),
    Alias("lmbda", "on_policy"),
    Alias("gkd_beta kd_beta", "divergence", no_value, "beta 0 is forward_kl, 1 is reverse_kl, b between is jsd:b"),
    Alias("config_file config_path", "config"),
    # Monitoring
    Alias("eval_steps eval_interval evaluation_steps val_check_interval run_val_every_n_steps", "eval_every"),
    Alias("eval_strategy evaluation_strategy evals_per_epoch", "eval_every", no_value, "a number of steps"),
    Alias("report_to tracker logger metric_logger", "log_to",
        lambda values: None if {*values} & {"none", "all"} else " ".join(values), "leave it out for none"),
    Alias("use_wandb wandb_project wandb_entity wandb_mode", "log_to", constant("wandb"),
        "its settings are variables such as WANDB_PROJECT"),
    Alias("use_tensorboard logging_dir", "log_to", constant("tensorboard"), "its files are in the run's folder"),
    Alias("logging_steps log_every_n_steps log_interval logging_strategy log_every",
        note="every step is a line of metrics.jsonl; leave it out"),
    Alias("profiler profile_step profiler_steps", "profile", no_value, "the step at which the trace begins"),
)  # fmt: skip
GENERATE_ALIASES = (
    Alias("max_tokens max_length num_predict n_predict max_new_token tokens", "max_new_tokens"),
    Alias("temp", "temperature"),
    Alias("do_sample sample", "temperature", switch("0.7", "0")),
    Alias("topk k", "top_k"),
    Alias("topp p nucleus", "top_p"),
    Alias("random_seed", "seed"),
    Alias("text message input query", "prompt"),
    Alias("prompt_file", "prompt", constant("-"), "the file is standard input: --prompt - < FILE"),
    Alias("input_file prompts input_jsonl prompts_file", "file"),
    Alias("output_file out out_file output_path save_path", "output"),
    Alias("repeat_penalty", "repetition_penalty"),
    Alias("stop_strings stop_sequences stop_words", "stop", " ".join),
    Alias("num_return_sequences num_generations n best_of", "num_samples"),
    Alias("return_logprobs output_logprobs", "logprobs", no_value),
    Alias("max_model_len num_ctx ctx_size context_length max_seq_length", "cache_tokens",
        note="it holds all prompts that run at a time"),
    Alias("batch_size num_workers max_num_seqs", note="as many prompts run at a time as --cache-tokens hold"),
    Alias("system_prompt", "system"),
    Alias("interactive conversation use_chat_template apply_chat_template", "chat", no_value),
    Alias("lora lora_path adapter_path adapter_name_or_path peft_model lora_modules", "adapter"),
    Alias("torch_dtype precision", "dtype", one_of(
        bf="bfloat16", fp16="float16", float16="float16", half="float16", fp32="float32", float32="float32")),
    Alias("device_map", "device", lambda values: None if "auto" in values else first_of(values)),
    Alias("gpu", "device", constant("cuda")),
    Alias("model model_name model_name_or_path base_model model_id", note="the model is an argument without a flag"),
    Alias("stream", note="text is always printed as it is generated; leave it out"),
    Alias("load_in_4bit quantization", "quantize", constant("nf4")),
    Alias("load_in_8bit", note="8-bit integers are not supported; give --quantize fp8 or nf4"),
    Alias("num_beams use_beam_search typical_p",
        note="decoding is greedy, or samples with --temperature, --top-k and --top-p"),
)  # fmt: skip


def alias_hint(
    name: str,
    values: Sequence[str],
    aliases: Sequence[Alias],
    known: Collection[str],
    spelled: Callable[[str, str | None], str],
) -> str:
    """The end of a message about a flag that does not exist: what it is called here; empty if that is not known.

    name: as it was given, with its values. known: the flags that can be given there, with underscores. spelled: a flag
    of ours and its value, as they are written there.
    """
    name = name.lstrip("-").replace("-", "_").lower()
    for alias in (Alias(name, name, no_value), *aliases):
        if name in alias.names.split() and (alias.flag is None or alias.flag in known):
            here = [] if alias.flag is None else [f"here it is {spelled(alias.flag, alias.value(values) or None)}"]
            return "".join(f"; {part}" for part in (*here, alias.note) if part)
    return ""
