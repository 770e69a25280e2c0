"""Models and tokenizers from where the recipe says: a Hugging Face folder, the hub, a GGUF file.

Owns: finding the files, the dtype, quiet loading, and module trees without memory that borrow
another module's parameters. Does not own: attention, training, the fingerprint of weights.

    ModelConfig.path -> source_folder (GGUF: dequantised once into the cache) -> config, tokenizer,
    module
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
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
from torch import nn
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
from rollick.errors import MissingExtra, ModelError
from rollick.models.adapter import adapted_weights, base_parameters
from rollick.models.fingerprint import fingerprint as fingerprint
from rollick.models.probe import cache_folder, safe_environment

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
PACKAGE_PREFIX = "package:"
CACHE_FORMAT = "1"
"""Part of a cached model's name; another value makes all of them anew."""

_BUILDING = threading.RLock()
_EDGE_BYTES = 1 << 20


def load_config(config: ModelConfig) -> PretrainedConfig:
    """The model's own configuration (sizes, special ids)."""
    folder = source_folder(config.path)
    with quietly(), _advice(config.path):
        return AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model, or the one that the recipe names."""
    named = config.tokenizer or config.path
    folder = source_folder(named)
    with quietly(), _advice(named):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)


def load_end_ids(config: ModelConfig) -> tuple[int, ...]:
    """The ids that end an answer by the model's generation config; none where it has none.

    A tokenizer of the recipe's own may number its tokens otherwise, so then these are not asked.
    """
    if config.tokenizer is not None:
        return ()
    try:
        with quietly():
            named = GenerationConfig.from_pretrained(source_folder(config.path)).eos_token_id
    except OSError:  # the model comes without the file
        return ()
    return (named,) if isinstance(named, int) else tuple(named or ())


def load_model(
    config: ModelConfig, *, device: str, attention: str, dtype: torch.dtype | None = None
) -> nn.Module:
    """The decoder with its weights, on `device`, dropout off, with the named attention."""
    chosen = dtype or resolve_dtype(config, device)
    if chosen is torch.bfloat16 and device.startswith("cpu"):
        os.environ.update(safe_environment())
    folder = source_folder(config.path)
    with quietly(), _advice(config.path):
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=chosen,
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
        )
    return _own_memory(model.to(device)).eval()


def load_score_model(config: ModelConfig, *, device: str, attention: str) -> tuple[nn.Module, bool]:
    """A decoder whose head gives one number, with its weights as `load_model`'s; and whether that
    head is new, because the folder is that of a language model."""
    chosen = resolve_dtype(config, device)
    if chosen is torch.bfloat16 and device.startswith("cpu"):
        os.environ.update(safe_environment())
    folder = source_folder(config.path)
    with quietly(), _advice(config.path), torch.random.fork_rng(devices=[]):
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            folder,
            dtype=chosen,
            num_labels=1,
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    model, about = loaded
    return _own_memory(model.to(device)).eval(), bool(about["missing_keys"])


def resolve_dtype(config: ModelConfig, device: str) -> torch.dtype:
    """auto is float32 on the CPU and bfloat16 on a GPU."""
    if config.dtype == "auto":
        return torch.float32 if device.startswith("cpu") else torch.bfloat16
    return DTYPES[config.dtype]


def empty_model(config: ModelConfig | PretrainedConfig, *, attention: str) -> nn.Module:
    """The module tree without memory (meta device); fill it with `share_parameters`."""
    trusted = config.trust_remote_code if isinstance(config, ModelConfig) else False
    # A copy: the attention's name is written into the configuration, which may be a learner's.
    own = load_config(config) if isinstance(config, ModelConfig) else copy.deepcopy(config)
    with quietly(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            own, attn_implementation=attention, trust_remote_code=trusted
        )
    return model.eval()


def share_parameters(target: nn.Module, source: nn.Module) -> None:
    """Give `target` parameters over the storage of `source`'s; tied ones stay tied.

    What is written into one in place is read by the other; weights that have adapters in `source`
    are copied, for their sums. Buffers are small and may be changed by a forward, so each tree has
    its own copy of them.
    """
    own = adapted_weights(source)
    given = {
        name: parameter.detach().clone() if name in own else parameter
        for name, parameter in base_parameters(source)
    }
    _demand_same_names(target, given)
    fill_parameters(target, given)
    for name, buffer in source.named_buffers(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        setattr(target.get_submodule(owner), leaf, buffer.detach().clone())


def write_model(
    path: Path,
    tree: nn.Module,
    stream: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype,
    file_bytes: int = 4 << 30,
) -> None:
    """Write a Hugging Face folder from a stream of whole parameters, one file's worth at a time.

    `tree` is the module tree that the names are of; its own parameters are not read.
    """
    path.mkdir(parents=True, exist_ok=True)
    model: Any = tree
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], dtype
    with quietly():
        config.save_pretrained(path)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(path)
    files: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    for name, tensor in stream:
        if held and _bytes(held) + tensor.nbytes > file_bytes:
            files.append(_write_part(path, model, held, number=len(files)))
            held = {}
        held[name] = tensor.detach().cpu().contiguous()
    files.append(_write_part(path, model, held, number=len(files)))
    _name_files(path, files)


def _write_part(path: Path, model: Any, held: dict[str, torch.Tensor], *, number: int) -> list[str]:
    """Under the names that the model's files have, where the module tree has others."""
    public = {n: t.contiguous() for n, t in revert_weight_conversion(model, held).items()}
    save_file(public, path / f"part-{number}.safetensors", metadata={"format": "pt"})
    return list(public)


