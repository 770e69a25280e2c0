"""The reward `model`: queues samples and scores them in batches with the reward model.

    score(sample) -> ids of the model's own tokenizer -> queue -> Batch -> scorer ranks -> Score

The queue fills while a batch is scored. If the model fails on a batch, each of its samples gets a
failed score, which is masked and counted. rollout.max_failed_scores limits the failures of a run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from math import isfinite
from time import perf_counter

import numpy as np

from rollick.algorithms.aggregation import token_mean
from rollick.config.schema import Recipe
from rollick.data.chat import ChatCodec
from rollick.data.collate import examples_to_batch
from rollick.errors import DataError
from rollick.models.loading.load import load_tokenizer
from rollick.roles.handles import RewardModel
from rollick.types import IntArray, Sample, Score

Waiting = tuple[IntArray, asyncio.Future[Score]]
"""Token ids of a prompt and its answer, and the future of their score."""


@dataclass(slots=True)
class RewardModelClient:
    """Scores samples with the reward model. Open with `async with RewardModelClient.open(...)`."""

    model: RewardModel
    codec: ChatCodec
    batch_size: int
    max_length: int
    _waiting: deque[Waiting] = field(default_factory=deque[Waiting])
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    @asynccontextmanager
    async def open(cls, handle: RewardModel, recipe: Recipe) -> AsyncGenerator[RewardModelClient]:
        model = recipe.reward_model
        assert model is not None
        codec = ChatCodec(load_tokenizer(model), model.template)
        client = cls(handle, codec, model.batch_size, model.max_length)
        serving = asyncio.create_task(client._serve())
        try:
            yield client
        finally:
            serving.cancel()
            await asyncio.wait({serving})
            for _, answer in client._waiting:
                answer.cancel()

    async def score(self, sample: Sample) -> Score:
        begun = perf_counter()
        try:
            ids, _ = self.codec.encode_example(sample.prompt.turns, sample.text, trusted=False)
        except DataError as error:
            return Score.failed(error.message)
        if not 1 < len(ids) <= self.max_length:
            limit = f"reward_model.max_length is {self.max_length}"
            return Score.failed(f"the sample has {len(ids)} tokens; {limit}")
        answer: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, answer))
        self._wake.set()
        return replace(await answer, seconds=perf_counter() - begun)

    async def _serve(self) -> None:
        """Score queued samples in batches until cancelled."""
        while True:
            await self._wake.wait()
            limit = self.batch_size * self.model.ranks
            waiting = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
            if not self._waiting:
                self._wake.clear()
            waiting = [(ids, answer) for ids, answer in waiting if not answer.done()]
            if waiting:
                await self._score_batch(waiting)

    async def _score_batch(self, waiting: Sequence[Waiting]) -> None:
        try:
            examples = [[(ids, np.ones(len(ids), dtype=np.bool_))] for ids, _ in waiting]
            batch = examples_to_batch(examples, aggregation=token_mean, max_tokens=self.max_length)
            scores = [score_of(value) for value in (await self.model.scores(batch)).tolist()]
        except asyncio.CancelledError:
            for _, answer in waiting:
                answer.cancel()
            raise
        except Exception as error:
            scores = [Score.failed(f"the reward model failed: {error}")] * len(waiting)
        for (_, answer), score in zip(waiting, scores, strict=True):
            if not answer.done():
                answer.set_result(score)


def score_of(value: float) -> Score:
    return Score(value) if isfinite(value) else Score.failed(f"the reward model returned {value}")
