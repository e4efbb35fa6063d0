"""Kills a process of a test, and waits until it is gone."""

import os
import signal

import psutil


def kill(pid):
    """Send SIGKILL, and return when the process has ended."""
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    process.wait()
