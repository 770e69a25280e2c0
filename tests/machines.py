"""Machines for tests: Linux namespaces of this machine, with a network that can fail.

    with Machines(2) as (head, node):
        head.start([...])          # a process on a machine
        network.cut(node)          # drops all its packets until `join`
        node.kill()                # the kernel ends all its processes at once

Each machine has its own processes, addresses, shared memory and Ray folder. A hub process forwards
the packets between them: at once, late, or not at all.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from rollick.children.process_tree import find_descendants, signal_on_parent_death

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 9000
MISSING = "network namespaces cannot be created on this machine"
HOSTS = "\n".join(f"10.77.0.{number + 1} machine{number}" for number in range(8))
PREPARE = f"""
mount -t tmpfs tmpfs /dev/shm && mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray
hostname "$0"
printf '127.0.0.1 localhost\n{HOSTS}\n' > /tmp/ray/hosts
mount --bind /tmp/ray/hosts /etc/hosts
: > /tmp/ray/resolv.conf; mount --bind /tmp/ray/resolv.conf /etc/resolv.conf
ip link set lo up
exec sleep infinity
"""


class Machine:
    """`address` is its IP address in the network of the machines."""

    def __init__(self, number: int) -> None:
        self.address = f"10.77.0.{number + 1}"
        flags = ["--net", "--pid", "--mount", "--uts", "--mount-proc", "--fork", "--kill-child"]
        prepare = ["bash", "-ec", PREPARE, f"machine{number}"]
        self._outer = subprocess.Popen(
            ["unshare", *flags, *prepare],
            stderr=subprocess.DEVNULL,
            preexec_fn=_end_with_parent,
        )
        self.init = _wait_for_child(self._outer.pid)

    def command(self, command: Sequence[str]) -> list[str]:
        """Wrap a command so that it runs on this machine."""
        namespaces = ["--target", str(self.init), "--net", "--pid", "--mount", "--uts"]
        return ["nsenter", *namespaces, f"--wd={os.getcwd()}", *command]

    def run(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(command), check=True, text=True, capture_output=True, **options
        )

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self._outer.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes. SIGCONT also reaches the `nsenter` that started a
        process: it stops with its child, and the kernel cannot end the namespace before it has
        waited for the child."""
        starters = self._find_starters() if number is signal.SIGCONT else []
        for pid in (*self.processes(), *starters):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _find_starters(self) -> list[int]:
        """The `nsenter` processes of this machine."""
        command = ["nsenter", "--target", str(self.init)]
        starters: list[int] = []
        for process in find_descendants():
            with suppress(OSError):
                words = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
                if words[: len(command)] == command:
                    starters.append(process.pid)
        return starters

    def runs(self, program: str) -> bool:
        """Whether a process has this text in its command line."""
        for pid in self.processes():
            with suppress(OSError):
                if program in Path(f"/proc/{pid}/cmdline").read_text():
                    return True
        return False

    def processes(self) -> list[int]:
        namespace = os.readlink(f"/proc/{self.init}/ns/pid")
        own_pids: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(folder / "ns" / "pid") == namespace:
                    own_pids.append(int(folder.name))
        return own_pids


class Network:
    """Starts the hub between machines and sends it commands, which are lines of text."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._machines = machines
        pids = [str(machine.init) for machine in machines]
        self._hub = subprocess.Popen(
            [sys.executable, __file__, *pids], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._hub.stdout is not None
        assert self._hub.stdout.readline() == b"open\n", "the hub did not open its devices"
        for machine in machines:
            machine.run("ip", "addr", "add", f"{machine.address}/8", "dev", "tap0")
            machine.run("ip", "link", "set", "tap0", "mtu", str(MTU), "up")

    def cut(self, machine: Machine) -> None:
        self._command("cut", self._machines.index(machine))

    def join(self, machine: Machine) -> None:
        self._command("join", self._machines.index(machine))

    def degrade(self, *, delay_s: float, loss: float) -> None:
        """Every packet is late, and some are lost."""
        self._command("degrade", delay_s, loss)

    def _command(self, *words: object) -> None:
        assert self._hub.stdin is not None
        self._hub.stdin.write((" ".join(map(str, words)) + "\n").encode())
        self._hub.stdin.flush()

    def close(self) -> None:
        self._hub.kill()
        self._hub.wait()
        for stream in (self._hub.stdin, self._hub.stdout):
            if stream is not None:
                stream.close()


class Machines:
    """Starts machines and their network; skips the test where the kernel does not allow it."""

    def __init__(self, count: int) -> None:
        if not can_create_machines():
            pytest.skip(MISSING)
        self._stack = ExitStack()
        self.machines: list[Machine] = []
        try:
            for number in range(count):
                self.machines.append(Machine(number))
                self._stack.callback(self.machines[-1].kill)
            self.network = Network(self.machines)
            self._stack.callback(self.network.close)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for machine in self.machines:
            with suppress(OSError):
                machine.send(signal.SIGCONT)
        self._stack.close()


def _end_with_parent() -> None:
    """Kill the machine when the test process dies."""
    signal_on_parent_death(signal.SIGKILL)


def can_create_machines() -> bool:
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        return False
    trial = ["unshare", "--net", "--pid", "--mount", "--fork", "ip", "tuntap", "add", "mode", "tap"]
    with suppress(OSError):
        return subprocess.run(trial, capture_output=True).returncode == 0
    return False


def _wait_for_child(pid: int) -> int:
    """Wait until the process in the new namespaces has prepared them. Returns its pid."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children and Path(f"/proc/{children[0]}/comm").read_text() == "sleep\n":
            return int(children[0])
        time.sleep(0.01)
    raise TimeoutError("a machine was not prepared")


def open_tap(pid: int) -> int:
    """Open a tap device in the network namespace of process `pid`."""
    with open(f"/proc/{pid}/ns/net") as namespace_file:
        if ctypes.CDLL(None, use_errno=True).setns(namespace_file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", b"tap0", IFF_TAP | IFF_NO_PI))
    return tap


def forward_packets(taps: Sequence[int]) -> None:
    """Forward each packet to all other machines, until stdin is closed."""
    rng, delay_s, loss = random.Random(0), 0.0, 0.0
    cut = set[int]()
    delayed: list[tuple[float, int, int, bytes]] = []
    numbers = iter(range(1 << 62))
    while True:
        wait_s = max(0.0, delayed[0][0] - time.monotonic()) if delayed else None
        ready, _, _ = select.select([*taps, 0], [], [], wait_s)
        if 0 in ready:
            line = os.read(0, 4096).decode()
            if not line:
                return
            for name, *values in (command_line.split() for command_line in line.splitlines()):
                if name == "degrade":
                    delay_s, loss = float(values[0]), float(values[1])
                else:
                    (cut.add if name == "cut" else cut.discard)(int(values[0]))
        for source in [index for index, tap in enumerate(taps) if tap in ready]:
            for _ in range(64):
                try:
                    packet = os.read(taps[source], MTU + 100)
                except OSError:
                    break
                for target in set(range(len(taps))) - {source}:
                    if cut.isdisjoint((source, target)) and rng.random() >= loss:
                        due = time.monotonic() + delay_s
                        heapq.heappush(delayed, (due, next(numbers), target, packet))
        while delayed and delayed[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(delayed)
            with suppress(OSError):
                os.write(taps[target], packet)


if __name__ == "__main__":
    devices = [open_tap(int(pid)) for pid in sys.argv[1:]]
    print("open", flush=True)
    forward_packets(devices)
