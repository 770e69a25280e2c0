"""Loads models and tokenizers from a Hugging Face folder, the hub or a GGUF file (dequantised once
into the cache), writes such folders, and builds module trees that share another's parameters."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from rollick.config.schema import ModelConfig
from rollick.errors import ModelError, RollickError
from rollick.models.bf16_probe import safe_environment
from rollick.models.loading.adapter import adapted_weights, base_parameters
from rollick.models.loading.folder_checks import check_config, check_folder, forget_implementations
from rollick.models.loading.locate import check_reachable, converted_folder, locate_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_BUILD_LOCK = threading.RLock()


def load_config(config: ModelConfig) -> PretrainedConfig:
    folder = source_folder(config.path)
    check_folder(folder)
    with silence_transformers(), _raise_model_error(config.path):
        check_config(PretrainedConfig.get_config_dict(folder)[0], config.path)
        loaded = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        return forget_implementations(loaded)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    source = config.tokenizer or config.path
    folder = source_folder(source)
    check_folder(folder)
    with silence_transformers(), _raise_model_error(source):
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        loaded("x")  # some damaged files fail only on use
        return loaded


def load_end_ids(config: ModelConfig) -> tuple[int, ...]:
    """The end-of-sequence ids of the model's generation config; empty if it has none, or with a
    tokenizer from the recipe, whose ids may differ."""
    if config.tokenizer is not None:
        return ()
    folder = source_folder(config.path)
    check_folder(folder)
    with silence_transformers(), _raise_model_error(config.path):
        try:
            ids = GenerationConfig.from_pretrained(folder).eos_token_id
        except OSError:  # the model comes without the file
            return ()
        return (ids,) if isinstance(ids, int) else tuple(int(token) for token in ids or ())


def load_model(config: ModelConfig, *, device: str, attention: str) -> nn.Module:
    """The decoder with its weights, in eval mode, with this attention implementation."""
    options: dict[str, Any] = {"dtype": resolve_dtype(config, device)}
    model = _from_pretrained(AutoModelForCausalLM, config, device, attention, options)
    return _train_pad_token(_copy_parameters(model.to(device))).eval()


def load_score_model(config: ModelConfig, *, device: str, attention: str) -> tuple[nn.Module, bool]:
    """A decoder with a score head, loaded as by `load_model`, and whether the head is randomly
    initialised because the folder has a language model."""
    options: dict[str, Any] = {"dtype": resolve_dtype(config, device), "num_labels": 1}
    options["output_loading_info"] = True
    with torch.random.fork_rng(devices=[]):
        model, info = _from_pretrained(
            AutoModelForSequenceClassification, config, device, attention, options
        )
    return _train_pad_token(_copy_parameters(model.to(device))).eval(), bool(info["missing_keys"])


def _from_pretrained(
    auto_class: Any, config: ModelConfig, device: str, attention: str, options: dict[str, Any]
) -> Any:
    if options["dtype"] is torch.bfloat16 and device.startswith("cpu"):
        os.environ.update(safe_environment())
    options |= {"attn_implementation": attention, "trust_remote_code": config.trust_remote_code}
    loaded: Any = load_config(config)
    if "num_labels" in options:
        loaded.num_labels = options.pop("num_labels")
    with silence_transformers(), _raise_model_error(config.path, attention=attention):
        return auto_class.from_pretrained(source_folder(config.path), config=loaded, **options)


def resolve_dtype(config: ModelConfig, device: str) -> torch.dtype:
    """auto is float32 on the CPU and bfloat16 on a GPU."""
    if config.dtype == "auto":
        return torch.float32 if device.startswith("cpu") else torch.bfloat16
    return DTYPES[config.dtype]


def empty_model(
    config: ModelConfig | PretrainedConfig, *, attention: str, with_score_head: bool = False
) -> nn.Module:
    """The module tree without memory (meta device); fill it with `share_parameters`.
    `with_score_head`: the tree of `load_score_model`."""
    trust = config.trust_remote_code if isinstance(config, ModelConfig) else False
    # A copy: the attention is written into the configuration, which may be a learner's.
    loaded = load_config(config) if isinstance(config, ModelConfig) else copy.deepcopy(config)
    path = config.path if isinstance(config, ModelConfig) else str(config.name_or_path)
    auto_class: Any = AutoModelForCausalLM
    if with_score_head:
        auto_class, loaded.num_labels = AutoModelForSequenceClassification, 1
    with silence_transformers(), _raise_model_error(path), torch.device("meta"):
        model = auto_class.from_config(
            loaded, attn_implementation=attention, trust_remote_code=trust
        )
    return _train_pad_token(model).eval()


def share_parameters(target: nn.Module, source: nn.Module) -> None:
    """Give `target` parameters over the storage of `source`'s; tied ones stay tied. Weights with
    adapters in `source` are copied instead, to hold the merged weights. Buffers are copied too:
    they are small, and a forward may change them."""
    adapted = adapted_weights(source)
    parameters = {
        name: parameter.detach().clone() if name in adapted else parameter
        for name, parameter in base_parameters(source)
    }
    expected = {name for name, _ in target.named_parameters(remove_duplicate=False)}
    if expected != set(parameters):
        raise ModelError(
            f"the two modules differ in parameters, such as {sorted(expected ^ {*parameters})[:3]}",
            fix="build both from one model configuration",
        )
    fill_parameters(target, parameters)
    for name, buffer in source.named_buffers(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        setattr(target.get_submodule(owner), leaf, buffer.detach().clone())


def save_with_tokenizer(module: nn.Module | None, config: ModelConfig, path: Path) -> None:
    """Write a Hugging Face folder: the module, if there is one, and the model's tokenizer."""
    tokenizer: Any = load_tokenizer(config)
    with silence_transformers():
        if module is not None:
            saved: Any = module
            saved.save_pretrained(path)
        tokenizer.save_pretrained(path)
    inherit_permissions(path)


