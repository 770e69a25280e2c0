"""Every preset learns a toy task, and the same steps with shuffled scores do not.

At staleness 0 and, for presets whose loss has a trust region, at staleness 2. The score
starts at about 0.2; a policy that has only learned to write letters scores about 0.25.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollick.config.load import recipe_from_dict
from rollick.config.presets import PRESETS
from rollick.config.schema.losses import WITHOUT_TRUST_REGION
from rollick.errors import ConfigError
from rollick.testing.learning import echo_recipe, learn, settings_of

ON_POLICY_ONLY = {
    name for name, preset in PRESETS.items() if preset.loss["name"] in WITHOUT_TRUST_REGION
}
CASES = [
    (name, staleness)
    for name in PRESETS
    for staleness in (0, 2)
    if not (staleness and name in ON_POLICY_ONLY)
]


@pytest.mark.parametrize(("preset", "staleness"), CASES)
def test_the_preset_learns_the_toy(preset: str, staleness: int, tmp_path: Path) -> None:
    settings = settings_of(preset, staleness=staleness)
    curve = learn(preset, tmp_path, staleness=staleness, **settings)
    assert curve.max_age == staleness, "no token of that age was trained on"
    assert curve.final >= 0.9


@pytest.mark.parametrize(("preset", "staleness"), CASES)
def test_the_same_steps_with_shuffled_scores_do_not_learn_it(
    preset: str, staleness: int, tmp_path: Path
) -> None:
    settings = settings_of(preset, staleness=staleness)
    curve = learn(preset, tmp_path, staleness=staleness, shuffled=True, **settings)
    assert curve.max_age == staleness, "no token of that age was trained on"
    assert curve.final < 0.5


@pytest.mark.parametrize("preset", sorted(ON_POLICY_ONLY))
def test_a_preset_without_a_trust_region_is_refused_with_stale_samples(
    preset: str, tmp_path: Path
) -> None:
    recipe = echo_recipe(tmp_path, tmp_path, algorithm=preset, steps=1, seed=0)
    recipe_from_dict(recipe)
    recipe["rollout"] |= {"max_staleness": 2}
    with pytest.raises(ConfigError, match=r"rollout\.max_staleness.* needs a loss with a trust"):
        recipe_from_dict(recipe)


def test_only_rloo_is_on_policy_only() -> None:
    assert {"rloo"} == ON_POLICY_ONLY


def test_at_staleness_0_a_curve_can_be_measured_again(tmp_path: Path) -> None:
    first, second = (learn("dppo", tmp_path / name, steps=8) for name in ("first", "second"))
    assert first.scores == second.scores
