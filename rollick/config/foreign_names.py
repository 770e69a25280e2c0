"""Names of settings in other libraries (TRL, transformers, verl, OpenRLHF), and ours for them.

A recipe does not accept these names. The message about an unknown key names our key.
"""

from __future__ import annotations

from collections.abc import Mapping

GROUPS = "rollout.groups_per_step"
BATCH = "train.batch_size"
TOKENS = "sampling.max_tokens"
KL = "algorithm.kl.coefficient"
LR = "train.optimizer.lr"

FOREIGN_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_generations": ("rollout.group_size",),
    "n_samples_per_prompt": ("rollout.group_size",),
    **dict.fromkeys(("generation_batch_size", "rollout_batch_size"), (GROUPS,)),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size"), (GROUPS, BATCH)),
    **dict.fromkeys(("max_completion_length", "max_response_length", "max_new_tokens"), (TOKENS,)),
    **dict.fromkeys(("response_length", "generate_max_len"), (TOKENS,)),
    **dict.fromkeys(("max_prompt_length", "prompt_max_len"), ("data.max_prompt_tokens",)),
    **dict.fromkeys(("max_model_len", "max_seq_length", "max_seq_len"), ("infer.max_length",)),
    **dict.fromkeys(("learning_rate", "actor_learning_rate"), (LR,)),
    "critic_learning_rate": ("critic.optimizer.lr",),
    **dict.fromkeys(("max_grad_norm", "grad_clip_norm"), ("train.optimizer.grad_clip",)),
    "lr_scheduler_type": ("train.schedule.shape",),
    "warmup_ratio": ("train.schedule.warmup_steps",),
    **dict.fromkeys(("max_steps", "total_training_steps"), ("run.steps",)),
    **dict.fromkeys(("num_train_epochs", "total_epochs", "num_episodes"), ("run.steps",)),
    **dict.fromkeys(("num_iterations", "ppo_epochs", "num_ppo_epochs"), ("train.epochs",)),
    **dict.fromkeys(("num_mini_batches", "ppo_mini_batch_size"), ("train.minibatches",)),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "ppo_micro_batch_size", "micro_train_batch_size"),
        ("train.tokens_per_microbatch",),
    ),
    **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef", "init_kl_coef"), (KL,)),
    **dict.fromkeys(("epsilon", "cliprange", "clip_range", "clip_ratio"), ("algorithm.loss",)),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high", "loss_type"), ("algorithm.loss",)),
    **dict.fromkeys(("adv_estimator", "scale_rewards"), ("algorithm.advantage",)),
    **dict.fromkeys(("reward_funcs", "reward_weights"), ("data.domains.NAME.rewards",)),
    "mask_truncated_completions": ("rollout.drop_truncated",),
    **dict.fromkeys(("model_name_or_path", "pretrain", "model_name"), ("model.path",)),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype"), ("model.dtype",)),
    **dict.fromkeys(
        ("train_dataset", "dataset_name", "train_files"), ("data.domains.NAME.source",)
    ),
    **dict.fromkeys(("eval_dataset", "val_files"), ("data.validation.NAME.source",)),
    "output_dir": ("run.folder",),
    **dict.fromkeys(("run_name", "experiment_name"), ("run.name",)),
    **dict.fromkeys(("save_steps", "save_freq"), ("checkpoint.every",)),
    "save_total_limit": ("checkpoint.keep_last",),
    **dict.fromkeys(("eval_steps", "test_freq"), ("evaluate.every",)),
    "report_to": ("observe.sinks",),
    "use_vllm": ("infer.engine",),
    "vllm_gpu_memory_utilization": ("infer.vllm.gpu_memory_utilization",),
    "vllm_tensor_parallel_size": ("infer.vllm.tensor_parallel",),
    **dict.fromkeys(("use_peft", "peft_config"), ("train.lora",)),
    **dict.fromkeys(("lora_r", "lora_rank"), ("train.lora.rank",)),
    "lora_alpha": ("train.lora.alpha",),
    "lora_dropout": ("train.lora.dropout",),
    **dict.fromkeys(("lora_target_modules", "target_modules"), ("train.lora.targets",)),
    "gradient_checkpointing": ("train.parallel.recompute",),
}
"""Name in another library -> our keys. The message suggests the first key that recipes of the
pipeline have. NAME is the name of a domain."""