def _name_files(path: Path, files: list[list[str]]) -> None:
    if len(files) == 1:
        (path / "part-0.safetensors").rename(path / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, names in enumerate(files):
        name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (path / f"part-{number}.safetensors").rename(path / name)
        places |= dict.fromkeys(names, name)
    total = sum(file.stat().st_size for file in path.glob("model-*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _bytes(held: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in held.values())


def fill_parameters(target: nn.Module, given: Mapping[str, torch.Tensor]) -> None:
    """Give `target` parameters over these tensors, which may be one for several names. A name that
    is missing is tied, in `target`, to one that is there."""
    made: dict[int, nn.Parameter] = {}
    for names in _tied_names(target):
        tensor = next(given[name] for name in names if name in given)
        shared = made.setdefault(id(tensor), nn.Parameter(tensor.detach(), requires_grad=False))
        for name in names:
            owner, _, leaf = name.rpartition(".")
            target.get_submodule(owner).register_parameter(leaf, shared)


def _tied_names(module: nn.Module) -> list[list[str]]:
    """The names of each parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def source_folder(path: str) -> str:
    """The folder (or hub name) to load from; a GGUF file is dequantised into the cache once."""
    found = _in_package(path) if path.startswith(PACKAGE_PREFIX) else path
    if found.endswith(".gguf"):
        return str(_dequantised(Path(found).expanduser()))
    local = Path(found).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file() and not (local / "tokenizer.json").is_file():
            raise ModelError(
                f"{local} holds neither config.json nor tokenizer.json",
                fix="give a Hugging Face folder, a hub name or a .gguf file",
            )
        return str(local)
    if local.is_file() or _looks_local(found):
        problem = "is a file, not a folder" if local.is_file() else "does not exist"
        raise ModelError(
            f"model {found!r} {problem}",
            fix="give a Hugging Face folder, a hub name such as org/name, or a .gguf file",
        )
    return found


def _own_memory(model: nn.Module) -> nn.Module:
    """Loaded parameters can be views of the file: writing that file anew would end the process."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()
    return model


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def _in_package(path: str) -> str:
    """`package:NAME/FILE`: the file of an installed package, which is not imported."""
    package, _, inside = path.removeprefix(PACKAGE_PREFIX).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise ModelError(
            f"{path!r}: the Python package {package!r} is not installed",
            fix=f"install it (pip install {package.replace('_', '-')}), or give a path",
        )
    for folder in folders:
        candidate = Path(folder) / inside
        if inside and candidate.exists():
            return str(candidate)
    held = sorted(file.name for folder in folders for file in Path(folder).glob("*.gguf"))
    raise ModelError(
        f"{path!r}: the package {package!r} has no file {inside!r}",
        fix=f"it has: {', '.join(held) or 'no .gguf file'}",
    )


def _dequantised(file: Path) -> Path:
    """The safetensors folder made of a GGUF file, tokenizer and chat template included."""
    if not file.is_file():
        raise ModelError(f"GGUF file {str(file)!r} does not exist", fix="check model.path")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ModelError(
                f"{str(file)!r} does not begin with the mark of a GGUF file",
                fix="download it again; an interrupted download or a Git LFS pointer looks so",
            )
    folder = cache_folder() / "models" / _file_key(file)
    if not folder.is_dir():
        _convert(file, folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtra.of("gguf", "gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    place: dict[str, Any] = {"gguf_file": file.name}
    with (
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as temporary,
        quietly(),
        _advice(str(file)),
    ):
        AutoTokenizer.from_pretrained(file.parent, **place).save_pretrained(temporary)
        AutoModelForCausalLM.from_pretrained(
            file.parent,
            **place,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        ).save_pretrained(temporary)
        _publish(Path(temporary), folder)


def _publish(written: Path, folder: Path) -> None:
    """One rename makes the folder visible whole; whoever comes second keeps the first one's."""
    finished = written / "whole"
    finished.mkdir()
    for file in list(written.iterdir()):
        if file != finished:
            shutil.move(file, finished / file.name)
    try:
        finished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _file_key(file: Path) -> str:
    """Names a file's content by size, time and both ends: models are too large to hash whole."""
    facts = file.stat()
    digest = hashlib.blake2b(
        f"{CACHE_FORMAT} {facts.st_size} {facts.st_mtime_ns}".encode(), digest_size=12
    )
    with file.open("rb") as opened:
        digest.update(opened.read(_EDGE_BYTES))
        opened.seek(max(0, facts.st_size - _EDGE_BYTES))
        digest.update(opened.read(_EDGE_BYTES))
    return f"{file.stem}-{digest.hexdigest()}"


def _demand_same_names(target: nn.Module, given: Mapping[str, torch.Tensor]) -> None:
    wanted = {name for name, _ in target.named_parameters(remove_duplicate=False)}
    if wanted != set(given):
        raise ModelError(
            f"the two modules differ in parameters, such as {sorted(wanted ^ set(given))[:3]}",
            fix="build both from one model configuration",
        )


@contextmanager
def quietly() -> Generator[None]:
    """No progress bars and no load reports while transformers works; the old state afterwards.

    One thread at a time: transformers builds models under state of the whole process (where new
    tensors go, how loud it is), and two threads that do so at once get modules without memory.
    """
    with _BUILDING:
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
def _advice(path: str) -> Generator[None]:
    """What transformers raises about a model, as an error of ours with the path in it."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"cannot load {path!r}: {first}",
            fix="give a folder with config.json, tokenizer and safetensors, a hub name that this "
            "machine can reach, or a .gguf file",
        ) from error
