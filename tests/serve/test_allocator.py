"""Memory of large blocks is returned to the system."""

import platform
import subprocess
import sys

import pytest

MAPPED = """
import ctypes
from rl_serve.allocator import return_large_blocks

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
assert return_large_blocks()
large = bytearray(30 * 2**20)
del large  # by default, blocks of up to 30 MiB now come from the heap
before = mallinfo().hblkhd
block = bytearray(5 * 2**20)
print(mallinfo().hblkhd - before)
"""


@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.33"), reason="mallinfo2 is a function of glibc 2.33")
def test_a_large_block_is_mapped_by_itself_after_a_larger_one_was_freed():
    found = subprocess.run([sys.executable, "-c", MAPPED], capture_output=True, text=True, check=True, timeout=240)
    assert int(found.stdout) >= 5 * 2**20
