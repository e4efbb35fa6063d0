"""What `rlcore doctor` prints about the machine."""

import os
import re
import shutil

import pytest

from rlcore_cli.doctor import instruction_lines


@pytest.mark.parametrize(
    ("flags", "sets", "is_slow"),
    [
        (["fpu", "avx2", "fma"], "AVX2", True),
        (["avx2", "avx512f"], "AVX2, AVX512", True),
        (["avx2", "avx512f", "avx512_bf16"], "AVX2, AVX512, AVX512-BF16", False),
        (["asimd", "bf16"], "NEON, ARM BF16", False),
        (["fpu"], "none of AVX2", True),
    ],
)
def test_instruction_sets_are_named_with_what_they_mean_for_bfloat16(flags, sets, is_slow):
    first, *notes = instruction_lines(flags)
    assert first.startswith(f"sets    {sets}")
    assert [each.startswith("note    no bfloat16 instructions") for each in notes] == [True] * is_slow


def test_a_system_without_cpuinfo_has_no_line():
    assert list(instruction_lines(None)) == []


def test_doctor_prints_threads_memory_and_the_command_that_installs_bubblewrap(rlcore, monkeypatch, tmp_path):
    # A folder without `bwrap`, because the machine of the test may have it.
    monkeypatch.setenv("PATH", str(tmp_path))
    _, missing = rlcore("doctor")
    assert f"{len(os.sched_getaffinity(0))} threads" in missing
    assert "GiB of memory available" in missing
    assert "apt-get install bubblewrap" in missing
    assert re.fullmatch(r"\d+ plugins ready(; \d+ optional components? unavailable: .+)?", missing.splitlines()[-1])
    assert shutil.which("bwrap") is None
