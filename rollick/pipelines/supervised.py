"""Training on given answers: the pipelines `sft`, `distill` and `dpo`.

    draw -> annotate -> train

There is no rollout: engines are used, and get new weights, only for validation.

    sft       imitate the completion of each row
    distill   match a teacher at each token of the completion (loss distillation). To distil from
              samples of the policy itself, use RL with the advantage opd or the loss distillation.
    dpo       prefer the better of two answers, more than the reference does (loss dpo or ipo);
              `train.batch_size` counts pairs
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollick.algorithms.objective import resolve_aggregation
from rollick.config.load import LoadedRecipe
from rollick.config.schema import SupervisedRecipe, environment_of
from rollick.data.batch import Batch
from rollick.data.collate import Example, examples_to_batch
from rollick.data.prompt_rows import AnswerKind
from rollick.pipelines.checkpoints import PipelineState
from rollick.pipelines.engine_restarts import GeneratorRestarter
from rollick.pipelines.loop import Pipeline, RunLoop
from rollick.pipelines.open_run import OpenRun, open_run
from rollick.pipelines.phases import phase
from rollick.pipelines.state import RunObjects, RunResult
from rollick.roles.reports import TrainReport
from rollick.types import PolicyVersion, Prompt


class SupervisedPipeline(Pipeline[TrainReport]):
    generates = False

    def __init__(self, run: OpenRun) -> None:
        super().__init__(run)
        assert isinstance(run.recipe, SupervisedRecipe)
        self.recipe = run.recipe
        self.episodes = run.episodes
        self.prompts = run.open_prompts()
        [algorithm] = run.recipe.algorithms
        self.aggregation = resolve_aggregation(algorithm.aggregation, base=run.loaded.base_dir)

    async def step(self) -> TrainReport:
        batch = await self.draw()
        batch = await self.annotate(batch)
        async with self.state.weights_lock:
            return await self.train(batch)

    async def draw(self) -> Batch:
        """The next batch: the answers of `train.batch_size` prompts, a group for each prompt."""
        self.state.begin_phase("draw")
        prompts = [self.prompts.next() for _ in range(self.recipe.train.batch_size)]
        drawn = await asyncio.gather(*(self._examples(prompt) for prompt in prompts))
        return examples_to_batch(
            [group for groups in drawn for group in groups],
            aggregation=self.aggregation,
            max_tokens=self.recipe.max_new_tokens,
            are_segments=not self.recipe.compares_pairs,
        )

    async def _examples(self, prompt: Prompt) -> Sequence[Sequence[Example]]:
        """The groups of a prompt: its answers, or the segments of its solver's episode."""
        domains = self.recipe.data.domains
        if environment_of(domains[prompt.domain]) is not None:
            return [await self.episodes.solve(prompt, domains)]
        pair, encode = self.recipe.pipeline == "dpo", self.episodes.codec.encode_example
        kinds: Sequence[AnswerKind] = ("chosen", "rejected") if pair else ("completion",)
        return [[encode(prompt.turns, text) for text in self.prompts.answers_of(prompt, *kinds)]]

    @phase("train")
    async def train(self, batch: Batch) -> TrainReport:
        report = await self.roles.policy.train(batch)
        self.guard.check(report, batch)
        await self.guard.roll_back_if_due(self.state.step + 1)
        return report

    async def prepare_validation(self) -> None:
        """Send the current weights to the engines. One that is being restarted gets them later."""
        async with self.phases.enter("publish"), self.state.weights_lock:
            self.state.version = PolicyVersion(self.state.step)
            await self.publisher.publish_to_alive(self.state.version)

    def measure(self, report: TrainReport) -> dict[str, float]:
        return report.metrics()

    def checkpoint_state(self) -> PipelineState:
        return PipelineState({"prompts": self.prompts.state()})


async def run_supervised(
    loaded: LoadedRecipe, *, objects: RunObjects | None = None, resume: bool = False
) -> RunResult:
    """Train to the end (or to a signal)."""
    async with open_run(loaded, objects=objects, resume=resume) as run:
        pipeline = SupervisedPipeline(run)
        if resume and (checkpoint := run.checkpoints.latest()):
            restored = await run.checkpoints.restore(checkpoint)
            pipeline.prompts.restore(restored.values["prompts"])
        async with GeneratorRestarter(
            group=run.roles.generators,
            recovery=run.recovery,
            faults=run.telemetry.faults,
            budget=run.recipe.cluster.restarts,
            publisher=run.publisher,
            state=run.state,
            residency=run.phases.residency,
        ).watch():
            return await RunLoop(run, pipeline).run()
