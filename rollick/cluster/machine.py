"""Resources of this machine: GPUs, memory, open files. Does not import torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from rollick.errors import MAX_OPEN_FILES

GPU_NODE = re.compile(r"nvidia[0-9]+")
NVIDIA_SMI_TIMEOUT_S = 5.0
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_id() -> str:
    """Host name, boot id and PID namespace: processes on one machine see each other's PIDs and
    memory. Two containers on one host are two machines."""
    parts = [platform.node()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def raise_open_files_limit() -> None:
    """Raise this process's limit of open files as far as allowed; worker processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def torch_supports_cuda() -> bool:
    """Whether the installed torch can use a GPU, by its version: CPU builds end in +cpu."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return not importlib.metadata.version("torch").endswith("+cpu")
    return False


def count_gpus() -> int:
    """NVIDIA GPUs that a process started here would see (CUDA_VISIBLE_DEVICES)."""
    count = len(_gpu_nodes()) or len(query_gpu_memory())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    return min(count, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def _gpu_nodes() -> list[str]:
    with suppress(OSError):
        return [name for name in os.listdir("/dev") if GPU_NODE.fullmatch(name)]
    return []


def query_gpu_memory() -> list[int]:
    """Bytes of each GPU of the machine; empty if nvidia-smi is missing or does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        )
        return [int(line) << 20 for line in output.stdout.splitlines() if line.strip()]
    return []


def memory_bytes() -> int | None:
    """Bytes of memory that processes of this machine or container may use; None if unknown."""
    limits: list[int] = []
    with suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # Without a limit the file holds `max`.
            limits.append(int(Path(path).read_text("ascii")))
    return min(limits, default=None)
