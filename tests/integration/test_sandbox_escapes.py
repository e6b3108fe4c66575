"""What code in a sandbox must not reach. On Linux these fail where the level is not strong."""

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from relax_agent.tools.sandbox import ExecutionResult, Level, Sandbox, SandboxSession, probe
from relax_agent.tools.sandbox.watch import descendants

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")


@pytest.fixture(scope="module")
def sandbox():
    found = probe()
    assert found.level is Level.STRONG, f"{found.why} → {found.hint}"
    made = Sandbox(timeout_s=10, warm=0)
    yield made
    asyncio.run(made.close())


def run(sandbox: Sandbox, *codes: str) -> ExecutionResult:
    """Run codes in one session and return the last result."""

    async def main() -> ExecutionResult:
        async with sandbox.session() as session:
            for code in codes:
                result = await session.run(code)
            return result

    return asyncio.run(main())


TRY = """
def outcome(function, *args):
    try:
        return f"got {function(*args)!r}"
    except OSError as error:
        import errno
        return errno.errorcode[error.errno]
def c(name, *args):
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    ctypes.set_errno(0)
    value = getattr(libc, name)(*args)
    if value == -1:
        raise OSError(ctypes.get_errno(), name)
    return value
"""


@pytest.mark.parametrize(
    "path",
    ["/etc/shadow", "/etc/passwd", "/root", "/home", "/work", "/var", "/boot", "/opt", "/sys",
     "/dev/mem", "/dev/kmem", "/dev/vda", "/dev/sda", "/dev/kvm", "/run", "/usr/bin", "/bin/sh",
     __file__, os.getcwd(), sys.prefix + "/pyvenv.cfg"],
)  # fmt: skip
def test_the_hosts_files_are_not_there(sandbox: Sandbox, path: str) -> None:
    result = run(sandbox, f"import os; os.path.lexists({path!r})")
    assert result.value == "False"


def test_no_file_of_the_host_is_reached_by_a_link_or_a_descriptor(sandbox: Sandbox) -> None:
    code = """
import os
os.symlink("/../../../../etc/shadow", "up"); os.symlink("/proc/1/root/etc/shadow", "across")
tries = ["up", "across", "/proc/1/root/root", "/proc/self/root/../../root", "/proc/1/cwd/root"]
tries += [f"/proc/self/fd/{n}/../../etc/shadow" for n in range(120)]
[p for p in tries if os.path.exists(p)], sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0]
    for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}"))
"""
    assert run(sandbox, code).value == (
        "([], ['/dev/null', 'pipe', 'pipe', 'pipe', 'pipe', 'socket'])"
    )


def test_the_projects_own_modules_are_not_importable(sandbox: Sandbox) -> None:
    code = "import importlib.util; importlib.util.find_spec('relax_agent')"
    assert run(sandbox, code + " is None").value == "True"
    assert run(sandbox, "import numpy; numpy.array([1, 2]).sum().item()").value == "3"


def test_no_process_of_the_host_is_seen_or_signalled(sandbox: Sandbox) -> None:
    code = (
        TRY
        + f"""
import os
pids = sorted(int(n) for n in os.listdir("/proc") if n.isdigit())
killed = [n for n in range(1, 100000) if n not in (1, os.getpid()) and not outcome(os.kill, n, 9)
          .startswith("E")]
pids, killed, outcome(os.kill, {os.getpid()}, 9), outcome(os.kill, os.getppid(), 9), os.getppid()
"""
    )
    assert run(sandbox, code).value == "([1, 2], [], 'ESRCH', 'got None', 1)"


def test_killing_everything_ends_only_the_session(sandbox: Sandbox) -> None:
    for target in ("0", "-1", "1", "os.getpgid(0)"):
        result = run(sandbox, f"import os, signal; os.kill({target}, signal.SIGKILL)", "1 + 1")
        assert result.value == "2"


