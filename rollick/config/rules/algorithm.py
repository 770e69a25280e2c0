"""Rules about the parts of RL algorithms: the recipe's, and those of domains.

roles.py checks reference, critic and teacher.
"""

from __future__ import annotations

from rollick.config.names import NAMES
from rollick.config.problems import KeyPath
from rollick.config.rules.context import Context, Problems, rule
from rollick.config.schema import RlRecipe, losses
from rollick.config.schema.advantages import GROUP_RELATIVE, ShapingConfig
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.config.schema.corrections import find_conflict
from rollick.config.schema.losses import ON_OLD_RATIO, PAIRWISE, GspoLoss, PpoLoss

GROUP_ADVANTAGES = GROUP_RELATIVE | {"gdpo"}
GOOD_SAMPLE_LOSSES = {"raft", "raft++", "topr"}
"""Losses that read the sign of a sample's score, besides its advantage."""


def reads_scores(algorithm: AlgorithmConfig) -> bool:
    """Whether the gradient depends on the scores."""
    if algorithm.loss.name == "distillation":
        return False
    return algorithm.advantage.name != "opd" or algorithm.loss.name in GOOD_SAMPLE_LOSSES


def describe_scoreless_part(algorithm: AlgorithmConfig) -> str:
    """The part because of which the algorithm reads no score."""
    is_distillation = algorithm.loss.name == "distillation"
    return "the loss distillation" if is_distillation else f"advantage {algorithm.advantage.name}"


def changes_scores(algorithm: AlgorithmConfig) -> bool:
    return algorithm.shaping != ShapingConfig(difficulty=algorithm.shaping.difficulty)


@rule("pipeline")
def _check_loss_uses_scores(context: Context) -> Problems:
    for path, algorithm in context.algorithms("loss"):
        loss = algorithm.loss.name
        if loss == "sft":
            message = "sft reads no score, so pipeline rlvr would learn nothing from its rewards"
            yield context.problem((*path, "loss"), message, "use dppo_tv or ppo")
        elif loss in PAIRWISE:
            message = f"{loss} compares two given answers, and pipeline rlvr samples its own"
            fix = "use pipeline dpo, or the loss dppo_tv or ppo"
            yield context.problem((*path, "loss"), message, fix)


@rule("pipeline", "rollout.max_staleness")
def _check_staleness_has_trust_region(context: Context) -> Problems:
    staleness = context.recipe.max_staleness
    for _, algorithm in context.algorithms("loss"):
        loss = algorithm.loss.name
        if staleness > 0 and loss in losses.WITHOUT_TRUST_REGION - losses.SUPERVISED:
            message = f"{staleness:g} needs a loss with a trust region, and {loss} has none"
            fix = "use 0, or the loss dppo_tv or ppo"
            yield context.problem("rollout.max_staleness", message, fix)


@rule("pipeline", "rollout.max_staleness", "train.minibatches", "train.epochs")
def _check_old_policy_ratio(context: Context) -> Problems:
    """With one optimizer step per batch, the learner's old policy is the trained one: pi/old is 1
    for tokens of any age, and a bound on it has no effect."""
    recipe = context.recipe
    steps = recipe.train.steps_per_batch
    if recipe.max_staleness == 0 or steps > 1:
        return
    fix = "use correction: bypass (or decoupled with old: interpolated), or several minibatches"
    for path, algorithm in context.algorithms("loss", "correction"):
        loss, correction = algorithm.loss.name, algorithm.correction.name
        is_builtin = correction in NAMES["corrections"] and not find_conflict(loss, correction)
        bounds_old = loss in ON_OLD_RATIO or loss == "kimi"
        uses_old = "old" in algorithm.needs and not algorithm.old_is_behaviour
        if is_builtin and bounds_old and uses_old:
            message = f"with {correction}, ratios are relative to the learner's old policy, which "
            message += "with one optimizer step per batch is the trained policy itself: at "
            message += f"staleness {recipe.max_staleness:g} the loss {loss} has no trust region"
            yield context.problem((*path, "correction"), message, fix)


