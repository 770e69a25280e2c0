"""Algorithms by the name of their paper: settings of the `algorithm` section, as plain data.

    algorithm: dapo                                       the preset, as it is
    algorithm: {preset: dapo, loss: {clip_high: 0.3}}     what is said goes over the preset

Inside a part (and inside shaping and kl) that is key by key, unless the part is given another
`name`: then it is the user's alone. A preset says only what makes the method; whatever it leaves
out has the default of the schema. None has a KL: papers that have one differ in its weight, so it
is said in the recipe (`kl: {coefficient: 0.001}`). All take mu for the old policy (bypass), which
saves a forward and is the same on-policy. Those with the loss ppo keep its dual clip, which
differs from the paper only where a bad token became three times as likely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """One method: what it is, where it comes from, and its settings."""

    about: str
    paper: str
    """arXiv number."""
    advantage: str
    loss: Mapping[str, Any]
    aggregation: str
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


_PPO = {"name": "ppo", "clip_low": 0.2, "clip_high": 0.2}

PRESETS: Mapping[str, Preset] = {
    "ppo": Preset(
        about="A critic's advantages (GAE), PPO's clipped ratio.",
        paper="1707.06347",
        advantage="gae",
        loss=_PPO,
        aggregation="token_mean",
    ),
    "grpo": Preset(
        about="Scores normalised in their group, PPO's clipped ratio, each sample counts the same.",
        paper="2402.03300",
        advantage="grpo",
        loss=_PPO,
        aggregation="sequence_mean_token_mean",
    ),
    "dr_grpo": Preset(
        about="GRPO without its two biases: no division by the group's spread, none by length.",
        paper="2503.20783",
        advantage="dr_grpo",
        loss=_PPO,
        aggregation="fixed_length",
    ),
    "dapo": Preset(
        about="GRPO with clip-higher, a mean over tokens, and a soft penalty of too long answers.",
        paper="2503.14476",
        advantage="grpo",
        loss={"name": "ppo", "clip_low": 0.2, "clip_high": 0.28},
        aggregation="token_mean",
        # The paper's 4096 of 20480 tokens.
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
        about="Returns whitened over the batch, no group baseline, PPO's clipped ratio.",
        paper="2501.03262",
        advantage="reinforce++",
        loss=_PPO,
        aggregation="token_mean",
    ),
    # The whole answer is one action, so its log-prob is the sum over its tokens. The estimator is
    # REINFORCE's: on-policy only, and a rule refuses staleness.
    "rloo": Preset(
        about="REINFORCE with the mean of the group's other samples as baseline.",
        paper="2402.14740",
        advantage="rloo",
        loss={"name": "reinforce"},
        aggregation="sequence_mean_token_sum",
    ),
    "raft++": Preset(
        about="Only the good samples, by PPO's clipped ratio.",
        paper="2504.11343",
        advantage="reinforce",
        loss={"name": "raft++", "clip_high": 0.2},
        aggregation="sequence_mean_token_mean",
    ),
    # Its ratio is that of the whole answer, and so is its log-prob: a sum over tokens.
    "topr": Preset(
        about="Good samples without a weight, the others by their ratio cut at 1.",
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
        aggregation="token_mean",
    ),
    "lite_ppo": Preset(
        about="The group's mean and the batch's spread, a mean over tokens, PPO's clipped ratio.",
        paper="2508.08221",
        advantage="lite_ppo",
        loss=_PPO,
        aggregation="token_mean",
    ),
    "gigpo": Preset(
        about="Whole episodes compared in their group, and single steps from equal states.",
        paper="2505.10978",
        advantage="gigpo",
        loss=_PPO,
        aggregation="token_mean",
    ),
    # The paper's estimator is on-policy, where ppo's gradient is that of reinforce; ppo also
    # bounds it where a batch makes several optimizer steps or is stale.
    "max_rl": Preset(
        about="Maximum likelihood of success: hard prompts count by one over their success rate.",
        paper="2602.02710",
        advantage="max_rl",
        loss=_PPO,
        aggregation="token_mean",
    ),
    "sapo": Preset(
        about="GRPO with a soft gate in the place of the clip.",
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
        aggregation="token_mean",
    ),
}


def by_preset(value: Any) -> Any:
    """`algorithm: dapo` is short for `algorithm: {preset: dapo}`."""
    return {"preset": value} if isinstance(value, str) else value


def over_preset(said: Mapping[str, Any]) -> dict[str, Any]:
    """An `algorithm` section with what its preset says where it says nothing itself.

    Of a preset that nobody knows only the name is left: what goes over it cannot be judged.
    """
    name = said.get("preset")
    if not isinstance(name, str):
        return dict(said)
    if name not in PRESETS:
        return {"preset": name}
    settings = PRESETS[name].settings
    return {**settings, **{key: _over(settings.get(key), value) for key, value in said.items()}}


def _over(preset: Any, said: Any) -> Any:
    if not isinstance(preset, dict):
        return said
    if isinstance(said, str) and "name" in preset:
        said = {"name": said}
    if not isinstance(said, dict) or said.get("name", preset.get("name")) != preset.get("name"):
        return said  # pyright: ignore[reportUnknownVariableType]
    return {**preset, **said}
