"""Finds the processes of a test, wherever they are in the process tree, by a mark in their environment."""

import time

import psutil

MARK = "RLCORE_TEST_RUN"
"""The environment variable; each test gives it another value."""


def marked_processes(mark):
    """The live processes with this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_gone(mark, timeout=120):
    """Wait until no process with this mark is left; fails after `timeout` seconds."""
    until = time.monotonic() + timeout
    while left := marked_processes(mark):
        assert time.monotonic() < until, f"these processes outlived the command: {left}"
        time.sleep(0.2)
