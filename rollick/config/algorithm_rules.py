"""Rules about the parts of an algorithm of the RL step: the recipe's, and those of domains.

What reference, critic and teacher are needed for is in role_rules.py; what pipelines that learn
from given answers look at is in pipeline_rules.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollick.config.advantages import ShapingConfig
from rollick.config.algorithm import AlgorithmConfig
from rollick.config.corrections import clash
from rollick.config.losses import (
    ON_OLD_RATIO,
    PAIRWISE,
    SUPERVISED,
    WITHOUT_TRUST_REGION,
    DistillationLoss,
    GspoLoss,
    KlConfig,
    PpoLoss,
    SegmentLoss,
)
from rollick.config.names import NAMES
from rollick.config.problems import KeyPath
from rollick.config.rules import Context, Findings, rule
from rollick.config.schema import SAMPLED, Recipe, RolloutConfig

GROUP_ADVANTAGES = {
    "dr_grpo",
    "grpo",
    "rloo",
    "reinforce++_baseline",
    "lite_ppo",
    "max_rl",
    "gdpo",
}
GOOD_SAMPLE_LOSSES = {"raft", "raft++", "topr"}
"""Losses that ask whether a sample's score is positive, whatever its advantage."""


def looks_at_scores(algorithm: AlgorithmConfig) -> bool:
    """Whether what rewards say of a sample is in the gradient."""
    if algorithm.loss.name == "distillation":
        return False
    return algorithm.advantage.name != "opd" or algorithm.loss.name in GOOD_SAMPLE_LOSSES


def rl_algorithms(context: Context, *parts: str) -> Iterator[tuple[KeyPath, AlgorithmConfig]]:
    """The algorithms of the RL step whose parts of these names are sound, and where they are."""
    if context.recipe.pipeline in SAMPLED:
        yield from context.algorithms(*parts)


@rule("pipeline")
def _the_loss_learns_from_samples(context: Context) -> Findings:
    for path, algorithm in rl_algorithms(context, "loss"):
        loss = algorithm.loss.name
        if loss == "sft":
            message = "sft looks at no score, so pipeline rlvr would learn nothing from its rewards"
            yield context.problem((*path, "loss"), message, "use dppo_tv or ppo")
        elif loss in PAIRWISE:
            message = f"{loss} compares two given answers, and pipeline rlvr draws its own"
            fix = "use pipeline dpo, or the loss dppo_tv or ppo"
            yield context.problem((*path, "loss"), message, fix)


@rule("pipeline", "rollout.max_staleness")
def _staleness_has_a_trust_region(context: Context) -> Findings:
    staleness = context.recipe.rollout.max_staleness
    for _, algorithm in rl_algorithms(context, "loss"):
        loss = algorithm.loss.name
        if staleness > 0 and loss in WITHOUT_TRUST_REGION - SUPERVISED:
            message = f"{staleness:g} needs a loss with a trust region, and {loss} has none"
            fix = "use 0, or the loss dppo_tv or ppo"
            yield context.problem("rollout.max_staleness", message, fix)


@rule("pipeline", "rollout.max_staleness", "train.minibatches", "train.epochs")
def _the_ratio_to_the_old_policy_can_move(context: Context) -> Findings:
    """With one optimizer step a batch the learner's own old policy is the one that is trained, so
    that pi/old is 1 whatever the age of a token, and bounding it bounds nothing."""
    recipe = context.recipe
    steps = recipe.train.minibatches * recipe.train.epochs
    if recipe.rollout.max_staleness == 0 or steps > 1:
        return
    for path, algorithm in rl_algorithms(context, "loss", "correction"):
        loss, correction = algorithm.loss.name, algorithm.correction.name
        is_ours = correction in NAMES["corrections"] and not clash(loss, correction)
        bounds_old = loss in ON_OLD_RATIO or loss == "kimi"
        if is_ours and bounds_old and "old" in algorithm.needs and not algorithm.old_is_behaviour:
            message = (
                f"{correction} takes the learner's own old policy, from which one optimizer step a "
                f"batch never moves away: at staleness {recipe.rollout.max_staleness:g} the loss "
                f"{loss} has no trust region"
            )
            fix = (
                "use correction: bypass (or decoupled with old: interpolated), or several "
                "minibatches"
            )
            yield context.problem((*path, "correction"), message, fix)


@rule("pipeline", "rollout.group_size", "rollout.drop_no_signal")
def _groups_can_be_learned_from(context: Context) -> Findings:
    for path, algorithm in rl_algorithms(context, "advantage", "loss"):
        rollouts = _rollouts_of(context.recipe, path)
        for rollout in rollouts:
            yield from _check_groups(context, algorithm, rollout)


def _rollouts_of(recipe: Recipe, path: KeyPath) -> list[RolloutConfig]:
    """The different settings under which the algorithm at `path` is used."""
    domains = recipe.data.domains
    users = [name for name, domain in domains.items() if domain.algorithm is None]
    if path[0] == "data":
        users = [str(path[2])]
    found = [recipe.rollout_of(name) for name in users] or [recipe.rollout]
    return [rollout for place, rollout in enumerate(found) if rollout not in found[:place]]


