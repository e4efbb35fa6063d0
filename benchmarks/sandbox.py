"""Programs per second in the sandbox, next to plain subprocesses on the same machine.

Each program prints a number, except those with tests of the environment `code`, which run in a second session. A new session
is a new isolation unit with a new interpreter; a warm session runs many programs. The plain subprocess (`python -I -S`, no
isolation) is the reference: what a new interpreter costs alone.

Usage:
    python benchmarks/sandbox.py [--programs 200] [--threads 2] [--out benchmarks/results/sandbox.md]

As root, both isolating levels are measured. CPU-seconds are those of this process and of all its descendants, including ended
ones, so they hold on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from cpu_time import cpu_seconds

from rl_envs.code.environment import SuiteRunner
from rl_envs.code.suites import read_suite
from rl_sandbox.interface import Outcome
from rl_sandbox.local import Level, LocalSandbox
from rl_sandbox.session import LocalSession

PROGRAM = "print(sum(range(100)))"
EXPECTED = "4950\n"
NORMAL_USER = 61200
_BATCH = 20
_CALLS = 20_000


def measure(work: Callable[[int], None], count: int, threads: int) -> tuple[float, float]:
    """Programs per second, and CPU-milliseconds per program."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))  # warm up
        cpu, started = cpu_seconds(), time.perf_counter()
        list(pool.map(work, range(count)))
        elapsed = time.perf_counter() - started
        return count / elapsed, (cpu_seconds() - cpu) / count * 1000


def plain(_: int) -> None:
    done = subprocess.run([sys.executable, "-I", "-S", "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == EXPECTED


@contextmanager
def sandboxes() -> Iterator[list[LocalSandbox]]:
    available = [LocalSandbox()]
    if os.getuid() == 0:
        available.append(LocalSandbox(level=Level.USER_NAMESPACE, drop_to=NORMAL_USER))
    try:
        yield available
    finally:
        for sandbox in available:
            sandbox.close()


def measure_new_sessions(sandbox: LocalSandbox, count: int, threads: int) -> tuple[float, float]:
    """Like `measure`. Sessions are closed after the CPU time is read, because that of killed processes is lost."""

    def start(_: int) -> LocalSession:
        session = sandbox.open_session()
        assert session.run_program(PROGRAM).stdout == EXPECTED
        return session

    elapsed = cpu = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(count // _BATCH):
            before, started = cpu_seconds(), time.perf_counter()
            sessions = list(pool.map(start, range(_BATCH)))
            middle = time.perf_counter()
            cpu += cpu_seconds() - before
            closing = time.perf_counter()
            list(pool.map(LocalSession.close, sessions))
            elapsed += middle - started + time.perf_counter() - closing
    programs = count // _BATCH * _BATCH
    return programs / elapsed, cpu / programs * 1000


@contextmanager
def warm(sandbox: LocalSandbox, threads: int, method: str) -> Iterator[Callable[[int], None]]:
    sessions = [sandbox.open_session() for _ in range(threads)]

    def work(number: int) -> None:
        assert getattr(sessions[number % threads], method)(PROGRAM).stdout == EXPECTED

    try:
        yield work
    finally:
        for session in sessions:
            session.close()


def measure_calls(sandbox: LocalSandbox, threads: int) -> tuple[float, float]:
    """Calls per second from the tests of a program, and CPU-milliseconds per call, of suites with many calls."""
    suite = read_suite(f"for i in range({_CALLS}):\n    assert double(i) == 2 * i", None)
    runner = SuiteRunner(sandbox, threads)

    def work(_: int) -> None:
        assert runner.run("def double(x):\n    return 2 * x", suite, 600.0) == (1, Outcome.OK)

    rate, cpu = measure(work, 2 * threads, threads)
    runner.close()
    return rate * _CALLS, cpu / _CALLS


def measure_suites(sandbox: LocalSandbox, count: int, threads: int) -> tuple[float, float]:
    """Like `measure`, of programs with four assertions. The CPU time of the killed sessions of the programs is lost."""
    suite = read_suite("\n".join(f"assert add({n}, 1) == {n + 1}" for n in range(4)), None)
    runner = SuiteRunner(sandbox, threads)

    def work(_: int) -> None:
        assert runner.run("def add(a, b):\n    return a + b", suite, 60.0) == (4, Outcome.OK)

    measured = measure(work, count, threads)
    runner.close()
    return measured


def table(programs: int, threads: int) -> list[str]:
    rows = [("plain subprocess, not isolated", "", *measure(plain, programs, threads))]
    with sandboxes() as available:
        for sandbox in available:
            level = f"`{sandbox.level.value}`" + (", cgroup" if sandbox.controllers else "")
            measured = measure_new_sessions(sandbox, programs, threads)
            rows.append(("new session and interpreter, one program", level, *measured))
            for method, words in (("run_program", "warm session, a new process"), ("run", "warm session, its interpreter")):
                with warm(sandbox, threads, method) as work:
                    rows.append((words, level, *measure(work, 5 * programs, threads)))
            rows.append(
                ("program with a test suite of `code`, in two sessions", level, *measure_suites(sandbox, programs, threads))
            )
            rows.append(("each further call of the program by its tests", level, *measure_calls(sandbox, threads)))
    lines = ["| what | level | programs per second | CPU-ms per program |", "|---|---|---|---|"]
    return lines + [f"| {words} | {level} | {rate:.0f} | {cpu:.2g} |" for words, level, rate, cpu in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    lines = [
        "# Programs per second in the sandbox",
        "",
        f"Commit {commit}, Python {platform.python_version()}, {os.cpu_count()} cores, {arguments.threads} threads, "
        f"load average {os.getloadavg()[0]:.1f} at the start. Regenerate with `python benchmarks/sandbox.py --out "
        "benchmarks/results/sandbox.md`.",
        "",
        *table(arguments.programs, arguments.threads),
    ]
    print("\n".join(lines))
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
