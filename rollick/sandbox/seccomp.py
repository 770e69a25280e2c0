"""The seccomp filter of a box: the system calls that a program may not make.

A classic BPF program as bubblewrap's --seccomp takes it, built here without a library. System calls
are allowed unless listed; calls newer than the list return ENOSYS; calls of another architecture
kill the process.

    load arch -> other: kill     load number -> too new: ENOSYS -> denied: its error -> allow

Some calls return success without an effect, because programs need them to succeed and they reach
beyond a box. File locks: boxes share the system files and the null device. Sessions and process
groups: the scheduler divides the CPU by session, and a box is killed by its group.
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
RETURN_SUCCESS = ERROR | 0
"""Returns 0 without making the call."""
NUMBER_OFFSET, ARCH_OFFSET, FIRST_ARGUMENT_OFFSET = 0, 4, 16
"""Offsets in the kernel's struct seccomp_data (little-endian: an argument's low half is first)."""

NEW_NAMESPACES = 0x7E020000
"""clone's flags CLONE_NEW*: mount, cgroup, uts, ipc, user, pid, net."""
AF_UNIX = 1
NOT_STREAM = 0b1110
"""Bits of a socket type that SOCK_STREAM lacks. The queue of another type outlives its sender."""
SOCKET_MEMORY = (7, 8, 32, 33, 26, 50, 51, 52)
"""setsockopt's SO_SNDBUF, SO_RCVBUF and their FORCE variants, and the options that attach a packet
filter."""
TERMINAL_INJECTION = (0x5412, 0x541C)
"""ioctl's TIOCSTI and TIOCLINUX."""
PROCESS_CONTROLS = (1, 22)
"""prctl's PR_SET_PDEATHSIG, because the box must end with the process that started it, and
PR_SET_SECCOMP, which does what the call seccomp does."""
LOCKS = (6, 7, 37, 38)
"""fcntl's F_SETLK, F_SETLKW and their variants for open files."""
FILE_CHANNELS = (5, 36, 1024, 1026, 1036)
"""fcntl's F_GETLK, F_OFD_GETLK, F_SETLEASE, F_NOTIFY and F_SET_RW_HINT."""
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x01, 0x20, 0x40000
NEWEST_CALL = 466
"""Later system calls (same numbers on all architectures) have not been reviewed."""

