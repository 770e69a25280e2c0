"""Agents of the user's own, trained through the gateway: a script that only knows a base URL.

    row (ROLLICK_TASK) -> script --OpenAI's protocol--> gateway, a session of its own -> engines
                            |                                    |
                            v                                    v
                    its last words (stdout)          token-exact segments -> Sample

The script runs as a process of its own, unchanged: OPENAI_BASE_URL and OPENAI_API_KEY open nothing
but its session, and tokens are drawn as the recipe says. What it prints is the sample's text, which
the rewards of its domain look at. A script that fails, hangs or asks for nothing is a status.

Where an agent rewrites its history a new segment of the sample starts; all are trained on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rollick.data.chat import ChatCodec
from rollick.rollout.episode import Access
from rollick.serve.gateway import Gateway
from rollick.serve.gateway import Session as GatewaySession
from rollick.serve.recorder import Segment
from rollick.serve.server import Served, ServeSettings, serving
from rollick.types import (
    Played,
    Prompt,
    Sample,
    SampleId,
    Sampling,
    Score,
    ScoreStatus,
    StopReason,
    frozen_array,
)

KEPT = ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR")
"""What an agent gets of our environment: no secrets."""
MOST_WORDS = 100_000


@dataclass(frozen=True, slots=True)
class _Ended:
    """What a script said, or why there is nothing."""

    said: str
    failure: str = ""
    late: bool = False


@dataclass(frozen=True, slots=True)
class Agents:
    """Runs the scripts of domains that have one."""

    gateway: Gateway
    served: Served
    base: Path
    timeout_s: float
    seed: int

    @classmethod
    @asynccontextmanager
    async def open(
        cls, codec: ChatCodec, *, base: Path, max_length: int, timeout_s: float, seed: int
    ) -> AsyncGenerator[Agents]:
        """A gateway on a free port of this machine, from here to the end of the block."""
        gateway = Gateway(codec, model="policy", max_length=max_length, cuts_support=False)
        async with serving(gateway, ServeSettings(grace_s=1)) as served:
            yield cls(gateway, served, base, timeout_s, seed)

    async def play(
        self,
        script: str,
        uid: SampleId,
        prompt: Prompt,
        access: Access,
        *,
        sampling: Sampling,
        purpose: str,
    ) -> Sample:
        """One run of the script; waits for it, its deadline at the latest."""
        # Validation draws other numbers than training with the same id.
        seed = self.seed if purpose == "train" else self.seed + 1
        session = self.gateway.open_session(uid, access, sampling=sampling, seed=seed)
        try:
            with access.doing(f"agent {script}"):
                ended = await self._run(script, prompt, session)
        finally:
            segments = self.gateway.close_session(session.id)
        if not ended.failure and not segments:
            ended = replace(ended, failure="it asked the model for nothing")
        return self._sample(uid, prompt, segments, ended, sampling)

    async def _run(self, script: str, prompt: Prompt, session: GatewaySession) -> _Ended:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        task = {"prompt": prompt.text, **{str(key): value for key, value in prompt.row.items()}}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(self.base / script),
            env={
                **kept,
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
            return _Ended("", f"it took more than {self.timeout_s:g} s", late=True)
        finally:
            # Also what it left behind: the whole process group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            return _Ended("", f"it ended with code {process.returncode}: {''.join(last)}")
        return _Ended(out.decode(errors="replace").strip()[:MOST_WORDS])

    def _sample(
        self,
        uid: SampleId,
        prompt: Prompt,
        segments: tuple[Segment, ...],
        ended: _Ended,
        sampling: Sampling,
    ) -> Sample:
        if segments:
            sample = replace(_joined(segments, uid, prompt), text=ended.said)
        else:
            sample = _empty(uid, prompt, self.gateway.codec, sampling.temperature)
        if not ended.failure:
            return sample
        status = ScoreStatus.TIMEOUT if ended.late else ScoreStatus.FAILED
        score = Score.failed(f"the agent failed: {ended.failure}", status=status)
        return replace(sample, played=Played("agent", {}, 0, (), score))


def _joined(segments: tuple[Segment, ...], uid: SampleId, prompt: Prompt) -> Sample:
    """One sample of all segments, in the order in which they began; it stopped as the last did."""
    ends = np.cumsum([len(segment.token_ids) for segment in segments])
    return replace(
        segments[-1].sample(uid, prompt),
        token_ids=frozen_array(np.concatenate([s.token_ids for s in segments]), np.int32),
        logprobs=frozen_array(np.concatenate([s.logprobs for s in segments]), np.float32),
        versions=frozen_array(np.concatenate([s.versions for s in segments]), np.int32),
        loss_mask=frozen_array(np.concatenate([s.loss_mask for s in segments]), np.bool_),
        breaks=tuple(ends[:-1].tolist()),
    )


def _empty(uid: SampleId, prompt: Prompt, codec: ChatCodec, temperature: float) -> Sample:
    ids = codec.encode_prompt(prompt.turns)
    return Sample(
        uid=uid,
        prompt=prompt,
        token_ids=ids,
        logprobs=frozen_array(np.zeros(len(ids)), np.float32),
        versions=frozen_array(np.full(len(ids), -1), np.int32),
        loss_mask=frozen_array(np.zeros(len(ids)), np.bool_),
        temperature=temperature,
        stop=StopReason.STOP,
        text="",
    )
