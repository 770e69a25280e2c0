"""Predicts how many tokens a sample will have, from earlier samples.

Lengths are assumed to be log-normal. A domain has a location m and a variance v of the logarithm;
v is split into w, the spread of the samples of one prompt, and b = v - w, the spread of the
prompts. A prompt whose n samples have the mean log-length p is expected at

    m + s (p - m)    with s = n b / (n b + w)    and a remaining variance of w + (1 - s) b

a shrinkage estimate: the more prompts differ, and the more samples it has, the closer it is to the
prompt's own mean p, otherwise to the domain's mean m. The expected length is exp(location +
variance / 2). Policies change, so means are taken over the last `DOMAIN_MEMORY` and `PROMPT_MEMORY`
samples, with decaying weights. Truncated samples count with the length they have, so predictions do
not exceed the token limit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from math import exp, log
from typing import Any, NamedTuple

DOMAIN_MEMORY = 4096
PROMPT_MEMORY = 32
MAX_VARIANCE = 4.0
"""Of a log-length: a few outliers must not predict absurd lengths (exp(2) times a median)."""
WITHIN_SHARE = 2 / 3
"""The share of a domain's variance inside a prompt, before any prompt has two samples."""
DIGITS = 4
"""Decimals kept of a prompt's mean log-length: 0.01 %, and a state that stays short."""


class _Prompt(NamedTuple):
    samples: int
    mean: float


@dataclass(slots=True)
class _Domain:
    """Moments of log-lengths; `within`: inside prompts, over `repeats` samples after the first."""

    samples: int
    mean: float
    variance: float = 0.0
    repeats: int = 0
    within: float = 0.0

    def add(self, value: float, prompt: _Prompt | None) -> None:
        self.samples += 1
        weight = 1 / min(self.samples, DOMAIN_MEMORY)
        deviation = value - self.mean
        self.mean += weight * deviation
        self.variance = (1 - weight) * (self.variance + weight * deviation * deviation)
        if prompt is not None:
            self.repeats += 1
            # Corrects for the error of a mean of n samples, which is w / n.
            square = (value - prompt.mean) ** 2 * prompt.samples / (prompt.samples + 1)
            self.within += (square - self.within) / min(self.repeats, DOMAIN_MEMORY)

    def spreads(self) -> tuple[float, float]:
        """The variance inside a prompt and between prompts."""
        total = min(self.variance, MAX_VARIANCE)
        within = min(self.within, total) if self.repeats else WITHIN_SHARE * total
        return within, total - within


class LengthPredictor:
    """Expected tokens of a sample, by its prompt and domain."""

    def __init__(self, *, initial: float, prompts_kept: int = 200_000) -> None:
        """`initial` is the prediction without samples, and counts as one sample of each domain.
        Beyond `prompts_kept`, the prompts that were updated longest ago are removed."""
        self._initial = max(1.0, initial)
        self._prompts_kept = prompts_kept
        self._domains: dict[str, _Domain] = {}
        self._prompts: OrderedDict[str, _Prompt] = OrderedDict()

    def update(self, prompt_uid: str, domain: str, tokens: int) -> None:
        value = log(max(1, tokens))
        prompt = self._prompts.get(prompt_uid)
        if domain not in self._domains:
            self._domains[domain] = _Domain(samples=1, mean=log(self._initial))
        self._domains[domain].add(value, prompt)
        earlier, mean = prompt or (0, value)
        samples = min(earlier + 1, PROMPT_MEMORY)
        self._prompts[prompt_uid] = _Prompt(samples, round(mean + (value - mean) / samples, DIGITS))
        self._prompts.move_to_end(prompt_uid)
        self._evict()

    def predict(self, prompt_uid: str, domain: str) -> float:
        moments = self._domains.get(domain)
        if moments is None:
            return self._initial
        within, between = moments.spreads()
        location, prompt = moments.mean, self._prompts.get(prompt_uid)
        if prompt is not None and between > 0:
            trust = prompt.samples * between / (prompt.samples * between + within)
            location += trust * (prompt.mean - location)
            between *= 1 - trust
        return exp(location + (within + between) / 2)

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON."""
        return {
            "domains": {name: list(astuple(moments)) for name, moments in self._domains.items()},
            "prompts": list(self._prompts),
            "samples": [prompt.samples for prompt in self._prompts.values()],
            "means": [prompt.mean for prompt in self._prompts.values()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._domains = {name: _Domain(*moments) for name, moments in state["domains"].items()}
        columns = zip(state["prompts"], state["samples"], state["means"], strict=True)
        self._prompts = OrderedDict((uid, _Prompt(n, mean)) for uid, n, mean in columns)
        self._evict()

    def _evict(self) -> None:
        while len(self._prompts) > self._prompts_kept:
            self._prompts.popitem(last=False)
