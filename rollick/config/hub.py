"""Checks whether a model or dataset is available: in the cache, or on the Hugging Face hub.

Returns within seconds; the download libraries would retry for a minute.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

HUB_TIMEOUT_S = 5.0
"""Time limit of a request to the hub."""

Kind = Literal["model", "dataset"]


def cached_snapshot(name: str, kind: Kind = "model") -> Path | None:
    """The newest snapshot of a repository in the cache of this machine."""
    repository = f"{kind}s--{name.replace('/', '--')}"
    folder = _cache_folder("HF_HUB_CACHE", "hub") / repository / "snapshots"
    if not folder.is_dir():
        return None
    snapshots = [path for path in folder.iterdir() if path.is_dir() and any(path.iterdir())]
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


def find_hub_problem(name: str, kind: Kind = "model") -> str:
    """Why a model or dataset is not available; empty if it is in the cache or on the hub."""
    dataset = _cache_folder("HF_DATASETS_CACHE", "datasets") / name.replace("/", "___")
    if cached_snapshot(name, kind) or (kind == "dataset" and dataset.is_dir()):
        return ""
    reason = _query_hub(name, kind)
    return f"it is not in the hub's cache, and {reason}" if reason else ""


def _cache_folder(variable: str, folder: str) -> Path:
    environment = os.environ
    home = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{home}/huggingface"
    return Path(environment.get(variable) or f"{home}/{folder}").expanduser()


def _query_hub(name: str, kind: Kind) -> str:
    """Why it cannot be downloaded from the hub; empty if it can."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    hub = HfApi()
    request_info = hub.model_info if kind == "model" else hub.dataset_info
    try:
        request_info(name, timeout=HUB_TIMEOUT_S)
    except (GatedRepoError, RepositoryNotFoundError):
        return "the hub does not have it, or requires an access token"
    except HFValidationError:
        return f"{name!r} is not a name on the hub"
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except HfHubHTTPError as error:
        return f"the hub answers with status {error.response.status_code}"
    except Exception as error:  # A failed connection: the HTTP library's own exceptions.
        return f"the hub cannot be reached ({type(error).__name__}: {error})"
    return ""
