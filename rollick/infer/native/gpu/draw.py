"""What the device knows of the running rows, and how it draws their next tokens without the host.

Owns the state of the rows on the device, and the reference of the drawing kernels in plain torch.
Does not own what the host knows (rows.py).

    logits [R, V] -> floors: the least logit that top-k, top-p and min-p leave to each row
                  -> draw: token, length and activity of each row move on; token and log-prob out

Tokens with equal logits are left or cut together, so a row may keep more than top-k of them.

A row that ended, or that nobody uses, is inactive: it is computed like the others, and stays
where it is. The random numbers are philox.py's, by a row's stream and the number of tokens drawn.

Dims: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from rollick.infer.native.philox import uniforms


class Field(IntEnum):
    """Rows of `DeviceRows.state`; the kernels know these numbers."""

    TOKEN = 0
    LENGTH = 1
    PROMPT = 2
    LIMIT = 3
    STREAM = 4
    ACTIVE = 5
    TOP_K = 6


class Share(IntEnum):
    """Rows of `DeviceRows.shares`."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """One column for each row. Addresses never change: captured graphs hold them."""

    state: Tensor
    """[Field, R] int64"""
    shares: Tensor
    """[Share, R] float32"""
    table: Tensor
    """[R, P] int32: the pages of each row, in order."""
    drawn: Tensor
    """[2, R] int32: the tokens of the last step, and the bits of their log-probs."""
    stops: Tensor

    @classmethod
    def empty(cls, *, rows: int, pages: int, stops: list[int], device: str) -> DeviceRows:
        return cls(
            state=torch.zeros(len(Field), rows, dtype=torch.int64, device=device),
            shares=torch.zeros(len(Share), rows, dtype=torch.float32, device=device),
            table=torch.zeros(rows, pages, dtype=torch.int32, device=device),
            drawn=torch.zeros(2, rows, dtype=torch.int32, device=device),
            stops=torch.tensor(stops, dtype=torch.int64, device=device),
        )

    @property
    def logprobs(self) -> Tensor:
        return self.drawn[1].view(torch.float32)


def draw(logits_RV: Tensor, rows: DeviceRows, *, cuts: bool, kernels: bool) -> None:
    """One token for each of the rows 0..R-1; without `cuts` from all tokens."""
    floor_R = floors(logits_RV, rows, kernels=kernels) if cuts else None
    if not kernels:
        _draw_reference(logits_RV, rows, floor_R)
        return
    from rollick.infer.native.gpu.draw_kernels import launch_draw

    launch_draw(
        logits_RV,
        state=rows.state,
        temperature=rows.shares[Share.TEMPERATURE],
        stops=rows.stops,
        drawn=rows.drawn[0],
        logprobs=rows.logprobs,
        floor=floor_R,
    )


def floors(logits_RV: Tensor, rows: DeviceRows, *, kernels: bool) -> Tensor:
    """[R] float32: the least logit that can be drawn; -inf where a row is greedy or not cut.

    For all rows alike, because the host must not be asked which.
    """
    if not kernels:
        return _floors_reference(logits_RV, rows)
    from rollick.infer.native.gpu.floor_kernel import launch_floors

    return launch_floors(logits_RV, top_k=rows.state[Field.TOP_K], shares=rows.shares)


def _floors_reference(logits_RV: Tensor, rows: DeviceRows) -> Tensor:
    count, vocabulary = logits_RV.shape
    temperature_R1 = rows.shares[Share.TEMPERATURE, :count, None].double()
    greedy_R1 = temperature_R1 == 0
    ordered_RV = logits_RV.sort(dim=-1, descending=True).values
    scaled_RV = ordered_RV.double() / torch.where(greedy_R1, 1.0, temperature_R1)
    top_k_R1 = rows.state[Field.TOP_K, :count, None]
    rank_V = torch.arange(vocabulary, device=logits_RV.device)
    outside_RV = (rank_V >= top_k_R1) & (top_k_R1 > 0)
    # Top-p looks at what top-k left, as it is commonly understood.
    mass_RV = scaled_RV.masked_fill(outside_RV, float("-inf")).softmax(-1)
    before_RV = mass_RV.cumsum(-1) - mass_RV
    top_p_R1 = rows.shares[Share.TOP_P, :count, None].double()
    outside_RV |= (before_RV >= top_p_R1) & (top_p_R1 < 1)
    min_p_R1 = rows.shares[Share.MIN_P, :count, None].double()
    outside_RV |= mass_RV < min_p_R1 * mass_RV[:, :1]
    outside_RV &= ~greedy_R1
    outside_RV[:, 0] = False
    return ordered_RV.masked_fill(outside_RV, float("inf")).amin(-1)


def _draw_reference(logits_RV: Tensor, rows: DeviceRows, floor_R: Tensor | None) -> None:
    count = len(logits_RV)
    state = rows.state[:, :count]
    temperature_R1 = rows.shares[Share.TEMPERATURE, :count, None]
    if floor_R is not None:
        logits_RV = logits_RV.masked_fill(logits_RV < floor_R[:, None], float("-inf"))
    logits_RV = logits_RV / torch.where(temperature_R1 == 0, 1.0, temperature_R1)
    logprobs_RV = logits_RV.float().log_softmax(-1)
    drawn_before = (state[Field.LENGTH] - state[Field.PROMPT]).cpu().numpy()
    stream = state[Field.STREAM].cpu().numpy().view(np.uint64)
    uniform_R1 = torch.from_numpy(uniforms(stream, drawn_before)).to(logits_RV.device)[:, None]
    cumulative_RV = logprobs_RV.exp().cumsum(-1, dtype=torch.float64)
    goal_R1 = uniform_R1 * cumulative_RV[:, -1:]
    picked_R = torch.searchsorted(cumulative_RV, goal_R1, right=True)[:, 0]
    picked_R = picked_R.clamp_(max=logits_RV.shape[-1] - 1)
    token_R = torch.where(temperature_R1[:, 0] == 0, logits_RV.argmax(-1), picked_R)
    rows.drawn[0, :count] = token_R.int()
    rows.logprobs[:count] = logprobs_RV.gather(-1, token_R[:, None])[:, 0]
    active_R = state[Field.ACTIVE] == 1
    state[Field.TOKEN] = torch.where(active_R, token_R, state[Field.TOKEN])
    state[Field.LENGTH] += active_R
    ends_R = torch.isin(token_R, rows.stops) | (state[Field.LENGTH] >= state[Field.LIMIT])
    state[Field.ACTIVE] = (active_R & ~ends_R).long()