@rule("pipeline", "rollout.group_size", "rollout.drop_no_signal")
def _check_group_settings(context: Context) -> Problems:
    if context.rl is None:
        return
    for path, algorithm in context.algorithms("advantage", "loss"):
        advantage, is_single = algorithm.advantage.name, context.rl.rollout.group_size == 1
        if is_single and advantage in GROUP_ADVANTAGES and reads_scores(algorithm):
            message = f"advantage {advantage} compares the samples of a group, and "
            message += "a group of 1 has nothing to compare"
            yield context.problem("rollout.group_size", message, "use 2 or more")
            continue
        message = _find_drop_conflict(algorithm, is_single=is_single)
        for setting in _find_dropping_settings(context.rl, path) if message else ():
            yield context.problem(setting, message, "remove it, or set it to false")


def _find_dropping_settings(recipe: RlRecipe, path: KeyPath) -> list[KeyPath]:
    """Paths of the settings that drop groups without signal of the algorithm at `path`."""
    domains = recipe.data.domains
    names = (
        [str(path[2])] if path[0] == "data" else [n for n in domains if not domains[n].algorithm]
    )
    overrides = {name: domains[name].filters.drop_no_signal for name in names}
    inherits = not names or None in overrides.values()
    shared = [("rollout", "drop_no_signal")] if inherits and recipe.rollout.drop_no_signal else []
    dropping = [name for name, drops in overrides.items() if drops]
    return [*shared, *(("data", "domains", n, "filters", "drop_no_signal") for n in dropping)]


def _find_drop_conflict(algorithm: AlgorithmConfig, *, is_single: bool) -> str:
    """Why groups with equal scores must not be dropped; empty if they may be."""
    effect, advantage = "true drops groups whose scores are equal", algorithm.advantage.name
    if not reads_scores(algorithm):
        return f"{effect}, and {describe_scoreless_part(algorithm)} reads no score"
    if algorithm.loss.name in losses.WITHOUT_ADVANTAGE:
        return f"{effect}, and the loss {algorithm.loss.name} learns from them"
    if advantage in NAMES["advantages"] and not algorithm.needs_different_scores:
        return f"{effect}, and advantage {advantage} learns from them"
    if is_single:
        return "true drops every group: with one sample per group, no two scores differ"
    return ""


@rule("pipeline")
def _check_correction_fits_loss(context: Context) -> Problems:
    for path, algorithm in context.algorithms("loss", "correction"):
        loss, correction = algorithm.loss.name, algorithm.correction.name
        # _check_loss_uses_scores reports these losses.
        is_reported = loss == "sft" or loss in PAIRWISE
        if not is_reported and (message := find_conflict(loss, correction)):
            yield context.problem((*path, "correction"), message, "use bypass, or the loss ppo")


@rule("pipeline")
def _check_dual_clip(context: Context) -> Problems:
    for path, algorithm in context.algorithms("loss"):
        loss = algorithm.loss
        if isinstance(loss, PpoLoss | GspoLoss) and 0 < loss.dual_clip <= 1:
            message = f"{loss.dual_clip:g} would clip every negative advantage"
            fix = "use a number above 1, or 0 for off"
            yield context.problem((*path, "loss", "dual_clip"), message, fix)


@rule("pipeline")
def _check_kl_form(context: Context) -> Problems:
    for path, algorithm in context.algorithms("kl"):
        kl, form_path = algorithm.kl, (*path, "kl", "form")
        if kl.in_loss and kl.form == "k1":
            message = "k1 in the loss has an expected gradient of zero"
            yield context.problem(form_path, message, "use k2 or k3")
        if kl.in_reward and kl.form == "k2":
            message = "k2 is for the loss; in the reward the estimator is always k1"
            yield context.problem(form_path, message, "use place: loss, or remove it")


@rule("pipeline")
def _check_shaping(context: Context) -> Problems:
    for path, algorithm in context.algorithms("advantage", "loss", "shaping"):
        shaping, shaping_path = algorithm.shaping, (*path, "shaping")
        if changes_scores(algorithm) and algorithm.advantage.name == "gdpo":
            message = "changes the score, and advantage gdpo reads only its parts"
            yield context.problem(shaping_path, message, "remove it, or use another advantage")
        if shaping.difficulty and shaping.difficulty[0] >= shaping.difficulty[1]:
            low, high = shaping.difficulty
            message = f"its lower bound {low:g} is not below its upper bound {high:g}"
            fix = "write it as [lowest, highest], such as [0.2, 0.8]"
            yield context.problem((*shaping_path, "difficulty"), message, fix)
