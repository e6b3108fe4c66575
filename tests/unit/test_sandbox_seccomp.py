"""The filter of system calls, run by a small model of the kernel's machine."""

import errno
import struct

import pytest

from relax_agent.tools.sandbox import seccomp

ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = list(AUDIT)


def verdict(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """Run the filter on one system call."""
    words = [number, AUDIT[machine] if arch is None else arch, 0, 0]
    for value in [*arguments, *[0] * (6 - len(arguments))]:
        words += [value & 0xFFFFFFFF, value >> 32]
    code = list(struct.iter_unpack("=HBBI", seccomp.program(machine)))
    place = accumulator = 0
    while True:
        operation, then, otherwise, value = code[place]
        place += 1
        if operation == 0x06:
            return value
        if operation == 0x20:
            accumulator = words[value // 4]
            continue
        holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: accumulator & value}
        place += then if holds[operation] else otherwise


@pytest.mark.parametrize("machine", MACHINES)
def test_every_refused_call_fails_and_every_other_one_of_the_table_is_allowed(machine: str) -> None:
    column = MACHINES.index(machine)
    refused = {numbers[column] for numbers in seccomp.REFUSED.values()} - {None}
    looked_at = {
        "x86_64": {56, 41, 53, 16, 157, 72},
        "aarch64": {220, 198, 199, 29, 167, 25},
    }[machine]
    missing = {numbers[column] for numbers in seccomp.MISSING.values()}
    for number in range(463):
        if number not in looked_at | missing:
            expected = REFUSE | errno.EPERM if number in refused else ALLOW
            assert verdict(machine, number) == expected, number


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_another_architecture_kill(machine: str) -> None:
    other = AUDIT["aarch64" if machine == "x86_64" else "x86_64"]
    for arch in (other, 0x40000003, 0x40000028, 0):
        assert verdict(machine, 1, arch=arch) == KILL


def test_the_x32_numbers_kill_on_x86_64() -> None:
    for number in (0x40000000, 0x40000000 | 101, 0xFFFFFFFF):
        assert verdict("x86_64", number) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_newer_calls_clone3_and_what_speaks_through_shared_files_do_not_exist(machine: str) -> None:
    locks_and_watches = {"x86_64": (73, 253, 294), "aarch64": (32, 26)}[machine]
    for number in (435, 463, 470, 1000, 0x3FFFFFFF, *locks_and_watches):
        assert verdict(machine, number) == REFUSE | errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_clone_starts_threads_and_processes_but_no_namespace(machine: str) -> None:
    number = {"x86_64": 56, "aarch64": 220}[machine]
    assert verdict(machine, number, 17) == ALLOW  # SIGCHLD, as fork does
    assert verdict(machine, number, 0x003D0F00) == ALLOW  # a thread
    kinds = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
    for kind in kinds:
        assert verdict(machine, number, kind | 17) == REFUSE | errno.EPERM
        assert verdict(machine, number, kind | 17 | 1 << 40) == REFUSE | errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_sockets_are_of_the_namespaces_own_families(machine: str) -> None:
    for number in {"x86_64": (41, 53), "aarch64": (198, 199)}[machine]:
        allowed = [f for f in range(60) if verdict(machine, number, f) == ALLOW]
        assert allowed == [1, 2, 10]
        assert verdict(machine, number, 40) == REFUSE | errno.EAFNOSUPPORT
        assert verdict(machine, number, 2, 1, 6) == ALLOW  # TCP by its name
        assert verdict(machine, number, 2, 1, 262) == REFUSE | errno.EPROTONOSUPPORT


@pytest.mark.parametrize("machine", MACHINES)
def test_a_sockets_buffers_stay_as_large_as_they_are(machine: str) -> None:
    """No limit counts them; the call succeeds, as the kernel never promised the size."""
    number = {"x86_64": 54, "aarch64": 208}[machine]
    for option in range(90):
        expected = REFUSE if option in (7, 8) else ALLOW  # refused with error 0: it succeeds
        assert verdict(machine, number, 3, 1, option) == expected
        assert verdict(machine, number, 3, 1 | 1 << 32, option | 1 << 32) == expected
        assert verdict(machine, number, 3, 6, option) == ALLOW  # TCP's own


@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_is_typed_into_a_terminal(machine: str) -> None:
    number = {"x86_64": 16, "aarch64": 29}[machine]
    assert verdict(machine, number, 0, 0x5401) == ALLOW
    for request in (0x5412, 0x541C, 0x5423, 0x5412 | 1 << 32):
        assert verdict(machine, number, 0, request) == REFUSE | errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_nobody_is_told_what_others_do_with_a_file(machine: str) -> None:
    number = {"x86_64": 72, "aarch64": 25}[machine]
    for command in range(1100):
        refused = command in (1024, 1025, 1026)
        assert verdict(machine, number, 3, command) == (REFUSE | errno.EPERM if refused else ALLOW)


@pytest.mark.parametrize("machine", MACHINES)
def test_no_process_can_stop_dying_with_its_parent(machine: str) -> None:
    number = {"x86_64": 157, "aarch64": 167}[machine]
    assert verdict(machine, number, 1) == REFUSE | errno.EPERM
    assert verdict(machine, number, 1 | 1 << 32) == REFUSE | errno.EPERM
    assert verdict(machine, number, 15) == ALLOW  # a thread's name


def test_a_jump_never_leaves_the_program() -> None:
    for machine in MACHINES:
        code = list(struct.iter_unpack("=HBBI", seccomp.program(machine)))
        assert len(code) < 4096
        for place, (_, then, otherwise, _) in enumerate(code):
            assert place + 1 + max(then, otherwise) < len(code) or code[place][0] == 0x06


def test_unknown_processors_are_not_supported() -> None:
    assert not seccomp.supported("riscv64")
    assert seccomp.supported("x86_64")
