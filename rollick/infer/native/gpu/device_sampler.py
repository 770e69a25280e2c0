"""The rows' state on the device, sampling on the device, and the transfer of tokens to the host.

Tokens with equal logits are kept or removed together, so a row may keep more than top-k of them.
An inactive row (ended or unused) is computed like the others, and its state does not change. Random
numbers come from philox.py, by the row's stream and its number of generated tokens. For tests,
`sampler.sample` does the same without kernels.

Dims: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollick.infer.native.philox import uniforms
from rollick.infer.native.sampler import RowIndices, SamplingMetadata, sample


class StateField(IntEnum):
    """Rows of `DeviceState.state`; the kernels use these numbers."""

    TOKEN = 0
    LENGTH = 1
    PROMPT = 2
    LIMIT = 3
    STREAM = 4
    ACTIVE = 5
    TOP_K = 6


class SamplingField(IntEnum):
    """Rows of `DeviceState.sampling`; the kernels use these numbers."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2


@dataclass(frozen=True, slots=True, eq=False)
class DeviceState:
    """One column per row. Addresses never change: captured graphs hold them."""

    state: Tensor
    """[StateField, R] int64"""
    sampling: Tensor
    """[SamplingField, R] float32"""
    page_table: Tensor
    """[R, P] int32: the pages of each row, in order"""
    sampled: Tensor
    """[2, R] int32: the tokens of the last step, and the bits of their log-probs"""
    stop_ids: Tensor

    @classmethod
    def empty(cls, *, rows: int, pages: int, stop_ids: list[int], device: str) -> DeviceState:
        return cls(
            state=torch.zeros(len(StateField), rows, dtype=torch.int64, device=device),
            sampling=torch.zeros(len(SamplingField), rows, dtype=torch.float32, device=device),
            page_table=torch.zeros(rows, pages, dtype=torch.int32, device=device),
            sampled=torch.zeros(2, rows, dtype=torch.int32, device=device),
            stop_ids=torch.tensor(stop_ids, dtype=torch.int64, device=device),
        )

    @property
    def logprobs(self) -> Tensor:
        return self.sampled[1].view(torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class PendingStep:
    """A launched decode whose tokens the host has not read. They are copied to pinned memory, so
    the host reads a step while the device runs the next one."""

    version: int
    """The policy version that samples."""
    rows: RowIndices
    """Rows that sample a token, unless they ended before."""
    epochs: npt.NDArray[np.int64]
    """RowProgress.epoch at the launch: shows later whether a row still has the same sequence."""
    sampled: Tensor
    copy_event: Any
    """The CUDA event of that copy; None on the CPU."""

    @classmethod
    def start(
        cls, sampled: Tensor, *, version: int, rows: RowIndices, epochs: npt.NDArray[np.int64]
    ) -> PendingStep:
        """Queue a copy of `sampled` [2, R] to the host after all launched work."""
        if not sampled.is_cuda:
            return cls(version, rows, epochs, sampled.clone(), None)
        host = torch.empty(sampled.shape, dtype=sampled.dtype, pin_memory=True)
        host.copy_(sampled, non_blocking=True)
        copy_event = torch.cuda.Event()
        copy_event.record()
        return cls(version, rows, epochs, host, copy_event)

    def wait(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Tokens and log-probs of `rows`."""
        if self.copy_event is not None:
            self.copy_event.synchronize()
        tokens, logprob_bits = self.sampled.numpy()
        return tokens[self.rows], logprob_bits.view(np.float32)[self.rows]


def sample_on_device(
    logits_RV: Tensor, device_state: DeviceState, *, truncate: bool, kernels: bool
) -> None:
    """Sample a token for each row 0..R-1. Without `truncate`, ignores top-k, top-p and min-p."""
    if not kernels:
        _sample_reference(logits_RV, device_state, truncate=truncate)
        return
    from rollick.infer.native.gpu.sampling_kernels import launch_logit_floors, launch_sampling

    floor_R = None
    if truncate:
        # For all rows, because only the device knows which ones need it.
        top_k_R = device_state.state[StateField.TOP_K]
        floor_R = launch_logit_floors(logits_RV, top_k=top_k_R, sampling=device_state.sampling)
    launch_sampling(
        logits_RV,
        state=device_state.state,
        temperature=device_state.sampling[SamplingField.TEMPERATURE],
        stop_ids=device_state.stop_ids,
        sampled=device_state.sampled[0],
        logprobs=device_state.logprobs,
        floor=floor_R,
    )


def _sample_reference(logits_RV: Tensor, device_state: DeviceState, *, truncate: bool) -> None:
    """Like the kernels, with `sampler.sample`."""
    count = len(logits_RV)
    state = device_state.state[:, :count]
    host_state = state.cpu().numpy()
    temperature_R, top_p_R, min_p_R = device_state.sampling[:, :count].double().cpu().numpy()
    metadata = SamplingMetadata(temperature_R, host_state[StateField.TOP_K], top_p_R, min_p_R)
    if not truncate:
        metadata = replace(
            metadata, top_k_R=np.zeros(count, np.int64), top_p_R=np.ones(count), min_p_R=0 * min_p_R
        )
    generated_R = host_state[StateField.LENGTH] - host_state[StateField.PROMPT]
    uniform_R = uniforms(host_state[StateField.STREAM].view(np.uint64), generated_R)
    result = sample(logits_RV, metadata, uniform_R=uniform_R)
    token_R = torch.from_numpy(result.tokens_R).to(state.device)
    device_state.sampled[0, :count] = token_R.int()
    device_state.logprobs[:count] = torch.from_numpy(result.logprobs_R).float()
    active_R = state[StateField.ACTIVE] == 1
    state[StateField.TOKEN] = torch.where(active_R, token_R, state[StateField.TOKEN])
    state[StateField.LENGTH] += active_R
    at_limit_R = state[StateField.LENGTH] >= state[StateField.LIMIT]
    ends_R = torch.isin(token_R, device_state.stop_ids) | at_limit_R
    state[StateField.ACTIVE] = (active_R & ~ends_R).long()