def test_memory_of_other_processes_cannot_be_read_or_written(sandbox: Sandbox) -> None:
    code = (
        TRY
        + f"""
import os
def poke(path):
    fd = os.open(path, os.O_RDWR)
    maps = open(path.replace("mem", "maps")).readline().split("-")[0]
    os.lseek(fd, int(maps, 16), 0)
    return os.read(fd, 4)
[outcome(c, "ptrace", 16, p, 0, 0) for p in (1, os.getppid(), {os.getpid()})], outcome(
    c, "process_vm_readv", 1, 0, 0, 0, 0, 0), outcome(poke, "/proc/{os.getpid()}/mem")
"""
    )
    assert run(sandbox, code).value == "(['EPERM', 'EPERM', 'EPERM'], 'EPERM', 'ENOENT')"


def test_the_first_process_is_filtered_and_limited_like_the_code(sandbox: Sandbox) -> None:
    """Code may write to its memory; it then gains nothing."""
    code = """
facts = dict(l.split(":", 1) for l in open("/proc/1/status").read().splitlines())
limits = {l[:25].strip(): l[26:46].strip() for l in open("/proc/1/limits").read().splitlines()}
[facts[k].strip() for k in ("Seccomp", "NoNewPrivs", "CapEff", "CapPrm")], limits["Max file size"]
"""
    assert run(sandbox, code).value == (
        f"(['2', '1', '0000000000000000', '0000000000000000'], '{64 << 20}')"
    )


def test_there_is_no_network_not_even_the_hosts_own(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        heard = threading.Event()
        server.settimeout(5)

        def listen() -> None:
            try:
                server.accept()[0].close()
                heard.set()
            except OSError:
                pass

        threading.Thread(target=listen, daemon=True).start()
        code = (
            TRY
            + f"""
import socket
def connect(family, address):
    with socket.socket(family) as s:
        s.settimeout(2); s.connect(address)
found = [outcome(connect, socket.AF_INET, a) for a in
    [("127.0.0.1", {port}), ("1.1.1.1", 53), ("169.254.169.254", 80), ("10.0.0.1", 80)]]
found.append(outcome(connect, socket.AF_INET6, ("2606:4700:4700::1111", 53)))
found, [l.split(":")[0].strip() for l in open("/proc/net/dev").read().splitlines()[2:]]
"""
        )
        assert run(sandbox, code).value == (
            "(['ECONNREFUSED', 'ENETUNREACH', 'ENETUNREACH', 'ENETUNREACH', 'ENETUNREACH'], ['lo'])"
        )
        assert not heard.is_set()


def test_unix_sockets_of_the_host_are_not_reached(sandbox: Sandbox) -> None:
    name = f"\0relax-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        code = (
            TRY
            + f"""
import socket
s = socket.socket(socket.AF_UNIX); s.settimeout(2)
outcome(s.connect, {name!r})
"""
        )
        assert run(sandbox, code).value == "'ECONNREFUSED'"


def test_socket_families_that_leave_the_namespace_do_not_exist(sandbox: Sandbox) -> None:
    families = {"netlink": 16, "packet": 17, "alg": 38, "vsock": 40, "bluetooth": 31, "can": 29}
    code = (
        TRY
        + f"""
import socket
[outcome(socket.socket, f, t) for f in {list(families.values())} for t in (1, 2, 3)]
"""
    )
    assert set(eval_list(run(sandbox, code).value)) == {"EAFNOSUPPORT"}


def eval_list(text: str | None) -> list[str]:
    import ast

    assert text is not None
    return list(ast.literal_eval(text))


REFUSED_CALLS = {
    "unshare": "0x10000000",
    "setns": "0, 0",
    "mount": "b'none', b'/box', b'tmpfs', 0, 0",
    "umount2": "b'/box', 2",
    "chroot": "b'/box'",
    "personality": "0x0004000",
    "reboot": "0xfee1dead, 672274793, 0x89abcdef, 0",
    "swapon": "b'/box/x', 0",
    "sethostname": "b'x', 1",
    "shmget": "0, 4096, 0o1600",
    "memfd_create": "b'x', 0",
    "name_to_handle_at": "-100, b'/', 0, 0, 0",
    "fanotify_init": "0, 0",
    "acct": "b'/box/x'",
}


