"""Checks at load, on a few tokens, that our forwards give the results of the model's own forward.

Engine and learner call a model's decoder with our attention functions, and its output head
separately. A model family that needs more than this (its own mask, a state besides keys and values,
other logits) would give wrong results without an error. So a family that is not known to be exact
is first compared with its own forward, one sequence at a time with eager attention:

    own logits  =  output head of own hidden states
    own logits  =  two sequences in one pack                      the learner's forward
    own logits  =  prefill and decode of the same sequences       the engine's forward
    each layer  =  one call of our attention
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rollick.errors import ModelError
from rollick.models.attention.options import AttendedLayer, record_layers
from rollick.models.attention.slot_cache import ShapeStep
from rollick.models.attention.varlen import PackedLayout
from rollick.models.decoder.training import run_decoder
from rollick.models.head.logprobs import head_logits, output_head, read_logit_scaling

EXACT_FAMILIES = frozenset(
    {"gpt_oss", "granite", "llama", "ministral", "mistral", "mixtral", "olmo2", "phi3"}
    | {"qwen2", "qwen3", "qwen3_moe", "smollm3"}
)
"""Values of `model_type` whose forwards need no probe: tests/models/test_models_families.py
compares them with their own forward, and no option of their configuration changes how they attend,
except by the arguments of our attention functions."""

LENGTHS = (10, 6)
PREFILLED = 4
"""Tokens of each sequence that an engine prefills; it decodes the others."""

_WINDOW = 4
"""Sliding windows are narrowed to this, so that the probe's sequences are longer than a window."""

