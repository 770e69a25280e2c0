"""Settings of other libraries (TRL, transformers, verl, OpenRLHF), and rollick's keys for them.

A recipe does not accept these names. The message about an unknown key names rollick's key.
"""

from __future__ import annotations

_TABLE = """
rollout.group_size: num_generations n_samples_per_prompt
rollout.groups_per_step: generation_batch_size rollout_batch_size per_device_train_batch_size
rollout.groups_per_step: train_batch_size
train.batch_size: per_device_train_batch_size train_batch_size
sampling.max_tokens: max_completion_length max_response_length max_new_tokens response_length
sampling.max_tokens: generate_max_len
data.max_prompt_tokens: max_prompt_length prompt_max_len
infer.max_length: max_model_len max_seq_length max_seq_len
train.optimizer.lr: learning_rate actor_learning_rate
critic.optimizer.lr: critic_learning_rate
train.optimizer.grad_clip: max_grad_norm grad_clip_norm
train.schedule.shape: lr_scheduler_type
train.schedule.warmup_steps: warmup_ratio
run.steps: max_steps total_training_steps num_train_epochs total_epochs num_episodes
train.epochs: num_iterations ppo_epochs num_ppo_epochs
train.minibatches: num_mini_batches ppo_mini_batch_size
train.tokens_per_microbatch: gradient_accumulation_steps ppo_micro_batch_size micro_train_batch_size
algorithm.kl.coefficient: beta kl_coef kl_loss_coef init_kl_coef
algorithm.loss: epsilon cliprange clip_range clip_ratio epsilon_high clip_ratio_high loss_type
algorithm.advantage: adv_estimator scale_rewards
data.domains.NAME.rewards: reward_funcs reward_weights
rollout.drop_truncated: mask_truncated_completions
model.path: model_name_or_path pretrain model_name
model.dtype: bf16 fp16 torch_dtype
data.domains.NAME.source: train_dataset dataset_name train_files
data.validation.NAME.source: eval_dataset val_files
run.folder: output_dir
run.name: run_name experiment_name
checkpoint.every: save_steps save_freq
checkpoint.keep_last: save_total_limit
evaluate.every: eval_steps test_freq
observe.sinks: report_to
infer.engine: use_vllm
infer.vllm.gpu_memory_utilization: vllm_gpu_memory_utilization
infer.vllm.tensor_parallel: vllm_tensor_parallel_size
train.lora: use_peft peft_config
train.lora.rank: lora_r lora_rank
train.lora.alpha: lora_alpha
train.lora.dropout: lora_dropout
train.lora.targets: lora_target_modules target_modules
train.parallel.recompute: gradient_checkpointing
"""
"""Each line: rollick's key (NAME stands for a domain), then its names in other libraries."""

FOREIGN_NAMES: dict[str, list[str]] = {}
"""Name in another library -> rollick's keys. The message suggests the first key that recipes of the
pipeline have."""

for _line in _TABLE.strip().splitlines():
    _key, _, _names = _line.partition(": ")
    for _name in _names.split():
        FOREIGN_NAMES.setdefault(_name, []).append(_key)