AUDIT_ARCHS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Numbers from the kernel's tables, (x86_64, aarch64); None if the architecture lacks the call.
DENIED: Mapping[str, tuple[int | None, int | None]] = {
    # namespaces and mounts
    **{"unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39)},
    **{"pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428)},
    **{"move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431)},
    **{"fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442)},
    **{"statmount": (457, 457), "listmount": (458, 458), "name_to_handle_at": (303, 264)},
    **{"open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "fanotify_mark": (301, 263)},
    **{"inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27)},
    **{"quotactl": (179, 60), "quotactl_fd": (443, 443), "mknod": (133, None)},
    **{"mknodat": (259, 33)},
    # other processes
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272)},
    **{"pidfd_getfd": (438, 438)},
    # large, recent or rarely used parts of the kernel
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    **{"io_setup": (206, 0), "bpf": (321, 280), "perf_event_open": (298, 241)},
    **{"userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218)},
    **{"keyctl": (250, 219), "seccomp": (317, 277), "vmsplice": (278, 75)},
    **{"modify_ldt": (154, None), "uselib": (134, None), "mbind": (237, 235)},
    **{"set_mempolicy": (238, 237), "migrate_pages": (256, 238), "move_pages": (279, 239)},
    **{"landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445)},
    **{"landlock_restrict_self": (446, 446)},
    # memory that no rlimit counts
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194)},
    **{"shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180)},
    # pages that a pipe or a socket holds after their file is deleted; extended attributes
    **{"splice": (275, 76), "tee": (276, 77), "sendfile": (40, 71)},
    **{"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)},
    **{"setxattrat": (463, 463)},
    # the machine
    **{"kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105)},
    **{"finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142)},
    **{"swapon": (167, 224), "swapoff": (168, 225), "syslog": (103, 116), "acct": (163, 89)},
    **{"vhangup": (153, 58), "iopl": (172, None), "ioperm": (173, None)},
    **{"settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266)},
    **{"adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162)},
    **{"personality": (135, 92)},
}
CLONE, SOCKET, SOCKETPAIR, IOCTL = (56, 220), (41, 198), (53, 199), (16, 29)
SETSOCKOPT, PRCTL, FCNTL, MMAP = (54, 208), (157, 167), (72, 25), (9, 222)
WITHOUT_EFFECT = {"flock": (73, 32), "setsid": (112, 157), "setpgid": (109, 154)}
CLONE3 = 435
"""A filter cannot read its flags, which are behind a pointer. After ENOSYS the C library uses
clone."""


class Instruction(NamedTuple):
    """One classic BPF instruction: opcode, jump offsets if true and if false, operand."""

    code: int
    if_true: int
    if_false: int
    operand: int


class Condition(NamedTuple):
    """On an argument of a call: the test of it must give `passes`."""

    argument: int
    test: int
    operand: int
    passes: bool = True


@cache
def seccomp_program(machine: str = "", *, shared_memory: bool = False) -> bytes:
    """The filter for this architecture, or for `machine`; SandboxError if there is none.

    `shared_memory`: allow shared anonymous mappings, whose pages only a memory cgroup counts.
    """
    machine = machine or platform.machine()
    if machine not in AUDIT_ARCHS:
        fix = f"use one of {', '.join(AUDIT_ARCHS)}, or a remote sandbox"
        raise SandboxError(f"there is no seccomp filter for {machine}", fix=fix)
    column = list(AUDIT_ARCHS).index(machine)
    instructions = [
        Instruction(LOAD, 0, 0, ARCH_OFFSET),
        Instruction(JUMP_EQUAL, 1, 0, AUDIT_ARCHS[machine]),
        Instruction(RETURN, 0, 0, KILL),
        Instruction(LOAD, 0, 0, NUMBER_OFFSET),
        # This includes the x32 calls of x86_64.
        Instruction(JUMP_GREATER, 0, 1, NEWEST_CALL),
        Instruction(RETURN, 0, 0, ERROR | errno.ENOSYS),
        *_return_for_call(CLONE3, ERROR | errno.ENOSYS),
    ]
    for numbers in DENIED.values():
        instructions += _return_for_call(numbers[column], ERROR | errno.EPERM)
    for numbers in WITHOUT_EFFECT.values():
        instructions += _return_for_call(numbers[column], RETURN_SUCCESS)
    for numbers, conditions in _denied_arguments(shared_memory):
        instructions += _return_for_call(numbers[column], ERROR | errno.EPERM, *conditions)
    for command in LOCKS:
        instructions += _return_for_call(
            FCNTL[column], RETURN_SUCCESS, Condition(1, JUMP_EQUAL, command)
        )
    instructions.append(Instruction(RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions)


def _denied_arguments(shared_memory: bool) -> list[tuple[tuple[int, int], list[Condition]]]:
    """Calls that are denied if all conditions hold."""
    denied = [
        (CLONE, [Condition(0, JUMP_ANY_BIT, NEW_NAMESPACES)]),
        (MMAP, [Condition(3, JUMP_ANY_BIT, MAP_HUGETLB)]),
    ]
    for call in (SOCKET, SOCKETPAIR):
        denied.append((call, [Condition(0, JUMP_EQUAL, AF_UNIX, passes=False)]))
        denied.append((call, [Condition(1, JUMP_ANY_BIT, NOT_STREAM)]))
    for call, argument, values in (
        (PRCTL, 0, PROCESS_CONTROLS),
        (SETSOCKOPT, 2, SOCKET_MEMORY),
        (FCNTL, 1, FILE_CHANNELS),
        (IOCTL, 1, TERMINAL_INJECTION),
    ):
        denied += [(call, [Condition(argument, JUMP_EQUAL, value)]) for value in values]
    if not shared_memory:
        bits = (MAP_SHARED, MAP_ANONYMOUS)
        denied.append((MMAP, [Condition(3, JUMP_ANY_BIT, bit) for bit in bits]))
    return denied


def _return_for_call(number: int | None, action: int, *conditions: Condition) -> list[Instruction]:
    """Return `action` for this call if all conditions hold; nothing if the architecture lacks the
    call. Expects the call number to be loaded, and leaves it loaded."""
    if number is None:
        return []
    checks: list[Instruction] = []
    for index, (argument, test, operand, passes) in enumerate(conditions):
        # Skip the later checks and the return.
        skip = 2 * (len(conditions) - 1 - index) + 1
        jumps = (0, skip) if passes else (skip, 0)
        checks.append(Instruction(LOAD, 0, 0, FIRST_ARGUMENT_OFFSET + 8 * argument))
        checks.append(Instruction(test, *jumps, operand))
    body = [*checks, Instruction(RETURN, 0, 0, action)]
    if conditions:
        body.append(Instruction(LOAD, 0, 0, NUMBER_OFFSET))
    return [Instruction(JUMP_EQUAL, 0, len(body), number), *body]
