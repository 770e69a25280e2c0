"""The table of all metrics with units and meanings: the source of docs/metrics.md.

A name that ends in `/*` covers all names with that prefix. Tests check that every logged metric is
in the table. Unless the table says otherwise, a value covers one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

METRICS: Mapping[str, tuple[str, str]] = {
    "score/mean": ("score", "Mean score of all scored samples, including dropped groups."),
    "score/trained": ("score", "Mean score of the trained samples."),
    "score/domain/*": ("score", "Mean score by domain."),
    "score/part/*": ("score", "Unweighted mean of each reward, and of its parts (REWARD/PART)."),
    "reward/calls/*": ("calls", "Calls of each reward, validation included, cached excluded."),
    "reward/cached/*": ("calls", "Calls saved because an equal sample was scored before."),
    "reward/failed/*": ("calls", "Calls that returned no valid score."),
    "reward/mean/*": ("", "Mean of a metric that a reward reports (REWARD/METRIC)."),
    "reward/total/*": ("", "Sum of a metric that a reward reports, over the run."),
    "reward_hacking/*": (
        "0 or 1",
        "1: the score rises while another value gets worse. The rules are length, repetition, "
        "format_only, identical, judge and held_out.",
    ),
    "rollout/repetition": ("share", "Mean share of repeated four-word phrases in a response."),
    "rollout/identical": ("share", "Samples whose response is the most common one."),
    "rollout/groups": ("groups", "Trained groups."),
    "rollout/samples": ("samples", "Trained samples."),
    "rollout/tokens": ("tokens", "Tokens sampled for the step."),
    "rollout/response_length": ("tokens", "Mean length of a response."),
    "rollout/truncated": ("share", "Samples that reached the token limit."),
    "rollout/dropped/*": ("groups", "Dropped groups by reason."),
    "rollout/kept_no_signal": (
        "groups",
        "Groups of the batch whose samples score the same, with `drop_no_signal: false`.",
    ),
    "rollout/domain/*": (
        "",
        "By domain: groups (trained), dropped (groups), samples (finished), response_length, "
        "and the shares truncated and failed_scores.",
    ),
    "rollout/failed_scores": ("share", "Samples without a valid score."),
    "rollout/age_max": ("versions", "Age of the oldest trained token."),
    "rollout/age_mean": ("versions", "Mean age of the trained tokens."),
    "rollout/bias/length": (
        "tokens",
        "Mean length of the trained samples minus that of all finished samples, including "
        "groups dropped as stale or surplus.",
    ),
    "rollout/bias/length_kept": ("tokens", "Mean length of the trained samples."),
    "rollout/bias/length_dropped": ("tokens", "Mean length of samples in stale or surplus groups."),
    "rollout/bias/score": ("score", "Mean score of trained samples minus that of finished ones."),
    "rollout/bias/score_kept": ("score", "Mean score of the trained samples."),
    "rollout/bias/score_dropped": ("score", "Mean score of samples in stale or surplus groups."),
    "rollout/cancelled": (
        "samples",
        "Cancelled spares and members of dropped groups; not in bias.",
    ),
    "rollout/cancelled_share": ("share", "Cancelled among the cancelled and scored samples."),
    "rollout/masked_tokens": ("tokens", "Tokens too old to train on (mask_stale_tokens)."),
    "rollout/kept_cache_tokens": ("tokens", "Tokens sampled on an old KV cache (at_publish keep)."),
    "rollout/deferred": ("groups", "Groups deferred to a long round (long_rounds)."),
    "rollout/deferred_tokens": ("tokens", "Discarded tokens of deferred groups, once released."),
    "rollout/deferred_waiting": ("groups", "Groups that wait for a long round."),
    "rollout/long_groups": ("groups", "Trained groups that had been deferred."),
    "rollout/long_length": ("tokens", "Mean response length in these groups."),
    "rollout/other_length": ("tokens", "Mean response length in the other trained groups."),
    "env/episodes": ("episodes", "Finished training episodes, including failed ones."),
    "env/success": ("share", "Solved episodes among those that did not fail."),
    "env/turns": ("turns", "Mean turns of an episode."),
    "env/summaries": ("summaries", "Mean summaries that the policy wrote in an episode."),
    "env/valid": ("share", "Turns whose reply could be parsed as an action."),
    "env/effective": ("share", "Turns that changed the environment's state."),
    "env/failed/*": (
        "episodes",
        "Failed episodes since the run started or resumed, validation included, by status: "
        "failed (raised), garbage, timeout, crashed, lost (with its process; restarted), "
        "unavailable (its server does not answer; restarted).",
    ),
    "env/restarts": ("processes", "Environment processes replaced since the start or resume."),
    "env/episode_restarts": (
        "episodes",
        "Episodes restarted because their process was lost or their server did not answer.",
    ),
    "env/seconds": ("s", "Time inside environments since the start or resume, over all processes."),
    "controller/event_loop_lag_ms": ("ms", "Largest delay of the controller's event loop."),
    "controller/batch_mb": (
        "MB",
        "Batches sent to worker processes, and the log-probs and values they returned.",
    ),
    "controller/engines": ("engines", "Engines that respond."),
    "controller/engine_restarts": ("engines", "Lost engines replaced since the start or resume."),
    "train/loss": ("", "The objective, aggregated over the batch."),
    "train/grad_norm": ("", "Global gradient norm before clipping; the largest of the step."),
    "train/lr": ("", "Learning rate of the last optimizer step."),
    "train/tokens": ("tokens", "Tokens with a gradient."),
    "train/effective_sample_size": ("share", "(sum pi/mu)^2 / sum (pi/mu)^2, divided by tokens."),
    "train/kl_coefficient": ("", "Coefficient of an adaptive KL in the next step."),
    "train/skipped_steps": ("steps", "Optimizer steps skipped for a non-finite gradient."),
    "train/mean/*": ("", "Any other value that a loss reports, as a mean over its tokens."),
    "train/mean/entropy": ("nats", "Entropy of the policy."),
    "train/mean/policy_loss": ("", "Policy loss before correction and aggregation."),
    "train/mean/clip_share": ("share", "Tokens clipped by the loss."),
    "train/mean/clip_share_positive": ("share", "Clipped tokens with a positive advantage."),
    "train/mean/clip_share_negative": ("share", "Clipped tokens with a negative advantage."),
    "train/mean/ratio": ("", "Importance ratio pi / mu; 1 on-policy."),
    "train/mean/ratio_squared": ("", "(pi / mu)^2."),
    "train/mean/kl": ("nats", "KL to the reference in the loss, before its coefficient."),
    "train/mean/mismatch_kl": ("nats", "KL (k3) of the engine's policy to the learner's."),
    "train/mean/dropped_share": ("share", "Tokens dropped by the correction."),
    "train/mean/dropped_share_positive": ("share", "Dropped tokens with a positive advantage."),
    "train/mean/dropped_share_negative": ("share", "Dropped tokens with a negative advantage."),
    "train/mean/correction_weight": ("", "Weight of the off-policy correction."),
    "train/mean/engine_kl": ("nats", "KL (k3), engine's policy to learner's, before training."),
    "train/mean/reward_kl": ("nats", "KL to the reference in the reward, unscaled."),
    "train/mean/teacher_kl": ("nats", "KL (k1) to the teacher, which the advantage opd minimises."),
    "train/mean/preference_accuracy": ("share", "Tokens of pairs ranked as chosen (DPO)."),
    "train/mean/margin": ("nats", "Margin of the token's pair (DPO)."),
    "train/mean/divergence": ("nats", "Divergence from the teacher (distillation)."),
    "train/max/*": ("", "Maximum over the trained tokens."),
    "train/max/probability_change": ("", "Largest change of a probability, engine to learner."),
    "critic/loss": ("", "Loss of the critic, as a mean over the tokens with a return."),
    "critic/explained_variance": ("", "1 - Var(return - value) / Var(return), before the step."),
    "critic/grad_norm": ("", "Global gradient norm before clipping; the largest of the step."),
    "critic/lr": ("", "Learning rate of the last optimizer step."),
    "critic/tokens": ("tokens", "Tokens with a return, summed over passes over the batch."),
    "critic/skipped_steps": ("steps", "Optimizer steps skipped for a non-finite gradient."),
    "critic/mean/value": ("score", "Mean value."),
    "critic/mean/return": ("score", "Mean return."),
    "critic/mean/value_error": ("", "Mean squared error of the values."),
    "critic/mean/value_clip_share": ("share", "Tokens clipped by the value loss."),
    "eval/*": (
        "",
        "Validation, over all domains and by domain: score, response_length, truncated, "
        "pass@k, and pass@k_interval, the half-width of its confidence interval.",
    ),
    "time/*": ("s", "Duration of each phase: generate, annotate, train, publish, and so on."),
    "time/step": ("s", "Duration of the step."),
    "time/sample_generate": ("s", "Mean generation time of a sample."),
    "time/sample_reward": ("s", "Mean scoring time of a sample."),
    "time/reward/*": ("s", "Mean duration of a call of each reward."),
    "time/goodput/*": (
        "s",
        "Wall time since the last row by state: start, train, generate, wait, publish, "
        "save, validate, recover or redo; every second is in one of them.",
    ),
    "time/goodput/ettr": ("share", "Time of progress not lost later, over wall time (ETTR)."),
    "time/goodput/redone_steps": (
        "steps",
        "Steps of the run whose work was lost: done again after a crash or the loss of a learner, "
        "or undone by a rollback.",
    ),
    "time/goodput/faults/*": ("faults", "Faults of the run by role."),
    "time/goodput/recovery/*": ("s", "Median time from a fault to its repair by role."),
    "speed/slow_engines": ("engines", "Engines that decode at half of the median speed or less."),
    "speed/slow_ranks": ("ranks", "Ranks of the policy at half of the median speed or less."),
    "speed/tokens_per_s": ("tokens/s", "Sampled tokens divided by the duration of the step."),
    "memory/predicted_gb": ("GB", "Predicted peak of the largest process: full batches and slots."),
    "memory/peak_gb": ("GB", "Measured peak of the largest process: torch's (GPU) or resident."),
    "data/quarantined": ("rows", "Unusable rows."),
    "data/retired": ("prompts", "Solved prompts that are not drawn (data.selection.retire)."),
    "data/revived": ("", "Times that all prompts of a domain were retired: all are drawn again."),
    "data/pass_rate": ("share", "Mean pass rate of the tried prompts over the run."),
    "version": ("version", "Policy version after the step."),
}
"""The unit and the meaning by name. An empty unit is a plain number."""

RENAMED: Mapping[str, str] = {
    "rollout/bias/length_shed": "rollout/bias/length_dropped",
    "rollout/bias/score_shed": "rollout/bias/score_dropped",
    "rollout/parked": "rollout/deferred_waiting",
    "env/remade": "env/episode_restarts",
    "train/max/max_abs_dp": "train/max/probability_change",
    "train/mean/preferred": "train/mean/preference_accuracy",
    "train/mean/clip_share_up": "train/mean/clip_share_positive",
    "train/mean/clip_share_down": "train/mean/clip_share_negative",
    "train/mean/mask_share": "train/mean/dropped_share",
    "train/mean/mask_share_up": "train/mean/dropped_share_positive",
    "train/mean/mask_share_down": "train/mean/dropped_share_negative",
    "controller/lag_ms": "controller/event_loop_lag_ms",
    "memory/seen_gb": "memory/peak_gb",
    **{
        f"watch/{rule}": f"reward_hacking/{rule}"
        for rule in ("length", "repetition", "format_only", "identical", "judge", "held_out")
    },
}
"""Names in older metrics.jsonl files, and the current names."""


def current_name(name: str) -> str:
    """The current name of a metric in an older metrics.jsonl file."""
    if name.endswith("/judge/junk"):
        return name.removesuffix("junk") + "failed_votes"
    return RENAMED.get(name, name)


def is_documented(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in METRICS)
