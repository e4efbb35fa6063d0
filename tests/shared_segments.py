"""Shared-memory segments of given processes; other test processes of the machine create and lose their own meanwhile."""

import os

import psutil

from rl_core.weights.shared_memory import DIRECTORY


def segments_of(*pids):
    """Names of the segments that these processes, which may have ended, have left or still own."""
    return sorted(path.name for pid in pids for path in DIRECTORY.glob(f"rlcore-{pid}-*"))


def own_processes():
    """This process and its descendants."""
    return {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
