"""The seccomp filter of a box: which system calls a program may not make.

A classic BPF program as bubblewrap's --seccomp takes it, written by hand: no library is needed, and
every rule can be read here. Calls are allowed unless listed, calls newer than the list are answered
as if the kernel did not have them, and calls of another architecture end the process.

    load arch -> other: kill     load number -> too new: ENOSYS -> in a rule: its error -> allow
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from rollick.errors import SandboxError

LOAD, JUMP_EQUAL, JUMP_GREATER, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_AT, ARCH_AT, FIRST_ARGUMENT_AT = 0, 4, 16
"""Offsets in the kernel's struct seccomp_data; of an argument the low half, little-endian."""

NEW_NAMESPACES = 0x7E020000
"""clone's flags CLONE_NEW*: mount, cgroup, uts, ipc, user, pid, net."""
AF_UNIX = 1
TERMINAL_INJECTION = (0x5412, 0x541C)
"""ioctl's TIOCSTI and TIOCLINUX."""
NEWEST_CALL = 466
"""Later ones (the numbers are the same on all architectures) were not looked at."""

AUDIT_ARCHS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Numbers from the kernel's tables, (x86_64, aarch64); None: that architecture does not have it.
DENIED: Mapping[str, tuple[int | None, int | None]] = {
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "mknod": (133, None),
    "mknodat": (259, 33),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # large, young or rarely used parts of the kernel
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "seccomp": (317, 277),
    "vmsplice": (278, 75),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # memory that no limit of a process counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "personality": (135, 92),
}
CLONE, SOCKET, SOCKETPAIR, IOCTL = (56, 220), (41, 198), (53, 199), (16, 29)
CLONE3 = 435
"""Its flags are behind a pointer, which a filter cannot read: with ENOSYS the C library falls back
to clone."""


class Instruction(NamedTuple):
    """One step of classic BPF: what, how far to jump if true and if false, the operand."""

    code: int
    if_true: int
    if_false: int
    operand: int


@cache
def seccomp_program(machine: str = "") -> bytes:
    """The filter for this machine (or the one named); SandboxError where none is known."""
    machine = machine or platform.machine()
    if machine not in AUDIT_ARCHS:
        raise SandboxError(
            f"there is no seccomp filter for {machine}",
            fix=f"use one of {', '.join(AUDIT_ARCHS)}, or a remote sandbox",
        )
    column = list(AUDIT_ARCHS).index(machine)
    steps = [
        Instruction(LOAD, 0, 0, ARCH_AT),
        Instruction(JUMP_EQUAL, 1, 0, AUDIT_ARCHS[machine]),
        Instruction(RETURN, 0, 0, KILL),
        Instruction(LOAD, 0, 0, NUMBER_AT),
        # The x32 calls of x86_64 are above it too.
        Instruction(JUMP_GREATER, 0, 1, NEWEST_CALL),
        Instruction(RETURN, 0, 0, ERROR | errno.ENOSYS),
        *_refuse(CLONE3, errno.ENOSYS),
    ]
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            steps += _refuse(number, errno.EPERM)
    steps += _refuse_if(CLONE[column], 0, JUMP_ANY_BIT, NEW_NAMESPACES)
    for call in (SOCKET, SOCKETPAIR):
        steps += _refuse_unless(call[column], 0, AF_UNIX)
    for request in TERMINAL_INJECTION:
        steps += _refuse_if(IOCTL[column], 1, JUMP_EQUAL, request)
    steps.append(Instruction(RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


def _refuse(number: int, error: int) -> list[Instruction]:
    """With the call's number loaded: answer `error` to this one."""
    return [
        Instruction(JUMP_EQUAL, 0, 1, number),
        Instruction(RETURN, 0, 0, ERROR | error),
    ]


def _refuse_if(number: int, argument: int, test: int, operand: int) -> list[Instruction]:
    """Refuse this call if an argument passes the test; the number is loaded before and after."""
    return [
        Instruction(JUMP_EQUAL, 0, 4, number),
        Instruction(LOAD, 0, 0, FIRST_ARGUMENT_AT + 8 * argument),
        Instruction(test, 0, 1, operand),
        Instruction(RETURN, 0, 0, ERROR | errno.EPERM),
        Instruction(LOAD, 0, 0, NUMBER_AT),
    ]


def _refuse_unless(number: int, argument: int, operand: int) -> list[Instruction]:
    """Refuse this call unless an argument has one value."""
    return [
        Instruction(JUMP_EQUAL, 0, 4, number),
        Instruction(LOAD, 0, 0, FIRST_ARGUMENT_AT + 8 * argument),
        Instruction(JUMP_EQUAL, 1, 0, operand),
        Instruction(RETURN, 0, 0, ERROR | errno.EPERM),
        Instruction(LOAD, 0, 0, NUMBER_AT),
    ]
