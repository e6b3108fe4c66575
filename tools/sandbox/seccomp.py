"""The filter of system calls: a small classic-BPF program that the kernel runs at every call.

It refuses what code that computes never needs and what escapes are made of: namespaces, mounts,
other processes' memory, keys, the kernel's own interpreters (bpf), io_uring, clocks, modules, and
memory that no limit counts (System V segments, memfd). Six calls are looked at more closely:
``clone`` may start threads and processes but no namespace, ``socket`` may make no family that
leaves the network namespace (vsock, netlink, …), ``ioctl`` may not type into a terminal, ``fcntl``
may not watch what others do with a file, ``prctl`` may not undo that a process dies with its
parent, and ``setsockopt`` may not enlarge a socket's buffers, memory that is counted for no
process: the call succeeds and changes nothing, as the kernel never promised a size. Calls of
another architecture kill the process; calls newer than this table do not exist.

The program is written here rather than by libseccomp because that is one more system library,
whose Python bindings are not kept up, for a list of numbers and six kinds of instruction.
"""

from __future__ import annotations

import errno
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE = 0, 4
_FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT = 16, 24, 32
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000
_NEWEST = 462
"""The last call that was looked at (Linux 6.12); both architectures count alike by then."""

_NAMESPACES = 0x7E020000
"""The flags of ``clone`` that make a namespace."""
_UNIX, _INET, _INET6 = 1, 2, 10
_MULTIPATH = 262
"""A protocol of internet sockets with buffers of its own."""
_SOCKET_LEVEL, _BUFFER_SIZES = 1, (7, 8)
"""The options of ``setsockopt`` that say how much a socket may hold."""
_PARENTS_DEATH = 1
"""The option of ``prctl`` that says which signal a parent's death sends."""
_WATCHING_FCNTLS = (1024, 1025, 1026)
"""Set and see leases, and be told of changes: news of what others do with a file."""
_TERMINAL_IOCTLS = (0x5412, 0x541C, 0x5423)
"""Type a character, the console's own, change the line discipline."""

REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # the kernel's own machinery
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "seccomp": (317, 277),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    "vmsplice": (278, 75),
    # the machine
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    # memory that no limit counts, or that is placed for others
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
}
"""System calls that fail with "operation not permitted": their numbers on x86_64 and aarch64."""

MISSING: dict[str, tuple[int | None, int | None]] = {
    "clone3": (435, 435),  # glibc then takes clone, whose flags can be looked at
    # All sandboxes see the same libraries: a lock on one of them, or a look at who opens it, would
    # be a word passed from one session to another.
    "flock": (73, 32),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
}
"""System calls that do not exist: libraries take another way (a file as a lock, polling)."""

_CLONE = (56, 220)
_SOCKET, _SOCKETPAIR, _IOCTL, _PRCTL = (41, 198), (53, 199), (16, 29), (157, 167)
_SETSOCKOPT, _FCNTL = (54, 208), (72, 25)


def supported(machine: str) -> bool:
    """Whether there is a filter for this processor (``platform.machine()``)."""
    return machine in _ARCHITECTURES


def program(machine: str) -> bytes:
    """Return the filter as ``bwrap --seccomp`` wants it: 8 bytes an instruction."""
    column, audit_name = _ARCHITECTURES[machine]
    code = [
        _op(_LOAD, _ARCHITECTURE),
        _op(_EQUAL, audit_name, skip_if=1),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        code += _unless(_AT_LEAST, _X32, _KILL)
    code += _unless(_AT_LEAST, _NEWEST + 1, _ERRNO | errno.ENOSYS)
    for calls, reason in ((MISSING, errno.ENOSYS), (REFUSED, errno.EPERM)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                code += _unless(_EQUAL, number, _ERRNO | reason)
    code += _looked_at(_CLONE[column], _FIRST_ARGUMENT, _no_namespaces())
    for call in (_SOCKET, _SOCKETPAIR):
        code += _looked_at(call[column], _FIRST_ARGUMENT, _known_families())
    code += _looked_at(_SETSOCKOPT[column], _SECOND_ARGUMENT, _no_larger_buffers())
    code += _looked_at(_FCNTL[column], _SECOND_ARGUMENT, _none_of(*_WATCHING_FCNTLS))
    code += _looked_at(_IOCTL[column], _SECOND_ARGUMENT, _none_of(*_TERMINAL_IOCTLS))
    code += _looked_at(_PRCTL[column], _FIRST_ARGUMENT, _none_of(_PARENTS_DEATH))
    code.append(_op(_RETURN, _ALLOW))
    return b"".join(code)


def _op(code: int, value: int, *, skip_if: int = 0, skip_else: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if, skip_else, value)


def _unless(test: int, value: int, verdict: int) -> list[bytes]:
    """Return ``verdict`` if the test holds; go on if it does not."""
    return [_op(test, value, skip_else=1), _op(_RETURN, verdict)]


def _looked_at(number: int, argument: int, checks: list[bytes]) -> list[bytes]:
    """Run ``checks`` (which end in a verdict) on the low half of one call's argument."""
    body = [_op(_LOAD, argument), *checks]
    return [_op(_EQUAL, number, skip_else=len(body)), *body]


def _no_namespaces() -> list[bytes]:
    return [*_unless(_ANY_BIT, _NAMESPACES, _ERRNO | errno.EPERM), _op(_RETURN, _ALLOW)]


def _no_larger_buffers() -> list[bytes]:
    """Let a change of a buffer's size come to nothing; the level is loaded already."""
    checks = [_op(_LOAD, _THIRD_ARGUMENT)]
    for option in _BUFFER_SIZES:
        checks += _unless(_EQUAL, option, _ERRNO)
    return [_op(_EQUAL, _SOCKET_LEVEL, skip_else=len(checks)), *checks, _op(_RETURN, _ALLOW)]


def _known_families() -> list[bytes]:
    allowed = [_op(_LOAD, _THIRD_ARGUMENT)]
    allowed += _unless(_EQUAL, _MULTIPATH, _ERRNO | errno.EPROTONOSUPPORT)
    allowed.append(_op(_LOAD, _FIRST_ARGUMENT))
    for family in (_UNIX, _INET, _INET6):
        allowed += _unless(_EQUAL, family, _ALLOW)
    return [*allowed, _op(_RETURN, _ERRNO | errno.EAFNOSUPPORT)]


def _none_of(*values: int) -> list[bytes]:
    refused: list[bytes] = []
    for value in values:
        refused += _unless(_EQUAL, value, _ERRNO | errno.EPERM)
    return [*refused, _op(_RETURN, _ALLOW)]