def inherit_permissions(folder: Path) -> None:
    """Give the weights the permissions of the folder: safetensors makes them readable only for
    their owner."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)


def write_model(
    path: Path,
    tree: nn.Module,
    stream: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    file_bytes: int = 4 << 30,
) -> None:
    """Write a Hugging Face folder from a stream of full parameters, with one file in memory. `tree`
    is the module with these names; its parameters are not read."""
    path.mkdir(parents=True, exist_ok=True)
    model: Any = tree
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], dtype
    with silence_transformers():
        config.save_pretrained(path)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(path)
    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    for name, tensor in stream:
        if pending and sum(x.nbytes for x in pending.values()) + tensor.nbytes > file_bytes:
            files.append(_write_part(path, model, pending, number=len(files)))
            pending = {}
        pending[name] = tensor.detach().cpu().contiguous()
    files.append(_write_part(path, model, pending, number=len(files)))
    _name_files(path, files)


def _write_part(path: Path, model: Any, tensors: dict[str, Tensor], *, number: int) -> list[str]:
    """Write and return the names of the model's files, which may differ from the module's."""
    public = {n: t.contiguous() for n, t in revert_weight_conversion(model, tensors).items()}
    save_file(public, path / f"part-{number}.safetensors", metadata={"format": "pt"})
    return list(public)


def _name_files(path: Path, files: list[list[str]]) -> None:
    if len(files) == 1:
        (path / "part-0.safetensors").rename(path / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (path / f"part-{number}.safetensors").rename(path / name)
        weight_map |= dict.fromkeys(names, name)
    total = sum(file.stat().st_size for file in path.glob("model-*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def fill_parameters(target: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give `target` parameters over these tensors. Several names may share a tensor; a missing name
    is tied, in `target`, to one of these."""
    tied: dict[int, list[str]] = {}
    for name, parameter in target.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    created: dict[int, nn.Parameter] = {}
    for names in tied.values():
        tensor = next(tensors[name] for name in names if name in tensors)
        shared = created.setdefault(id(tensor), nn.Parameter(tensor.detach(), requires_grad=False))
        for name in names:
            owner, _, leaf = name.rpartition(".")
            target.get_submodule(owner).register_parameter(leaf, shared)


def source_folder(path: str) -> str:
    """The folder (or hub name) to load from; a GGUF file is first dequantised into the cache."""
    location = locate_model(path)
    check_reachable(location)
    if location.kind != "gguf":
        return location.path
    folder = converted_folder(Path(location.path))
    if not folder.is_dir():
        _convert(Path(location.path), folder)
    return str(folder)


def _train_pad_token(model: nn.Module) -> nn.Module:
    """Give the embedding of the pad token a gradient. Batches have no padding, and in many models
    the pad token is also the end of the sequence."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    return model


def _copy_parameters(model: nn.Module) -> nn.Module:
    """Copy parameters that are mapped from the file: rewriting it would crash the process."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()
    return model


def _convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a safetensors folder, with tokenizer and chat template."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"gguf_file": file.name}
    with (
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as temporary,
        silence_transformers(),
        _raise_model_error(str(file)),
    ):
        AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(temporary)
        options |= {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, **options)
        model.save_pretrained(temporary)
        _move_into_cache(Path(temporary), folder)


def _move_into_cache(written: Path, folder: Path) -> None:
    """Rename atomically; if another process created the folder first, keep it."""
    finished = written / "complete"
    finished.mkdir()
    for file in list(written.iterdir()):
        if file != finished:
            shutil.move(file, finished / file.name)
    inherit_permissions(finished)
    try:
        finished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


@contextmanager
def silence_transformers() -> Generator[None]:
    """No progress bars or load reports of transformers. One thread at a time: transformers builds
    models under process-wide state, and two threads that do so at once get modules without memory.
    """
    with _BUILD_LOCK:
        verbosity = transformers_logging.get_verbosity()
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            if bars:
                transformers_logging.enable_progress_bar()


@contextmanager
def _raise_model_error(path: str, *, attention: str | None = None) -> Generator[None]:
    """Turn errors of transformers into a ModelError that names the path. Catches every Exception,
    because a damaged or hostile file can raise any of them in transformers."""
    try:
        yield
    except (RollickError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if attention is not None and error.args == (attention,):
            raise ModelError(
                f"cannot load {path!r}: the code of its family has attention functions of its own "
                "and cannot call ours",
                fix="choose a model of a family that docs/models.md lists as exact",
            ) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"cannot load {path!r}: {reason}",
            fix="give a folder with config.json, tokenizer and safetensors, a hub name that this "
            "machine can reach, or a .gguf file",
        ) from error