_TOLERANCE = {torch.float64: 2e-3, torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Maximum relative difference of a forward. In half precision most of it is rounding, which differs
between kernels and grows with the number of layers."""
_HEAD_TOLERANCE = {
    torch.float64: 2e-4,
    torch.float32: 2e-4,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
"""Maximum relative difference of logits computed from the same hidden states."""

EngineLogits = Callable[[Sequence[Sequence[int]]], Tensor]
"""From sequences to the logits [tokens, V] of those after the first PREFILLED of each."""


def needs_probe(module: nn.Module) -> bool:
    """Whether the module's family is unknown, or its code is not that of transformers."""
    config: Any = module.config
    is_custom_code = not type(module).__module__.startswith("transformers.")
    return is_custom_code or config.model_type not in EXACT_FAMILIES


def has_plain_logits(module: nn.Module) -> bool:
    """Whether no key of the configuration scales or caps the logits. The family may ignore such a
    key."""
    config: Any = module.config
    return read_logit_scaling(config.get_text_config()) == (1.0, None)


def check_learner(module: nn.Module, *, max_length: int) -> None:
    """Raises if packed sequences do not get the hidden states of each alone. A model without a
    language-model head is compared without the head."""
    if not needs_probe(module) and has_plain_logits(module):
        return
    sequences = _probe_sequences(module)
    with _explain(module, "learner"), torch.no_grad(), _narrow_windows(module, max_length):
        own = _compute_own_hidden(module, sequences)
        _check_head(module, own, sequences)
        if not needs_probe(module):
            return
        device = str(own.device)
        ids = torch.tensor([token for sequence in sequences for token in sequence], device=device)
        with record_layers() as layers, _attempt("two sequences in one pack"):
            packed = run_decoder(module.base_model, ids, PackedLayout.of(LENGTHS, device=device))
        _check_layers(module, layers, at_most=None)
        _check_equal(module, own, packed, what="two sequences in one pack")


def check_engine(module: nn.Module, compute: EngineLogits, *, max_length: int) -> None:
    """Raises if prefill and decode do not give the logits of the model's own forward."""
    if not needs_probe(module) and has_plain_logits(module):
        return
    sequences = _probe_sequences(module)
    with _explain(module, "engine"), torch.no_grad(), _narrow_windows(module, max_length):
        own = _compute_own_hidden(module, sequences)
        _check_head(module, own, sequences)
        if not needs_probe(module):
            return
        with record_layers() as layers, _attempt("prefill and decode"):
            decoded = compute(sequences)
        forwards = 1 + max(LENGTHS) - PREFILLED
        _check_layers(module, layers, at_most=forwards)
        decoded_hidden = torch.cat([rows[PREFILLED:] for rows in own.split(LENGTHS)])
        expected = head_logits(decoded_hidden, output_head(module))
        _check_equal(module, expected, decoded, what="prefill and decode")


def cache_shape(module: nn.Module) -> AttendedLayer:
    """The shape of every layer's cache on a GPU; raises if layers, or keys and values, differ."""
    with _explain(module, "GPU engine"), torch.no_grad(), record_layers() as layers:
        ids = _batch_of(module, [3])
        with _attempt("one token with a cache"):
            module.base_model(  # pyright: ignore[reportCallIssue]
                input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False, step=ShapeStep()
            )
        _check_layers(module, layers, at_most=1)
        shapes = {layer._replace(layer=0) for layer in layers}
        if len(shapes) > 1:
            raise ModelError(f"its layers have caches of {len(shapes)} shapes")
        (shape,) = shapes
        if shape.key_dim != shape.value_dim:
            sizes = f"a head dim of {shape.key_dim} for keys and {shape.value_dim} for values"
            raise ModelError(f"it has {sizes}")
    return shape


def _probe_sequences(module: nn.Module) -> list[list[int]]:
    config: Any = module.config
    vocabulary = int(config.get_text_config().vocab_size)
    # Below all image and audio tokens, which multimodal models number last.
    ids = [3 + 37 * n % max(1, vocabulary // 2 - 3) for n in range(sum(LENGTHS))]
    return [ids[: LENGTHS[0]], ids[LENGTHS[0] :]]


def _compute_own_hidden(module: nn.Module, sequences: Sequence[Sequence[int]]) -> Tensor:
    """[tokens, D], one sequence at a time."""
    base: Any = module.base_model
    with _use_eager_attention(module):
        rows = [
            base(input_ids=_batch_of(module, sequence), use_cache=False).last_hidden_state[0]
            for sequence in sequences
        ]
    return torch.cat(rows)


def _batch_of(module: nn.Module, sequence: Sequence[int]) -> Tensor:
    return torch.tensor([list(sequence)], device=next(module.parameters()).device)


def _check_head(module: Any, own: Tensor, sequences: Sequence[Sequence[int]]) -> None:
    """The same hidden states, so only the rounding of the logits may differ."""
    if module.get_output_embeddings() is None:
        return
    with _use_eager_attention(module):
        logits = [
            module(input_ids=_batch_of(module, x), use_cache=False).logits[0] for x in sequences
        ]
    ours = head_logits(own, output_head(module))
    difference = _difference(torch.cat(logits), ours)
    if not torch.isfinite(torch.cat(logits)).all():
        raise ModelError("its own logits are not finite")
    if not difference < _HEAD_TOLERANCE[own.dtype]:
        raise ModelError(
            f"its logits are not those of its output head (relative difference {difference:.2g})"
        )


def _check_layers(module: Any, layers: Sequence[AttendedLayer], *, at_most: int | None) -> None:
    """`at_most` is the number of forwards, in each of which a layer may attend once."""
    expected = int(module.config.get_text_config().num_hidden_layers)
    calls = Counter(layer.layer for layer in layers)
    missing = [layer for layer in range(expected) if not calls[layer]]
    if missing:
        raise ModelError(f"{len(missing)} of its {expected} layers do not call our attention")
    if at_most is not None and max(calls.values()) > at_most:
        raise ModelError("a layer calls our attention more than once, and has one cache")


def _check_equal(module: nn.Module, own: Tensor, ours: Tensor, *, what: str) -> None:
    difference = _difference(own, ours)
    if not difference < _TOLERANCE[next(module.parameters()).dtype]:
        raise ModelError(
            f"{what} differ from the model's own forward (relative difference {difference:.2g})"
        )


def _difference(expected: Tensor, actual: Tensor) -> float:
    """Mean over the rows of |expected - actual| / |expected|."""
    expected, actual = expected.double(), actual.to(expected.device).double()
    return ((expected - actual).norm(dim=-1) / expected.norm(dim=-1)).mean().item()


@contextmanager
def _explain(module: nn.Module, part: str) -> Generator[None]:
    """Raise any failure of the probe as a ModelError that names the model and the part."""
    try:
        yield
    except Exception as error:  # code of a model may raise anything
        reason = error.message if isinstance(error, ModelError) else _first_line(error)
        config: Any = module.config
        raise ModelError(
            f"the {part} cannot compute {type(module).__name__} (model_type "
            f"{config.model_type!r}) exactly: {reason}",
            fix="choose a model of a family that docs/models.md lists as exact; if only the engine "
            "refuses it, infer.engine=vllm may support it",
        ) from error


@contextmanager
def _attempt(inputs: str) -> Generator[None]:
    """Raise an error of the model's own code as a ModelError that names the inputs."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        message = f"its own code fails with our attention on {inputs} ({_first_line(error)})"
        raise ModelError(message) from error


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


@contextmanager
def _use_eager_attention(module: nn.Module) -> Generator[None]:
    """Use transformers' reference attention instead of ours inside the context."""
    configs = [(config, "_attn_implementation") for config in _configs(module)]
    with _change_attributes(configs, lambda _: "eager"):
        yield


@contextmanager
def _narrow_windows(module: nn.Module, max_length: int) -> Generator[None]:
    """Narrow the windows that are shorter than the run's sequences, by any name, in config and
    modules. Longer ones have no effect in this run."""
    windows: list[tuple[Any, str]] = [
        (holder, name)
        for holder in (*_configs(module), *module.modules())
        for name, value in vars(holder).items()
        if "window" in name and type(value) is int and value < max_length
    ]
    with _change_attributes(windows, lambda window: min(window, _WINDOW)):
        yield


def _configs(module: nn.Module) -> list[Any]:
    """The configurations of the model and its parts, each once."""
    own: list[Any] = [getattr(part, "config", None) for part in module.modules()]
    return list({id(config): config for config in own if hasattr(config, "model_type")}.values())


@contextmanager
def _change_attributes(
    attributes: Sequence[tuple[Any, str]], change: Callable[[Any], Any]
) -> Generator[None]:
    """Change attributes inside the context."""
    before = [getattr(holder, name) for holder, name in attributes]
    try:
        for (holder, name), value in zip(attributes, before, strict=True):
            setattr(holder, name, change(value))
        yield
    finally:
        for (holder, name), value in zip(attributes, before, strict=True):
            setattr(holder, name, value)
