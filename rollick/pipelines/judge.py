"""A judge of our own: a model on the device map behind a server that only this run knows.

    judge role (engines) <- Gateway <- 127.0.0.1, token <- the reward `judge` in its processes

The reward asks any OpenAI-compatible endpoint; here it is given one, with a key of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from rollick.cluster.group import WorkerGroup
from rollick.config.schema import Recipe, RewardSpec
from rollick.data.chat import ChatCodec
from rollick.errors import EngineLost, MissingExtra
from rollick.infer.engine import Capability
from rollick.models.load import load_end_ids, load_tokenizer
from rollick.types import Completion, Request
from rollick.workers.generator import RemoteEngine, open_engines

KEY_VARIABLE = "ROLLICK_JUDGE_KEY"
MODEL_NAME = "judge"


@dataclass(frozen=True, slots=True)
class OwnJudge:
    """Where the judge answers, and how rewards are told."""

    base_url: str
    token: str

    @property
    def secrets(self) -> Mapping[str, str]:
        """For the environment of reward processes."""
        return {KEY_VARIABLE: self.token}

    def addressed(self, spec: RewardSpec) -> RewardSpec:
        """The reward with the judge's address, if it is one that asks it."""
        if not spec.asks_judge:
            return spec
        address = {"url": self.base_url, "model": MODEL_NAME, "key_env": KEY_VARIABLE}
        return spec.model_copy(update={"options": spec.options | address})


class LeastBusy:
    """Access to several engines: a request goes to the one with the fewest under way."""

    def __init__(self, engines: Sequence[RemoteEngine]) -> None:
        self._engines = engines

    async def generate(self, request: Request) -> Completion:
        alive = [engine for engine in self._engines if not engine.lost]
        if not alive:
            raise EngineLost("every judge is lost", fix="look at the log of its host")
        engine = min(alive, key=lambda one: len(one.waiting))
        return await engine.generate(request)

    @contextmanager
    def doing(self, what: str) -> Generator[None]:
        yield


@asynccontextmanager
async def open_judge(group: WorkerGroup, recipe: Recipe) -> AsyncGenerator[OwnJudge]:
    """A server over the judge's engines, from here to the end of the block."""
    try:
        from rollick.serve.gateway import Gateway
        from rollick.serve.server import ServeSettings, serving
    except ImportError as error:  # only a run with a judge of its own serves anything
        raise MissingExtra.of(error.name or "uvicorn", "serve") from error
    judge = recipe.judge
    assert judge is not None
    codec = ChatCodec(load_tokenizer(judge), judge.template, end_of_turn_ids=load_end_ids(judge))
    async with open_engines(group, "judge") as engines:
        gateway = Gateway(
            codec,
            model=MODEL_NAME,
            max_length=judge.max_length,
            access=LeastBusy(engines),
            cuts_support=all(Capability.CUT_SUPPORT in one.capabilities for one in engines),
        )
        async with serving(gateway, ServeSettings()) as served:
            yield OwnJudge(served.base_url, served.token)
