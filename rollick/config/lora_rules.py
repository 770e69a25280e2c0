"""Rules about adapters: what they cannot go with, and whose settings they leave without effect."""

from __future__ import annotations

from rollick.config.names import NAMES
from rollick.config.rules import Context, Findings, rule


@rule("train.lora", "train.strategy", "infer.zero_mismatch", "weights.changes_only")
def _adapters_go_with_the_rest(context: Context) -> Findings:
    recipe = context.recipe
    if recipe.train.lora is None:
        return
    strategy = recipe.train.strategy
    # A strategy of another package is believed to know what it is given.
    if strategy != "local" and strategy in NAMES["train_strategies"]:
        message = f"strategy {strategy} trains all parameters"
        yield context.problem("train.lora", message, "use train.strategy=local, or remove it")
    if recipe.infer.zero_mismatch:
        message = "the engine adds adapters to its weights, and the learner computes them apart"
        yield context.problem("infer.zero_mismatch", message, "remove it, or train.lora")
    if recipe.weights.changes_only:
        message = "true has no effect: adapters are sent whole"
        yield context.problem("weights.changes_only", message, "remove it")
