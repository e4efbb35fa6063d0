"""Memory of large blocks is returned to the system, in this process and in Ray workers."""

import os
import platform
import subprocess
import sys

import pytest

from rl_core.cluster.ray_worker_group import RayWorkerGroup
from rl_core.cluster.virtual_cluster import RayVirtualCluster
from rl_core.compute_variables import FREED_MEMORY
from rl_core.errors import UserError
from rl_train.assembly.freed_memory import return_large_blocks

MAPPED = """
import ctypes
from rl_train.assembly.freed_memory import return_large_blocks

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
assert return_large_blocks()
large = bytearray(30 * 2**20)
del large  # by default, blocks of up to 30 MiB now come from the heap
before = mallinfo().hblkhd
block = bytearray(2 * 2**20)
print(mallinfo().hblkhd - before)
"""


@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.33"), reason="mallinfo2 is a function of glibc 2.33")
def test_a_large_block_is_mapped_by_itself_after_a_larger_one_was_freed():
    found = subprocess.run([sys.executable, "-c", MAPPED], capture_output=True, text=True, check=True, timeout=240)
    assert int(found.stdout) >= 2 * 2**20


def test_a_size_that_is_not_a_number_is_refused(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "2M")
    with pytest.raises(UserError, match=r"MALLOC_MMAP_THRESHOLD_ is '2M'\. Set it to a number of bytes"):
        return_large_blocks()


class Worker:
    """Reports the environment with which its process started, which glibc reads."""

    def environment(self):
        with open(f"/proc/{os.getpid()}/environ") as file:
            return file.read().split("\0")


def test_a_ray_worker_starts_with_the_sizes():
    with RayVirtualCluster([1], use_gpus=False) as cluster, RayWorkerGroup(cluster, Worker) as group:
        environment = group.run_one("environment")
    assert {f"{name}={size}" for name, size in FREED_MEMORY.items()} <= set(environment)