def test_calls_that_escapes_are_made_of_are_refused(sandbox: Sandbox) -> None:
    tries = ", ".join(f"outcome(c, {n!r}, {a})" for n, a in REFUSED_CALLS.items())
    assert set(eval_list(run(sandbox, TRY + f"[{tries}]").value)) == {"EPERM"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are x86_64's")
def test_calls_without_a_name_in_the_library_are_refused_too(sandbox: Sandbox) -> None:
    numbers = {
        "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425,
        "add_key": 248, "request_key": 249, "keyctl": 250, "kexec_load": 246, "init_module": 175,
        "finit_module": 313, "open_tree": 428, "fsopen": 430, "move_mount": 429,
        "mount_setattr": 442, "pidfd_getfd": 438, "kcmp": 312, "process_vm_writev": 311,
        "ptrace": 101, "iopl": 172, "ioperm": 173, "modify_ldt": 154, "seccomp": 317,
        "clone for a user": 56, "pivot_root": 155, "open_by_handle_at": 304,
    }  # fmt: skip
    code = TRY + f"[outcome(c, 'syscall', n, 0x10000000) for n in {list(numbers.values())}]"
    found = dict(zip(numbers, eval_list(run(sandbox, code).value), strict=True))
    assert {name: said for name, said in found.items() if said != "EPERM"} == {}
    others = {"clone3": 435, "a call of the future": 470, "x32": 0x40000000 | 39}
    code = TRY + f"[outcome(c, 'syscall', n, 0, 0) for n in {list(others.values())}]"
    result = run(sandbox, code.replace(str(others["x32"]), "435"))
    assert set(eval_list(result.value)) == {"ENOSYS"}
    assert run(sandbox, TRY + f"c('syscall', {others['x32']})").error is not None


def test_setuid_programs_gain_nothing(sandbox: Sandbox) -> None:
    """There is none inside; one brought along is owned by nobody who could give rights."""
    code = (
        TRY
        + """
import os
open("su", "wb").write(b"\\x7fELF"); os.chmod("su", 0o4755)
flags = {l.split()[1]: l.split()[3] for l in open("/proc/mounts")}
outcome(os.setuid, 0), outcome(os.chown, "su", 0, 0), os.getuid(), [
    m for m, f in flags.items() if "nosuid" not in f.split(",")]
"""
    )
    assert run(sandbox, code).value == "('EINVAL', 'EINVAL', 1000, [])"


def test_nothing_outside_home_and_temp_can_be_written(sandbox: Sandbox) -> None:
    code = (
        TRY
        + """
import os
folders = ["/", "/usr", "/etc", "/python", "/python/lib", "/packages", "/packages/0", "/dev",
    "/proc", "/proc/sys/kernel", "/proc/1"]
def write(folder):
    with open(folder + "/new", "w") as f: f.write("x")
def touch(path):
    with open(path, "r+") as f: f.write("x")
files = ["/worker.py", "/etc/ld.so.cache", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger",
    "/proc/self/oom_score_adj", "/proc/self/uid_map"]
[p for p in folders if outcome(write, p).startswith("got")], [
    p for p in files[:4] + files[5:] if outcome(touch, p).startswith("got")], (
    outcome(write, "/tmp"), outcome(write, "/box/home"), outcome(write, "/dev/shm"))
"""
    )
    assert run(sandbox, code).value == "([], [], ('got None', 'got None', 'got None'))"


def test_the_environment_holds_no_secret(sandbox: Sandbox, monkeypatch) -> None:
    secret = secrets.token_hex(16)
    monkeypatch.setenv("API_TOKEN", secret)
    code = """
import os
text = ""
for folder, _, names in os.walk("/proc"):
    for name in names:
        if name in ("environ", "cmdline", "maps", "mountinfo", "cgroup", "comm"):
            try: text += open(f"{folder}/{name}").read()
            except OSError: pass
    if folder.count("/") > 3: break
print(sorted(os.environ)); print(text)
"""
    result = run(sandbox, code)
    assert secret not in result.stdout
    assert "API_TOKEN" not in result.stdout
    assert "RELAX_AGENT" not in result.stdout.splitlines()[0]


def test_two_sessions_do_not_see_each_other(sandbox: Sandbox) -> None:
    word = secrets.token_hex(16)

    async def main() -> list[str | None]:
        async with sandbox.session() as one, sandbox.session() as two:
            await one.run(f"open('/tmp/{word}', 'w').write('x'); open('/dev/shm/{word}', 'w')")
            listen = f"s = socket.socket(socket.AF_UNIX); s.bind('\\x00{word}'); s.listen()"
            await one.run(f"import socket; {listen}")
            code = f"import os; [os.path.exists(p + '{word}') for p in ('/tmp/', '/dev/shm/')]"
            found = await two.run(code)
            pids = await two.run("[n for n in os.listdir('/proc') if n.isdigit()]")
            connect = f"outcome(socket.socket(socket.AF_UNIX).connect, '\\x00{word}')"
            reach = await two.run(f"{TRY}import socket; {connect}")
            users = {host_user(session) for session in (one, two)}
            assert os.geteuid() != 0 or (len(users) == 2 and 0 not in users)
            return [found.value, pids.value, reach.value]

    assert asyncio.run(main()) == ["[False, False]", "['1', '2']", "'ECONNREFUSED'"]


def test_files_that_all_sessions_see_carry_no_word_between_them(sandbox: Sandbox) -> None:
    """A lock on a shared library, or a watch of who opens it, would reach the other session."""
    code = f"""{TRY}
import fcntl, os
shared = [open(name, 'rb') for name in (os.__file__, '/dev/null')]
found = [outcome(fcntl.flock, each, fcntl.LOCK_EX | fcntl.LOCK_NB) for each in shared]
found += [outcome(c, name, 0) for name in ('inotify_init', 'inotify_init1')]
folder = os.open(os.path.dirname(os.__file__), os.O_RDONLY)
found += [outcome(fcntl.fcntl, folder, fcntl.F_NOTIFY, fcntl.DN_ACCESS)]
found + [outcome(fcntl.fcntl, shared[0], fcntl.F_SETLEASE, fcntl.F_RDLCK)]
"""
    assert eval_list(run(sandbox, code).value) == ["ENOSYS"] * 4 + ["EPERM"] * 2


def test_locks_that_libraries_need_still_work(sandbox: Sandbox) -> None:
    code = """
import sqlite3
for mode in ('wal', 'delete'):
    base = sqlite3.connect(mode)
    base.execute(f'pragma journal_mode={mode}')
    base.execute('create table t (x)')
    with base:
        base.execute('insert into t values (7)')
    other = sqlite3.connect(mode)
    assert other.execute('select x from t').fetchall() == [(7,)]
from filelock import FileLock
with FileLock('lock', timeout=1):
    print('locked')
"""
    assert run(sandbox, code).stdout == "locked\n"


def host_user(session: SandboxSession) -> int:
    assert session._interpreter is not None
    return Path(f"/proc/{session._interpreter.child.pid}").stat().st_uid


def test_a_fork_bomb_is_bounded_and_leaves_the_machine_alone() -> None:
    async def main() -> tuple[int, ExecutionResult, ExecutionResult]:
        async with (
            Sandbox(timeout_s=1.5, warm=0, processes=24) as sandbox,
            sandbox.session() as session,
        ):
            await session.run("import os")
            bomb = "while True:\n  try: os.fork()\n  except OSError: pass"
            job = asyncio.create_task(session.run(bomb))
            await asyncio.sleep(0.7)
            assert session._interpreter is not None
            count = len(descendants(session._interpreter.child.pid))
            started = await asyncio.to_thread(
                subprocess.run, [sys.executable, "-S", "-c", "print(7)"], capture_output=True
            )
            assert started.stdout == b"7\n"
            return count, await job, await session.run("1 + 1")

    count, result, after = asyncio.run(main())
    assert 2 <= count <= 28
    assert result.error is not None
    assert result.error.kind == "timeout"
    assert after.value == "2"


def test_nothing_is_left_when_a_session_is_closed(sandbox: Sandbox) -> None:
    code = """
import os, signal, sys
for n in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        for s in range(1, 32):
            try: signal.signal(s, signal.SIG_IGN)
            except OSError: pass
        os.closerange(0, 200)
        while True: pass
"""

    async def main() -> list[int]:
        session = sandbox.session()
        await session.run("1")
        assert session._interpreter is not None
        top = session._interpreter.child.pid
        job = asyncio.create_task(session.run(code + "\nwhile True: pass"))
        while len(pids := descendants(top)) < 7:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)
        await session.close()
        assert not (await job).ok
        return [top, *pids]

    pids = asyncio.run(main())
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists() and not is_zombie(pid)] == []


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True


