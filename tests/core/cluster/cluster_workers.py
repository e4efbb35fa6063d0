"""Worker classes of these tests, pickled by value, so that processes do not need this folder on their path."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil


class UnpicklableError(Exception):
    """Cannot be created again from its arguments."""

    def __init__(self, text, *, code):
        super().__init__(text)


class Worker:
    """Returns its context and misbehaves on request."""

    def __init__(self, context, *, base=0, fail_on=None):
        if fail_on == context.rank:
            raise ValueError(f"no model on rank {context.rank}")
        self.context = context
        self.base = base
        self.calls = 0

    def add(self, x, y=0):
        self.calls += 1
        return self.base + x + y

    def whoami(self):
        return self.context

    def environ(self):
        return dict(os.environ)

    def seen(self, shard, suffix=""):
        self.last = (self.context.rank, shard, suffix)
        return self.last

    def last_seen(self):
        return self.last

    def count(self):
        return self.calls

    def on_main_thread(self):
        return threading.current_thread() is threading.main_thread()

    def raise_from_a_cause(self):
        try:
            raise ValueError("the cause")
        except ValueError as error:
            raise UnpicklableError("wrapped", code=3) from error

    def raise_on(self, rank, error):
        if self.context.rank == rank:
            raise error
        return self.context.rank

    def raise_unpicklable(self):
        class Local(Exception):
            def __init__(self, a, b):
                super().__init__(f"{a} and {b}")
                self.lock = threading.Lock()

        raise Local(1, 2)

    def sleep_on(self, rank, beds):
        """The rank sleeps until its file `asleep-<pid>` in the folder is removed."""
        if self.context.rank == rank:
            self.wait_for_a_peer_that_never_comes(Path(beds) / f"asleep-{os.getpid()}")

    def wait_for_a_peer_that_never_comes(self, bed):
        bed.touch()
        while bed.exists():
            time.sleep(0.02)

    def hold_the_lock_on(self, rank, beds):
        """Runs C code that holds the GIL until its process is killed."""
        if self.context.rank == rank:
            (Path(beds) / f"asleep-{os.getpid()}").touch()
            self.long_c_call()

    def long_c_call(self):
        while True:
            sum(range(10_000_000))

    def stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def meet(self, folder, mine, other):
        """Returns once both have arrived."""
        (Path(folder) / mine).touch()
        while not (Path(folder) / other).exists():
            time.sleep(0.02)

    def die_on(self, rank):
        """One rank dies; its peers fail before its death is detected, as in a broken collective."""
        if self.context.rank != rank:
            raise RuntimeError("my peer hung up")
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def outlive(self, rank, pid, beds):
        """One rank, the process `pid`, dies once it is woken as in `sleep_on`; its peers fail when it is gone."""
        if self.context.rank == rank:
            self.sleep_on(rank, beds)
            os.kill(os.getpid(), signal.SIGKILL)
        (Path(beds) / f"asleep-{os.getpid()}").touch()
        wait_until(lambda: not lives(pid))
        raise RuntimeError("my peer hung up")

    async def later(self, x):
        return x + 1

    def spawn(self):
        """Starts a child in a new session and a forked one; returns their pids."""
        own_session = subprocess.Popen(["sleep", "600"], start_new_session=True)
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        forked.start()
        return [own_session.pid, forked.pid]

    def interpreter(self):
        return sys.prefix, os.getpid()

    def sum_over_ranks(self):
        """1 + 2 + ... over the ranks, by gloo at the meeting point of the context."""
        import torch
        import torch.distributed as dist

        context = self.context
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{context.master_address}:{context.master_port}",
            rank=context.rank,
            world_size=context.world_size,
        )
        value = torch.tensor(context.rank + 1)
        dist.all_reduce(value)
        dist.destroy_process_group()
        return int(value)

    def total(self, array):
        return float(array.sum()), bool(array.flags.writeable)


def wait_until(condition, timeout_s=120.0):
    """Whether the condition became true."""
    until = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return bool(condition())


def lives(process):
    """Whether a process with this pid exists and is not a zombie."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class ContextFree:
    """A policy class without arguments for ranks."""

    def __init__(self, size=3):
        self.size = size

    def get_size(self):
        return self.size


class Scorer:
    """An environment-like actor; its constructor raises if there is a file `broken` in the folder, and records that."""

    def __init__(self, folder=None):
        self.folder = Path(folder) if folder else None
        if self.folder is not None and (self.folder / "broken").exists():
            with (self.folder / "starts").open("a") as starts:
                starts.write(".")
            raise RuntimeError("the model file is gone")

    def square(self, x):
        return x * x

    def pid(self):
        return os.getpid()

    def die_once(self, x, name):
        """Kills its own process in the first attempt for a name and returns the square in the next."""
        if self._first(name):
            os.kill(os.getpid(), signal.SIGKILL)
        return x * x

    def die_always(self, x):
        if x == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return x * x

    def hang_always(self, x):
        if x == 2:
            self.loop_that_never_ends()
        return x * x

    def loop_that_never_ends(self):
        while True:
            time.sleep(0.01)

    def divide(self, x):
        return 1 / x

    def square_or_wait_for_death(self, x):
        """Records its call and process; the first attempt for 1 ends only with its process."""
        with (self.folder / "calls").open("a") as calls:
            calls.write(f"{x} {os.getpid()}\n")
        if x == 1 and self._first("waited"):
            time.sleep(3600)
        return x * x

    def where(self):
        return str(self.folder)

    def wait_for(self, name):
        """Ends once there is a file of that name."""
        wait_until((self.folder / name).exists)
        return name

    def _first(self, name):
        try:
            (self.folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Drawing:
    """A policy's worker without the base class for policies; it draws from the generators of its process."""

    version = 0

    def get_weight_version(self):
        return self.version

    def train(self):
        self.version += 1
        return random.random(), random.random()

    def load_checkpoint(self, version):
        self.version = version


class Unversioned:
    """A worker of a user's own class that is not a policy."""

    def train(self):
        return "trained"


class Waiting:
    """Creates a file while it is constructed, and then waits until a file `open` exists, except for the first instance."""

    def __init__(self, context, *, folder):
        first = not (Path(folder) / "built").exists()
        (Path(folder) / ("built" if first else "building")).touch()
        while not first and not (Path(folder) / "open").exists():
            time.sleep(0.01)

    def answer(self):
        return 1
