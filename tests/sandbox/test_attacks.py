"""What hostile programs try. Each attack succeeds without a sandbox (the control `off`) and fails inside.

An attack prints `yes` if it succeeded. The outcomes are listed in `docs/sandbox.md`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from rl_sandbox.interface import Outcome
from rl_sandbox.local import Level

from .conftest import LIMITS, wait_until

MIB = 1 << 20
DOCUMENTED = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text()

READS_A_FILE = """
import sys
try:
    print("yes" if "treasure" in open(input()).read() else "no")
except OSError as error:
    print("no", type(error).__name__)
"""

READS_THE_ENVIRONMENT = """
import glob
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        if b"hunter2" in open(path, "rb").read():
            print("yes")
    except OSError:
        pass
"""

CONNECTS = """
import json, socket
kind, address = json.loads(input())
address = tuple(address) if isinstance(address, list) else address
try:
    client = socket.socket(getattr(socket, kind), socket.SOCK_STREAM)
    client.settimeout(5)
    client.connect(address)
    print("yes")
except OSError as error:
    print("no", error)
"""

# Connecting a datagram socket sends nothing: it only looks for a route.
FINDS_A_ROUTE = """
import socket
interfaces = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]
print("yes" if interfaces != ["lo"] else "no")
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try:
    client.connect(("192.0.2.1", 9))
    print("yes")
except OSError as error:
    print("no", error)
"""

OPENS_VSOCK = """
import socket
try:
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    print("yes")
except OSError as error:
    print("no", error)
"""

KILLS = """
import os, signal
victim = int(input())
inside = os.environ.get("USER") == "sandbox"
for pid in {victim, *(int(name) for name in os.listdir("/proc") if inside and name.isdigit())}:
    try:
        if pid != os.getpid():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
"""

ESCAPES = """
import os
target = input()
os.symlink(target, "link")
name = target.lstrip("/")
ways = [f"/proc/{pid}/{way}/{name}" for pid in (1, "self", os.getppid()) for way in ("root", "cwd/../../../../../..")]
for way in [*ways, "link", "../" * 20 + name]:
    try:
        print("yes" if "treasure" in open(way).read() else "no")
    except OSError as error:
        print("no", type(error).__name__)
"""

WRITES_KERNEL_SETTINGS = """
import os
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/overcommit_memory"):
    try:
        os.close(os.open(path, os.O_WRONLY))
        print("yes", path)
    except OSError as error:
        print("no", type(error).__name__)
"""

READS_ITS_PARENT = """
import ctypes, os
parent = os.getppid()
for path in (f"/proc/{parent}/mem", f"/proc/{parent}/environ", f"/proc/{parent}/fd"):
    try:
        os.listdir(path) if path.endswith("fd") else open(path, "rb").close()
        print("yes", path)
    except OSError as error:
        print("no", type(error).__name__)
"""

CALLS_THE_KERNEL = """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": (29, 319, 272), "aarch64": (194, 279, 97)}[platform.machine()]
print("yes, shmget" if (segment := libc.syscall(numbers[0], 0, 4096, 0o600)) >= 0 else "no")
if segment >= 0:
    libc.shmctl(segment, 0, None)
print("yes, memfd_create" if libc.syscall(numbers[1], b"x", 0) >= 0 else "no")
print("yes, unshare(CLONE_NEWUSER)" if libc.syscall(numbers[2], 0x10000000) == 0 else "no")
"""

ALLOCATES = f"""
try:
    data = bytearray({2 * LIMITS["memory_mb"]} << 20)
    print("yes")
except MemoryError:
    print("no")
"""

# 5 * 80 MiB are above the 352 MiB of the session: memory, files, /dev/shm and 64 MiB for its control. The second answer
# shows that a process still runs when all have their memory.
ALLOCATES_IN_MANY_PROCESSES = """
import os, signal, socket
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
children = []
for _ in range(5):
    outer, inner = socket.socketpair()
    if os.fork() == 0:
        outer.close()
        data = bytearray(b"x") * (80 << 20)
        inner.send(b"1")
        inner.recv(1)
        inner.send(b"2")
        inner.recv(1)
        os._exit(0)
    inner.close()
    children.append(outer)
def answers():
    for child in children:
        try:
            yield len(child.recv(1))
        except OSError:
            yield 0
allocated = sum(answers())
for child in children:
    try:
        child.send(b"g")
    except OSError:
        pass
print("yes" if allocated == sum(answers()) == 5 else "no")
"""

FILLS_EVERY_FOLDER = """
import os
limit = int(input())
total = 0
for folder, names, _ in os.walk("/" if os.environ.get("USER") == "sandbox" else "."):
    if folder.startswith("/proc"):
        names.clear()
        continue
    try:
        for number in range(8):
            with open(os.path.join(folder, f"bomb{number}"), "wb", buffering=0) as file:
                for _ in range(8):
                    total += file.write(bytes(1 << 20))
    except OSError:
        pass
