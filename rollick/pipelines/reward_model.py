"""The reward `model`: samples wait here until the reward model's workers can score them together.

    score(sample) -> ids of the model's own tokenizer -> queue -> Batch -> scorer ranks -> Score

While one batch is scored the next one gathers, so a batch is as large as the model is slow. A batch
that the model fails at is a failed score of each of its samples: masked, counted, never a number.
One that fails at all of them ends the run by rollout.max_failed_scores, as any reward does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import isfinite
from time import perf_counter

import numpy as np

from rollick.algorithms.aggregation import token_mean
from rollick.cluster.dispatch import gather_samples, split_batch
from rollick.cluster.group import WorkerGroup
from rollick.config.schema import Recipe
from rollick.data.chat import ChatCodec
from rollick.data.collate import examples_to_batch
from rollick.errors import DataError
from rollick.models.load import load_tokenizer
from rollick.types import IntArray, Sample, Score

Waiting = tuple[IntArray, asyncio.Future[Score]]
"""The ids of a prompt with its answer, and who waits for their score."""


class AskedRewardModel:
    """Open it with `async with AskedRewardModel.open(...)`; it asks until that ends."""

    def __init__(
        self, group: WorkerGroup, codec: ChatCodec, *, batch_size: int, max_length: int
    ) -> None:
        self._group = group
        self._codec = codec
        self._batch_size = batch_size
        self._max_length = max_length
        self._waiting: deque[Waiting] = deque()
        self._wake = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def open(cls, group: WorkerGroup, recipe: Recipe) -> AsyncGenerator[AskedRewardModel]:
        """The reward model of the recipe, whose role the group has."""
        model = recipe.reward_model
        assert model is not None
        codec = ChatCodec(load_tokenizer(model), model.template)
        asked = cls(group, codec, batch_size=model.batch_size, max_length=model.max_length)
        serving = asyncio.create_task(asked._serve())
        try:
            yield asked
        finally:
            serving.cancel()
            await asyncio.wait({serving})
            for _, answer in asked._waiting:
                answer.cancel()

    async def score(self, sample: Sample) -> Score:
        """What the model says of the sample as a whole. Waits for the model."""
        begun = perf_counter()
        try:
            ids, _ = self._codec.encode_example(sample.prompt.turns, sample.text)
        except DataError as error:
            return Score.failed(error.message)
        if not 1 < len(ids) <= self._max_length:
            limit = f"reward_model.max_length is {self._max_length}"
            return Score.failed(f"the reward model gets {len(ids)} tokens; {limit}")
        answer: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, answer))
        self._wake.set()
        return replace(await answer, seconds=perf_counter() - begun)

    async def _serve(self) -> None:
        """Consumes waiting samples, produces scores; waits for samples and for the model."""
        while True:
            await self._wake.wait()
            most = self._batch_size * self._group.device_map.ranks("reward_model")
            taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            if not self._waiting:
                self._wake.clear()
            taken = [(ids, answer) for ids, answer in taken if not answer.done()]
            if taken:
                await self._settle(taken)

    async def _settle(self, taken: Sequence[Waiting]) -> None:
        try:
            values = await self._ask([ids for ids, _ in taken])
        except asyncio.CancelledError:
            for _, answer in taken:
                answer.cancel()
            raise
        except Exception as error:
            failed = Score.failed(f"the reward model failed: {error}")
            for _, answer in taken:
                if not answer.done():
                    answer.set_result(failed)
            return
        for (_, answer), value in zip(taken, values, strict=True):
            if not answer.done():
                answer.set_result(score_of(value))

    async def _ask(self, told: Sequence[IntArray]) -> list[float]:
        """A number for each, over all ranks."""
        examples = [[(ids, np.ones(len(ids), dtype=np.bool_))] for ids in told]
        batch = examples_to_batch(examples, aggregation=token_mean, max_tokens=self._max_length)
        parts, plan = split_batch(batch, self._group.device_map.ranks("reward_model"))
        given = [part if part.samples else None for part in parts]
        scores = await self._group.scatter("reward_model", "scores", given)
        return gather_samples(scores, batch, plan).tolist()


def score_of(value: float) -> Score:
    """The number as a score; what is no number is a failure."""
    return Score(value) if isfinite(value) else Score.failed(f"the reward model said {value}")
