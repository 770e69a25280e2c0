"""User-written agents, trained through the gateway: scripts that call an OpenAI-compatible URL.

    row (ROLLICK_TASK) -> script --OpenAI's protocol--> gateway, its own session -> engines
                            |                                    |
                            v                                    v
                    its output (stdout)              token-exact segments -> Sample

The script runs unchanged in its own process. OPENAI_BASE_URL and OPENAI_API_KEY give access to its
session only, and the recipe sets the sampling. The script's output is the sample's text, which the
rewards of its domain score. A script that fails, times out or sends no request gets a failed score.

When an agent rewrites its history, a new segment of the sample starts. All segments are trained on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rollick.data.chat import ChatCodec
from rollick.episodes.base import EngineAccess
from rollick.serve.gateway import AgentSession, Gateway
from rollick.serve.recorder import Segment
from rollick.serve.server import ServerAddress
from rollick.types import (
    NOT_SAMPLED,
    EpisodeRecord,
    Prompt,
    Sample,
    SampleId,
    Sampling,
    Score,
    ScoreStatus,
    StopReason,
    frozen_array,
)

INHERITED_VARIABLES = ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR")
"""Environment variables that an agent inherits: no secrets."""
MAX_OUTPUT_CHARACTERS = 100_000


@dataclass(frozen=True, slots=True)
class _ScriptResult:
    output: str
    failure: str = ""
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Agents:
    """Runs the scripts of domains that have one."""

    gateway: Gateway
    served: ServerAddress
    base: Path
    timeout_s: float
    seed: int

    async def play(
        self,
        script: str,
        uid: SampleId,
        prompt: Prompt,
        access: EngineAccess,
        *,
        sampling: Sampling,
        purpose: str,
    ) -> Sample:
        """Run the script once, for at most `timeout_s` seconds."""
        # Validation uses other random numbers than training with the same id.
        seed = self.seed if purpose == "train" else self.seed + 1
        session = self.gateway.open_session(uid, access, sampling=sampling, seed=seed)
        try:
            with access.activity(f"agent {script}", limit_s=self.timeout_s):
                result = await self._run(script, prompt, session)
        finally:
            segments = self.gateway.close_session(session.id)
        if not segments:
            segments = (_prompt_segment(prompt, self.gateway.codec, sampling),)
            failure = result.failure or "it sent no request to the model"
            result = _ScriptResult("", failure, result.timed_out)
        sample = _join_segments(segments, uid, prompt, result.output)
        if not result.failure:
            return sample
        status = ScoreStatus.TIMEOUT if result.timed_out else ScoreStatus.FAILED
        score = Score.failed(f"the agent failed: {result.failure}", status=status)
        return replace(sample, episode=EpisodeRecord("agent", {}, 0, (), score))

    async def _run(self, script: str, prompt: Prompt, session: AgentSession) -> _ScriptResult:
        inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
        task = {"prompt": prompt.text, **{str(key): value for key, value in prompt.row.items()}}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(self.base / script),
            env={
                **inherited,
                "OPENAI_BASE_URL": f"{self.served.address}{session.path}",
                "OPENAI_API_KEY": session.token,
                "ROLLICK_TASK": json.dumps(task, default=str),
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self.timeout_s):
                out, errors = await process.communicate()
        except TimeoutError:
            return _ScriptResult("", f"it took more than {self.timeout_s:g} s", timed_out=True)
        finally:
            # Kill the process group, with any child that the script left behind.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            return _ScriptResult("", f"it exited with code {process.returncode}: {''.join(last)}")
        return _ScriptResult(out.decode(errors="replace").strip()[:MAX_OUTPUT_CHARACTERS])


def _join_segments(
    segments: tuple[Segment, ...], uid: SampleId, prompt: Prompt, text: str
) -> Sample:
    """The segments, in order, as one sample with the stop reason of the last."""
    ends = np.cumsum([len(segment.token_ids) for segment in segments])
    return Sample(
        uid=uid,
        prompt=prompt,
        temperature=segments[-1].sampling.temperature,
        stop=segments[-1].stop,
        text=text,
        token_ids=frozen_array(np.concatenate([s.token_ids for s in segments]), np.int32),
        logprobs=frozen_array(np.concatenate([s.logprobs for s in segments]), np.float32),
        versions=frozen_array(np.concatenate([s.versions for s in segments]), np.int32),
        loss_mask=frozen_array(np.concatenate([s.loss_mask for s in segments]), np.bool_),
        segment_starts=tuple(ends[:-1].tolist()),
    )


def _prompt_segment(prompt: Prompt, codec: ChatCodec, sampling: Sampling) -> Segment:
    """The prompt without a response, for an agent that sent no request."""
    ids = codec.encode_prompt(prompt.turns)
    versions, loss_mask = np.full(len(ids), NOT_SAMPLED, np.int32), np.zeros(len(ids), np.bool_)
    logprobs = np.zeros(len(ids), np.float32)
    return Segment(ids, logprobs, versions, loss_mask, sampling, StopReason.STOP, text="", turns=0)