print("yes" if total > limit else "no", total >> 20)
"""

FORKS = """
import os, time
started = 0
try:
    for _ in range(60):
        if os.fork() == 0:
            time.sleep(1)
            os._exit(0)
        started += 1
except OSError:
    pass
print("yes" if started == 60 else "no", started)
"""

LEAVES_A_DAEMON = """
import subprocess
null = subprocess.DEVNULL
print(subprocess.Popen(["/bin/sleep", input()], start_new_session=True, stdin=null, stdout=null, stderr=null).pid)
"""

IGNORES_SIGNALS = """
import signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    pass
"""


def succeeded(text):
    return "yes" in text


@pytest.fixture
def treasure(tmp_path):
    file = tmp_path / "secret.txt"
    file.write_text("treasure")
    file.chmod(0o644)
    return str(file)


def test_files_of_the_host_cannot_be_read(session, off, treasure):
    assert succeeded(off(READS_A_FILE, treasure).stdout)
    assert session.run_program(READS_A_FILE, stdin=treasure).stdout == "no FileNotFoundError\n"
    for path in ("/etc/passwd", "/etc/shadow", str(Path.home() / ".bashrc"), "/var/log", str(Path(__file__))):
        assert not Path(path).exists() or session.run_program(f"open({path!r})").outcome is Outcome.ERROR


def test_environment_variables_of_the_host_cannot_be_read(session, off, victim):
    assert victim.poll() is None
    assert succeeded(off(READS_THE_ENVIRONMENT).stdout)
    assert session.run_program(READS_THE_ENVIRONMENT).stdout == ""
    names = set(json.loads(session.run_program("import json, os; print(json.dumps(list(os.environ)))").stdout))
    assert names <= {"HOME", "LANG", "LOGNAME", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "PWD",
                     "PYTHONHASHSEED", "TMPDIR", "USER"}  # fmt: skip


def test_servers_of_the_host_cannot_be_reached(session, off):
    name = f"\0rl_sandbox_test_{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(name)
        local.listen()
        for kind, address in (("AF_INET", list(server.getsockname())), ("AF_UNIX", name)):
            stdin = json.dumps([kind, address]) + "\n"
            assert succeeded(off(CONNECTS, stdin).stdout), kind
            assert not succeeded(session.run_program(CONNECTS, stdin=stdin).stdout), kind


def test_there_is_no_route_to_the_outside_and_no_channel_to_a_hypervisor(session, off):
    assert session.run_program(FINDS_A_ROUTE).stdout == "no\nno [Errno 101] Network is unreachable\n"
    assert session.run_program(OPENS_VSOCK).stdout == "no [Errno 97] Address family not supported by protocol\n"
    assert succeeded(off(FINDS_A_ROUTE).stdout)
    if Path("/dev/vsock").exists():
        assert succeeded(off(OPENS_VSOCK).stdout)


def test_processes_of_the_host_cannot_be_killed(sandbox, off, victim):
    other = sandbox.open_session()
    with sandbox.open_session() as session:
        assert session.run_program(KILLS, stdin=f"{victim.pid}\n").outcome is Outcome.LOST  # it killed its own agent
        assert session.run("1").outcome is Outcome.LOST
    assert victim.poll() is None
    assert other.run_program("print('alive')").stdout == "alive\n"
    other.close()
    off(KILLS, f"{victim.pid}\n")
    victim.wait(timeout=120)


def test_stopping_the_agent_ends_the_session_only(sandbox, off, victim):
    stop = "import os, signal; os.kill({}, signal.SIGSTOP)"
    with sandbox.open_session() as session, sandbox.open_session() as other:
        session._grace_s = 0.3
        for seconds in (0.2, 2.0, 20.0):  # on a busy machine, a program may not have started within the first limit
            assert session.run_program(stop.format("os.getppid()"), timeout_s=seconds).outcome is Outcome.TIMEOUT
            if (after := session.run("1").outcome) is Outcome.LOST:
                break
        assert after is Outcome.LOST
        assert other.run_program("print('alive')").stdout == "alive\n"
        assert "ProcessLookupError" in other.run_program(stop.format(victim.pid)).stderr
    off(stop.format(victim.pid))
    wait_until(lambda: Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


def test_links_and_proc_do_not_lead_out(session, off, treasure):
    assert succeeded(off(ESCAPES, treasure).stdout)
    assert not succeeded(session.run_program(ESCAPES, stdin=treasure).stdout)


def test_settings_of_the_kernel_cannot_be_written(session, off):
    assert not succeeded(session.run_program(WRITES_KERNEL_SETTINGS).stdout)
    if os.getuid() == 0:
        assert succeeded(off(WRITES_KERNEL_SETTINGS).stdout)


def test_memory_files_and_environment_of_the_agent_cannot_be_read(session, off):
    result = session.run_program(READS_ITS_PARENT)
    assert not succeeded(result.stdout), result.stdout
    assert result.stdout.count("no") == 3
    assert succeeded(off(READS_ITS_PARENT).stdout)


def test_uncounted_memory_and_new_namespaces_are_denied(session, off):
    assert session.run_program(CALLS_THE_KERNEL).stdout == "no\nno\nno\n"
    assert succeeded(off(CALLS_THE_KERNEL).stdout)


def test_memory_of_a_process_is_limited(session, off):
    assert session.run_program(ALLOCATES).stdout == "no\n"
    assert off(ALLOCATES).stdout == "yes\n"
    assert session.run("1").outcome is Outcome.OK


def test_memory_of_all_processes_of_a_session_is_limited_by_its_cgroup(sandbox, off):
    if sandbox.level is not Level.ISOLATED_UID or not sandbox.controllers:
        pytest.skip("there is no cgroup at this level: memory is limited per process, as documented")
    with sandbox.open_session() as session:
        assert not succeeded(session.run_program(ALLOCATES_IN_MANY_PROCESSES).stdout)
    assert succeeded(off(ALLOCATES_IN_MANY_PROCESSES).stdout)


def test_disk_space_is_limited_in_every_writable_folder(session, off):
    limit = 2 * LIMITS["disk_mb"] * MIB  # the home folder and /dev/shm
    # Walking the folders takes a second, and tens of seconds if none of them is in the file cache.
    result = session.run_program(FILLS_EVERY_FOLDER, stdin=f"{limit}\n", timeout_s=120)
    assert re.fullmatch(r"no \d+\n", result.stdout), result
    assert succeeded(off(FILLS_EVERY_FOLDER, f"{limit}\n").stdout)
    assert session.run_program("print(1)").stdout == "1\n"


def test_the_number_of_processes_is_limited(session, off):
    result = session.run_program(FORKS)
    assert result.stdout.startswith("no")
    assert int(result.stdout.split()[1]) <= LIMITS["max_processes"]
    assert off(FORKS).stdout == "yes 60\n"


def test_a_fork_bomb_ends_with_its_call_and_does_not_starve_other_sessions(sandbox):
    """Its control is the test above: without a limit a real one would take the machine down."""
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    with sandbox.open_session() as session, sandbox.open_session() as other:
        results = []
        thread = threading.Thread(target=lambda: results.append(session.run_program(bomb, timeout_s=1.5)))
        thread.start()
        started = 0
        while thread.is_alive():
            code = "import subprocess; print(subprocess.run(['/bin/echo', 'alive'], capture_output=True, text=True).stdout)"
            assert other.run_program(code).stdout == "alive\n\n"
            started += 1
        thread.join()
        assert started > 0
        assert results[0].outcome is Outcome.TIMEOUT
        assert session.run_program("import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]))").stdout == "3\n"


def test_an_endless_loop_that_ignores_signals_is_ended(session, off):
    assert session.run_program(IGNORES_SIGNALS, timeout_s=0.3).outcome is Outcome.TIMEOUT
    assert session.run(IGNORES_SIGNALS, timeout_s=0.3).outcome is Outcome.TIMEOUT
    assert session.run("'usable'").stdout == "'usable'\n"
    with pytest.raises(subprocess.TimeoutExpired):
        off(IGNORES_SIGNALS, timeout=0.3)


def test_daemons_end_with_their_program(session, off):
    def runs(seconds):
        return f"/bin/sleep\0{seconds}\0".encode() in command_lines()

    inside, outside = f"600.1{os.getpid()}", f"600.2{os.getpid()}"
    assert session.run_program(LEAVES_A_DAEMON, stdin=inside).outcome is Outcome.OK
    assert not runs(inside)
    daemon = int(off(LEAVES_A_DAEMON, outside).stdout)
    wait_until(lambda: runs(outside))  # the kernel shows the arguments of a process a moment after it began
    os.kill(daemon, signal.SIGKILL)


def command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


def test_huge_output_is_cut(session, off):
    printing = "import sys\nfor _ in range(40): sys.stdout.write('x' * (1 << 17)); sys.stderr.write('y' * (1 << 17))"
    result = session.run_program(printing)
    assert (len(result.stdout), len(result.stderr), result.truncated) == (65536, 65536, True)
    assert result.outcome is Outcome.OK
    endless = session.run_program("while True: print('x' * 100_000)", timeout_s=3.0)  # long enough to start on a busy machine
    assert (endless.outcome, len(endless.stdout)) == (Outcome.TIMEOUT, 65536)
    assert len(off(printing).stdout) == 40 << 17


def test_programs_get_no_privileges_from_setuid_files(session, off):
    status = "print([line.split()[1] for line in open('/proc/self/status') if line.startswith(('NoNewPrivs', 'CapEff'))])"
    assert session.run_program(status).stdout == "['0000000000000000', '1']\n"
    assert off(status).stdout != "['0000000000000000', '1']\n"


def test_every_attack_is_documented():
    tests = [name for name in globals() if name.startswith("test_") and name != "test_every_attack_is_documented"]
    assert [name for name in tests if f"`{name}`" not in DOCUMENTED] == []