def test_what_a_call_leaves_running_stops_with_it(sandbox: Sandbox) -> None:
    code = """
import os, threading
def spin():
    global count
    while True: count += 1
count = 0
threading.Thread(target=spin, daemon=True).start()
if os.fork() == 0:
    os.setsid()
    while True: pass
"""

    async def main() -> tuple[int, int, str]:
        async with sandbox.session() as session:
            await session.run(code)
            assert session._interpreter is not None
            top = session._interpreter.child.pid
            left = [pid for pid in descendants(top) if not is_zombie(pid)]
            ticks = [cpu_ticks(pid) for pid in left]
            await asyncio.sleep(0.2)
            used = sum(cpu_ticks(pid) for pid in left) - sum(ticks)
            return len(left), used, (await session.run("count > 0")).value or ""

    assert asyncio.run(main()) == (2, 0, "True")


def cpu_ticks(pid: int) -> int:
    user, system = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[11:13]
    return int(user) + int(system)


INJECTION = """
import os
address = int(open("/proc/1/syscall").read().split()[-1], 16)
memory = os.open("/proc/1/mem", os.O_RDWR)
written = os.pwrite(memory, b"\\xeb\\xfe", address)  # jump to itself
if os.fork() == 0:
    os._exit(0 if os.fork() else 0)  # an orphan's end wakes the first process
import time; time.sleep(0.3)
written
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the machine code is x86_64's")
def test_code_inside_the_first_process_gains_nothing(sandbox: Sandbox) -> None:
    """Its memory can be written to; it is filtered, stopped and killed like the code itself."""

    async def main() -> tuple[str | None, int, bool]:
        async with sandbox.session() as session:
            result = await session.run(INJECTION)
            assert session._interpreter is not None
            first = session._interpreter._first
            before = cpu_ticks(first)
            await asyncio.sleep(0.2)
            used = cpu_ticks(first) - before
        return result.value, used, Path(f"/proc/{first}").exists() and not is_zombie(first)

    assert asyncio.run(main()) == ("2", 0, False)


def test_a_file_that_is_brought_out_comes_from_inside(sandbox: Sandbox, tmp_path: Path) -> None:
    """Links, pipes and swaps while it is read: nothing of the host is ever opened."""
    secret = tmp_path / "secret"
    secret.write_text("host")
    code = f"""
