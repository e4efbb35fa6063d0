"""Ranks as forks of one program, which imports the libraries once for all of them: an import takes up to ten seconds."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONWARNINGS": "ignore"}


class RankProgram:
    """A running program whose ranks are started by `fork_ranks`."""

    def __init__(self, program: Path, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(program), *map(str, arguments)],
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Wait for all ranks; if one fails, raise with the output. The test's own time limit applies."""
        try:
            output = self._process.communicate()[0]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.returncode == 0, output[-8000:]


def fork_ranks(world: int, work: Callable[[int], None]) -> None:
    """Run `work(rank)` in one fork for each rank; end this process if one of them fails.

    This process must have no threads: a fork has only the thread that called it, and locks of the others stay locked.
    """
    assert len(os.listdir("/proc/self/task")) == 1, "this process has threads"
    gc.freeze()  # imported objects are not searched for garbage in the ranks
    sys.stdout.flush()
    ranks = {_fork(rank, work): rank for rank in range(world)}
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if status:
            # The others would wait for a rank that is gone.
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            print(f"rank {rank} of {world} failed: {status}", flush=True)
            os._exit(1)  # finalizing the interpreter would print hundreds of lines about leaks of Triton after the error


def _fork(rank: int, work: Callable[[int], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work(rank)
        code = 0
    except BaseException:
        print(f"rank {rank}:", flush=True)
        traceback.print_exc()
    finally:
        # The interpreter is not finalized. A gloo process group that something still references outlives
        # `destroy_process_group`, and a thread of it that has not yet freed the tensors of the last collective needs the GIL of
        # a finalizing interpreter: the process would abort. Ray ends real workers in the same way.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise AssertionError("unreachable")
