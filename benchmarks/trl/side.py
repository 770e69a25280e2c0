"""TRL's side of step_vs_trl.py: one GRPO step for each line that arrives, in TRL's environment.

Reads a job (JSON) from the first line of standard input, builds GRPOTrainer, answers "ready", and
then makes one optimizer step for every further line and answers with its seconds and tokens. The
trainer's own loop runs unchanged; it only waits at the beginning of each step. Answers go to the
real standard output; TRL's own output goes to standard error.

    generation   trainer._generate
    scoring      the rest of trainer._generate_and_score_completions (rewards, old log-probs)
    training     the rest of the step
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter, process_time

import task
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

# For answers; TRL, vLLM and their libraries print to standard error.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def answer(**facts) -> None:
    ANSWERS.write(json.dumps(facts) + "\n")
    ANSWERS.flush()


def reward(completions, **_) -> list[float]:
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [task.variety(text) for text in texts]


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that records the seconds of its parts and its tokens."""

    def __init__(self, *arguments, **options) -> None:
        self.seen: dict[str, float] = {}
        super().__init__(*arguments, **options)

    def _generate(self, prompts):
        begun = self.now()
        made = super()._generate(prompts)
        self.add("generation", self.now() - begun)
        prompt_ids, completion_ids = made[0], made[1]
        self.add("prompt_tokens", sum(len(ids) for ids in prompt_ids))
        self.add("sampled", sum(len(ids) for ids in completion_ids))
        return made

    def _generate_and_score_completions(self, inputs):
        begun = self.now()
        made = super()._generate_and_score_completions(inputs)
        self.add("scoring", self.now() - begun)
        self.add("trained", int(made["completion_mask"].sum()))
        return made

    def add(self, name: str, value: float) -> None:
        self.seen[name] = self.seen.get(name, 0) + value

    def now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return perf_counter()


class Pace(TrainerCallback):
    """Starts a step when a line arrives, and ends training at the end of input."""

    trainer: TimedTrainer

    def on_step_begin(self, args, state, control, **_):
        if not sys.stdin.readline().strip():
            # The parent is done or gone: nothing needs cleaning up.
            os._exit(0)
        self.trainer.seen = {}
        self.begun, self.worked = self.trainer.now(), process_time()

    def on_step_end(self, args, state, control, **_):
        seconds = self.trainer.now() - self.begun
        seen = self.trainer.seen
        scoring = seen["scoring"] - seen["generation"]
        peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
        answer(
            seconds=seconds,
            cpu_seconds=round(process_time() - self.worked, 3),
            generation=seen["generation"],
            scoring=scoring,
            training=seconds - seen["scoring"],
            prompt_tokens=seen["prompt_tokens"],
            sampled=seen["sampled"],
            trained=seen["trained"],
            peak_gb=round(peak, 2),
        )


def build(job: dict) -> TimedTrainer:
    work = job["work"]
    samples = work["prompts"] * work["group_size"]
    micro = job["micro_batch"]
    config = GRPOConfig(
        output_dir=job["folder"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=samples // micro,
        num_generations=work["group_size"],
        max_completion_length=work["tokens"],
        temperature=1.0,
        learning_rate=work["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        beta=0.0,
        loss_type="grpo",
        num_iterations=1,
        max_steps=10_000,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        use_cpu=job["device"] == "cpu",
        # Parameters already have the dtype of the work: no autocast around them.
        bf16=False,
        **job["trl"],
    )
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=DTYPES[work["dtype"]], attn_implementation="sdpa"
    )
    pace = Pace()
    trainer = TimedTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(
            [
                {"prompt": [{"role": "user", "content": text}]}
                for text in task.prompts(work["prompts"], examples=work["examples"])
            ]
        ),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[pace],
    )
    pace.trainer = trainer
    return trainer


def main() -> None:
    job = json.loads(sys.stdin.readline())
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    begun = perf_counter()
    trainer = build(job)
    import trl

    answer(ready=True, start_s=round(perf_counter() - begun, 1), version=trl.__version__)
    trainer.train()


if __name__ == "__main__":
    main()