import os, threading
os.symlink({str(secret)!r}, "link"); os.symlink("/etc/shadow", "shadow"); os.mkfifo("pipe")
os.symlink("/proc/self/environ", "env"); os.symlink("real", "good"); os.mkdir("folder")
open("real", "w").write("inside")
open("big", "wb").truncate(60 << 20)
"""

    async def main() -> dict[str, str]:
        found = {}
        async with sandbox.session() as session:
            assert (await session.run(code)).ok
            for path in ("link", "shadow", "pipe", "folder", "/dev/zero", "missing", "good"):
                try:
                    found[path] = (await session.read_file(path)).decode()
                except Exception as error:
                    found[path] = str(error)
        return found

    found = asyncio.run(main())
    assert found.pop("good") == "inside"
    assert found["pipe"] == "pipe: not a regular file"
    assert found["/dev/zero"] == "/dev/zero: not a regular file"
    assert all("host" not in text and "root:" not in text for text in found.values())
    assert "No such file" in found["link"]


def test_a_forged_reply_of_a_file_is_refused(sandbox: Sandbox) -> None:
    """The interpreter may lie about its own files only, and within the size limit."""
    code = """
import os, sys, struct, json, threading
def lie():
    text = json.dumps({"id": 2, "body": {}, "blobs": [1 << 40]}).encode()
    for fd in range(3, 200):
        try: os.write(fd, struct.pack(">I", len(text)) + text)
        except OSError: pass
sys.modules["__main__"].__dict__["__builtins__"].__dict__["open"] = lambda *a, **k: lie()
"""

    async def main() -> str | None:
        async with sandbox.session() as session:
            await session.run(code)
            try:
                await session.read_file("/box/home/x")
            except Exception:
                return (await session.run("3 + 4")).value
            return None

    assert asyncio.run(main()) == "7"
