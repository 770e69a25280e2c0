"""Presets: published algorithms as settings of the `algorithm` section.

    algorithm: dapo                                       the preset, unchanged
    algorithm: {preset: dapo, loss: {clip_high: 0.3}}     the recipe's keys override the preset's

Parts (and shaping) are merged key by key. If the recipe gives a part another `name`, nothing of
the preset's part is used. A preset sets only what defines the method; other keys have the schema's
defaults. No preset sets a KL term: papers that have one differ in its weight, so set it in the
recipe (`kl: {coefficient: 0.001}`). All use the behaviour policy mu as old policy (bypass): this
saves a forward, and on-policy the two are equal. Presets with the loss ppo keep its dual clip,
which differs from the paper only for ratios above 3 at a negative advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_PPO = {"name": "ppo", "clip_low": 0.2, "clip_high": 0.2}


@dataclass(frozen=True, slots=True)
class Preset:
    """A published method: a description, the arXiv number of its paper, and its settings."""

    about: str
    paper: str
    advantage: str
    loss: Mapping[str, Any] = field(default_factory=_PPO.copy)
    aggregation: str = "token_mean"
    shaping: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def settings(self) -> dict[str, Any]:
        """The `algorithm` section."""
        section: dict[str, Any] = {
            "advantage": {"name": self.advantage},
            "shaping": dict(self.shaping),
            "loss": dict(self.loss),
            "aggregation": self.aggregation,
            "correction": {"name": "bypass"},
        }
        return {key: value for key, value in section.items() if value}


PRESETS: Mapping[str, Preset] = {
    "ppo": Preset("A critic's advantages (GAE), PPO's clipped ratio.", "1707.06347", "gae"),
    "grpo": Preset(
        about="Scores normalised in their group, PPO's clipped ratio, each sample counts the same.",
        paper="2402.03300",
        advantage="grpo",
        aggregation="sequence_mean_token_mean",
    ),
    "dr_grpo": Preset(
        about="GRPO without its two biases: no division by the group's spread, none by length.",
        paper="2503.20783",
        advantage="dr_grpo",
        aggregation="fixed_length",
    ),
    "dapo": Preset(
        about="GRPO with clip-higher, a mean over tokens, and a soft penalty for overlong answers.",
        paper="2503.14476",
        advantage="grpo",
        loss={"name": "ppo", "clip_low": 0.2, "clip_high": 0.28},
        # length_buffer: the paper's 4096 of 20480 tokens.
        shaping={"length_limit": "max_tokens", "length_buffer": 0.2, "length_weight": 1.0},
    ),
    "gspo": Preset(
        about="GRPO with one ratio for the whole sample, clipped very close to 1.",
        paper="2507.18071",
        advantage="grpo",
        loss={"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        aggregation="sequence_mean_token_mean",
    ),
    "reinforce++": Preset(
        "Returns whitened over the batch, PPO's clipped ratio.", "2501.03262", "reinforce++"
    ),
    # The whole answer is one action, so its log-prob is the sum over its tokens. REINFORCE is
    # on-policy only: a rule rejects max_staleness > 0.
    "rloo": Preset(
        about="REINFORCE with the mean of the group's other samples as baseline.",
        paper="2402.14740",
        advantage="rloo",
        loss={"name": "reinforce"},
        aggregation="sequence_mean_token_sum",
    ),
    "raft++": Preset(
        about="Only the good samples, with PPO's clipped ratio.",
        paper="2504.11343",
        advantage="reinforce",
        loss={"name": "raft++", "clip_high": 0.2},
        aggregation="sequence_mean_token_mean",
    ),
    # Ratio and log-prob are of the whole answer: sums of log-probs over its tokens.
    "topr": Preset(
        about="Good samples without a weight, the others by their ratio truncated at 1.",
        paper="2503.14286",
        advantage="dr_grpo",
        loss={"name": "topr", "ratio": "sequence", "cap": 1.0},
        aggregation="sequence_mean_token_sum",
    ),
    "cispo": Preset(
        about="The ratio is a clipped weight, so that every token keeps a gradient.",
        paper="2506.13585",
        advantage="grpo",
        loss={"name": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    ),
    "lite_ppo": Preset(
        "The group's mean and the batch's spread, PPO's clipped ratio.", "2508.08221", "lite_ppo"
    ),
    "gigpo": Preset(
        "Episodes compared in their group, and steps from equal states.", "2505.10978", "gigpo"
    ),
    # The paper's estimator is on-policy; there ppo has the gradient of reinforce. With several
    # optimizer steps per batch, or stale samples, ppo also clips the ratio.
    "max_rl": Preset(
        about="Maximum likelihood of success: hard prompts count by one over their success rate.",
        paper="2602.02710",
        advantage="max_rl",
    ),
    "sapo": Preset(
        about="GRPO with a soft gate instead of the clip.",
        paper="2511.20347",
        advantage="grpo",
        loss={"name": "sapo", "tau_positive": 1.0, "tau_negative": 1.05},
        aggregation="sequence_mean_token_mean",
    ),
    "dppo": Preset(
        about="A trust region on each token's probability instead of its ratio; the default.",
        paper="2602.04879",
        advantage="dr_grpo",
        loss={"name": "dppo_tv", "delta": 0.2, "max_ratio": 20.0},
    ),
}


def expand_preset_name(value: Any) -> Any:
    """`algorithm: dapo` is short for `algorithm: {preset: dapo}`."""
    return {"preset": value} if isinstance(value, str) else value


def apply_preset(section: Mapping[str, Any]) -> dict[str, Any]:
    """An `algorithm` section with the settings of its preset filled in.

    For an unknown preset only its name is returned: the overrides cannot be checked.
    """
    name = section.get("preset")
    if not isinstance(name, str):
        return dict(section)
    if name not in PRESETS:
        return {"preset": name}
    settings = PRESETS[name].settings
    return {**settings, **{key: _merge(settings.get(key), value) for key, value in section.items()}}


def _merge(preset: Any, section: Any) -> Any:
    if not isinstance(preset, dict):
        return section
    if isinstance(section, str) and "name" in preset:
        section = {"name": section}
    name = preset.get("name")
    if not isinstance(section, dict) or section.get("name", name) != name:
        return section  # pyright: ignore[reportUnknownVariableType]
    return {**preset, **section}
