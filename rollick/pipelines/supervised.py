"""Learning from given answers: the step that SFT, DPO and distillation are wirings of.

    draw -> annotate -> train

The session, learner and checkpoints of the RL step; no rollout, so engines are asked only to
validate, and get the weights only then. What the answers of a prompt are is passed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from rollick.algorithms.objective import resolve_aggregation
from rollick.config.load import LoadedRecipe
from rollick.data.batch import Batch
from rollick.data.collate import Example, examples_to_batch
from rollick.data.prompts import PromptStream
from rollick.errors import RollickError
from rollick.pipelines.annotate import annotate
from rollick.pipelines.base import HasSession, RunObjects, RunResult, Session, open_session, phase
from rollick.pipelines.episodes import solved_examples
from rollick.pipelines.evaluate import EvalReport
from rollick.pipelines.rl import evaluate_prompts, keep_evaluation
from rollick.types import PolicyVersion, Prompt
from rollick.workers.generator import lost_ranks
from rollick.workers.learner import TrainReport

AnswersOf = Callable[[PromptStream, Prompt], Sequence[str]]
"""The answers of a prompt that make one group: one to imitate, or the better and the worse."""


def one_answer(prompts: PromptStream, prompt: Prompt) -> Sequence[str]:
    """The completion to imitate."""
    return (prompts.completion_of(prompt),)


async def run_supervised(
    loaded: LoadedRecipe,
    answers_of: AnswersOf,
    *,
    objects: RunObjects | None = None,
    resume: bool = False,
) -> RunResult:
    """Train to the end (or to a signal)."""
    async with open_session(loaded, objects=objects, resume=resume) as session:
        pipeline = SupervisedPipeline(session, session.open_prompts(), answers_of)
        if resume and (checkpoint := session.folder.checkpoints.latest()):
            facts = await session.restore(checkpoint)
            pipeline.prompts.restore(facts["prompts"])
        return await pipeline.run()


class SupervisedPipeline(HasSession):
    """Updates on answers drawn from the prompt stream."""

    def __init__(self, session: Session, prompts: PromptStream, answers_of: AnswersOf) -> None:
        self.session = session
        self.recipe = session.recipe
        self.prompts = prompts
        self.answers_of = answers_of
        self.validation = session.open_prompts(validation=True).all()
        [algorithm] = self.recipe.algorithms
        self.aggregation = resolve_aggregation(algorithm.aggregation, base=session.base)

    async def step(self) -> TrainReport:
        """One update."""
        batch = await annotate(self, await self.draw())
        return await self.train(batch)

    async def draw(self) -> Batch:
        """The next batch: the answers of `train.batch_size` prompts, a group for each prompt."""
        prompts = [self.prompts.next() for _ in range(self.recipe.train.batch_size)]
        drawn = await asyncio.gather(*(self.examples(prompt) for prompt in prompts))
        return examples_to_batch(
            [group for groups in drawn for group in groups],
            aggregation=self.aggregation,
            max_tokens=self.recipe.sampling.max_tokens,
        )

    async def examples(self, prompt: Prompt) -> Sequence[Sequence[Example]]:
        """What is imitated (or compared) of a prompt, in groups; in an environment, what its solver
        does, each segment a group of its own."""
        if self.recipe.data.domains[prompt.domain].environment is not None:
            return [[shown] for shown in await solved_examples(self.session, prompt)]
        encode = self.session.codec.encode_example
        answers = self.answers_of(self.prompts, prompt)
        return [[encode(prompt.turns, answer) for answer in answers]]

    @phase("train")
    async def train(self, batch: Batch) -> TrainReport:
        report: TrainReport = await self.session.group.together("policy", "train", batch)
        self.session.refuse_skips(report.changed, batch)
        return report

    @phase("publish")
    async def publish(self) -> None:
        self.session.version = PolicyVersion(self.session.step)
        await self.session.publisher.publish(self.session.version)

    @phase("validate")
    async def validate(self) -> EvalReport:
        return await evaluate_prompts(self.session, self.validation)

    async def run(self) -> RunResult:
        """All updates, with validation and checkpoints on the way."""
        session, steps = self.session, self.recipe.run.steps
        every = self.recipe.checkpoint.every
        metrics = session.log.last
        if session.step == 0 and self.recipe.evaluate.at_start and self.validation:
            metrics = await self.record({})
        while session.step < steps and not session.stop.is_set():
            report = await self.step()
            session.step += 1
            metrics = await self.record(report.metrics())
            if every and session.step % every == 0:
                with session.outliving_a_failed_save():
                    await self.save(metrics)
        stopped = session.step < steps
        if session.saved_step != session.step:
            await self.save(metrics)
        return RunResult(session.folder.path, session.step, metrics, interrupted=stopped)

    async def record(self, metrics: dict[str, float]) -> dict[str, float]:
        """Log a step, with validation where it is due."""
        session, step = self.session, self.session.step
        due = self.recipe.evaluate.is_due(step, steps=self.recipe.run.steps)
        metrics |= await session.memory.metrics(without=lost_ranks(session.engines))
        if self.validation and due and not session.stop.is_set():
            await self.publish()
            try:
                report = await session.until_stopped(self.validate())
            except RollickError:
                await self.rescue(metrics)
                raise
            if report is not None:
                metrics |= report.metrics()
                keep_evaluation(session, step, report)
        self.log_step(metrics)
        return metrics

    def log_step(self, metrics: dict[str, float]) -> None:
        """Write and show the metrics of a step, with its times."""
        session = self.session
        metrics |= session.watch.finish()
        session.log.log(session.step, metrics)
        session.view.step(session.step, metrics)

    async def rescue(self, metrics: dict[str, float]) -> None:
        """Keep the updates that are made when their validation fails, whose error is the news."""
        if self.session.step:
            self.log_step(metrics)
            with suppress(RollickError):
                await self.save(metrics)

    async def save(self, metrics: dict[str, float]) -> None:
        await self.session.save({"prompts": self.prompts.state()}, metrics)
