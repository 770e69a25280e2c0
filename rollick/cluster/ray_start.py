"""Starts Ray on this machine, or joins a cluster."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

import ray

from rollick.errors import ClusterUnavailable, PlacementError

RAY_SETTINGS = {
    # No usage reports to Ray's developers.
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would start one idle worker for each core, none of which our actors can use.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Silences a warning; a host on the CPU requests no GPU.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

CONNECT_TIMEOUT_S = 5.0
"""How long a cluster may take to accept a connection."""


def start_ray(address: str | None) -> bool:
    """Start Ray on this machine, or join the cluster at `address`. Returns whether the caller must
    shut Ray down. Uses Ray as it is if it is already initialised."""
    if ray.is_initialized():
        return False
    if address is not None:
        check_address(address)
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Must run on the main thread: Ray's processes die with the thread that started them.
    with _keep_signal_handlers(), _set_environment(RAY_SETTINGS), _new_process_groups():
        try:
            ray.init(
                address=address or "local",
                namespace=f"rollick-{uuid.uuid4().hex[:8]}",
                include_dashboard=None if address else False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            message = f"Ray did not start ({address or 'on this machine'}): {error}"
            fix = "check cluster.address, or leave it out to start Ray on this machine"
            raise ClusterUnavailable(message, fix=fix) from error
    return True


def check_address(address: str) -> None:
    """Check the address first: Ray would retry an unreachable address for minutes."""
    if address == "auto":
        return
    fix = "use auto or host:port, or leave it out to start Ray on this machine"
    if address.startswith("ray://"):
        message = f"cluster.address={address} is a Ray client address, which is not supported"
        raise PlacementError(message, fix=f"start rollick on a node of the cluster and {fix}")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise PlacementError(f"cluster.address={address} is not a Ray address", fix=fix)
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        message = f"no Ray cluster answers at {address}: {error}"
        raise ClusterUnavailable(message, fix=fix) from None


@contextmanager
def _keep_signal_handlers() -> Generator[None]:
    """Keep the controller's signal handlers: ray.init replaces that of SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _new_process_groups() -> Generator[None]:
    """Start processes of the block in new process groups; workers join the raylet's group.

    A supervisor or a terminal signals the controller's group: the controller saves, and needs its
    workers for that. Ray has no option for this.
    """
    original = subprocess.Popen.__init__
    in_new_group: Any = partialmethod(original, process_group=0)
    subprocess.Popen.__init__ = in_new_group
    try:
        yield
    finally:
        subprocess.Popen.__init__ = original


@contextmanager
def _set_environment(settings: Mapping[str, str]) -> Generator[None]:
    """Set variables for processes started in the block, except those that are already set."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