def _check_groups(context: Context, algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Findings:
    advantage, alone = algorithm.advantage.name, rollout.group_size == 1
    if not looks_at_scores(algorithm):
        if rollout.drop_no_signal:
            blind = _blind_part(algorithm)
            message = f"true drops groups whose scores are alike, and {blind} looks at no score"
            yield context.problem("rollout.drop_no_signal", message, "set it to false")
    elif alone and advantage in GROUP_ADVANTAGES:
        message = f"advantage {advantage} compares the samples of a group, and 1 gives it no other"
        yield context.problem("rollout.group_size", message, "use 2 or more")
    elif alone and rollout.drop_no_signal:
        message = "true drops every group: the score of a single sample differs from no other"
        fix = "set it to false, or rollout.group_size to 2 or more"
        yield context.problem("rollout.drop_no_signal", message, fix)


def _blind_part(algorithm: AlgorithmConfig) -> str:
    if algorithm.loss.name == "distillation":
        return "the loss distillation"
    return f"advantage {algorithm.advantage.name}"


@rule("pipeline")
def _the_correction_suits_the_loss(context: Context) -> Findings:
    for path, algorithm in rl_algorithms(context, "loss", "correction"):
        loss, correction = algorithm.loss.name, algorithm.correction.name
        # Losses of given answers are a problem of their own here, whatever the correction.
        refused = loss == "sft" or loss in PAIRWISE
        if not refused and (message := clash(loss, correction)):
            yield context.problem((*path, "correction"), message, "use bypass, or the loss ppo")


@rule("pipeline")
def _options_of_the_loss_are_used(context: Context) -> Findings:
    if context.recipe.pipeline not in SAMPLED | {"distill"}:
        return
    for path, algorithm in context.algorithms("loss"):
        loss, where = algorithm.loss, (*path, "loss")
        if isinstance(loss, PpoLoss | GspoLoss | SegmentLoss) and 0 < loss.dual_clip <= 1:
            message = f"{loss.dual_clip:g} would clip every negative advantage"
            fix = "use a number above 1, or 0 for off"
            yield context.problem((*where, "dual_clip"), message, fix)
        if isinstance(loss, DistillationLoss):
            yield from _check_divergence(context, loss, where)


def _check_divergence(context: Context, loss: DistillationLoss, where: KeyPath) -> Findings:
    default = DistillationLoss()
    if loss.skew != default.skew and "skewed" not in loss.divergence:
        message = f"{loss.skew:g} has no effect: divergence {loss.divergence} is not skewed"
        fix = "use skewed or skewed_reverse, or remove it"
        yield context.problem((*where, "skew"), message, fix)
    if loss.head != default.head and loss.divergence != "adaptive":
        message = f"{loss.head:g} has no effect: only divergence adaptive has a head"
        yield context.problem((*where, "head"), message, "use adaptive, or remove it")


@rule("pipeline")
def _the_kl_is_used(context: Context) -> Findings:
    for path, algorithm in rl_algorithms(context, "kl"):
        kl, where = algorithm.kl, (*path, "kl")
        if kl.in_loss and kl.form == "k1":
            message = "k1 in the loss has an expected gradient of zero"
            yield context.problem((*where, "form"), message, "use k2 or k3")
        for key, reason, fix in _unused_of_kl(kl):
            value = getattr(kl, key)
            said = f"{value:g}" if isinstance(value, float) else value
            message = f"{said} has no effect: {reason}"
            yield context.problem((*where, key), message, f"{fix}, or remove it")


def _unused_of_kl(kl: KlConfig) -> Iterator[tuple[str, str, str]]:
    """(key, why it is unused, what would use it) of each setting that is not its default."""
    default = KlConfig()
    changed = {key for key in KlConfig.model_fields if getattr(kl, key) != getattr(default, key)}
    if kl.coefficient == 0:
        for key in KlConfig.model_fields:
            if key in changed:
                yield key, "kl.coefficient is 0", "set kl.coefficient"
        return
    if kl.in_reward and kl.form == "k2":
        yield "form", "in the reward it is always k1", "use place: loss"
    if kl.in_reward and "max_ratio" in changed:
        yield "max_ratio", "only in the loss tokens are weighted by pi/mu", "use place: loss"
    if kl.controller == "fixed":
        for key in ("target", "horizon"):
            if key in changed:
                yield key, "only the adaptive controller steers", "set kl.controller=adaptive"


@rule("pipeline")
def _the_shaping_is_used(context: Context) -> Findings:
    for path, algorithm in rl_algorithms(context, "advantage", "loss", "shaping"):
        shaping, where = algorithm.shaping, (*path, "shaping")
        changes_scores = shaping != ShapingConfig(difficulty=shaping.difficulty)
        if changes_scores and algorithm.advantage.name == "gdpo":
            message = "changes the score, and advantage gdpo looks at its parts alone"
            yield context.problem(where, message, "remove it, or use another advantage")
        elif changes_scores and not looks_at_scores(algorithm):
            message = f"has no effect: {_blind_part(algorithm)} looks at no score"
            yield context.problem(where, message, "remove it")
        if shaping.difficulty and shaping.difficulty[0] >= shaping.difficulty[1]:
            low, high = shaping.difficulty
            message = f"its first end, {low:g}, is not below its second, {high:g}"
            fix = "write it as [lowest, highest], such as [0.2, 0.8]"
            yield context.problem((*where, "difficulty"), message, fix)
        for key in ("length_buffer", "length_weight"):
            value, default = getattr(shaping, key), getattr(ShapingConfig(), key)
            if shaping.length_limit == 0 and value != default:
                message = f"{value:g} has no effect: there is no limit to the length"
                fix = "set shaping.length_limit, such as max_tokens, or remove it"
                yield context.problem((*where, key), message, fix)


@rule()
def _nothing_is_trained_on_validation(context: Context) -> Findings:
    for path, domain in context.domains(validation=True):
        if domain.algorithm is not None:
            message = "has no effect: nothing is trained on validation"
            yield context.problem((*path, "algorithm"), message, "remove it")
