"""The child's side of `rl_envs.grading_process`: reads a line of JSON, writes a line of JSON; does not import torch.

It exits when its input closes, so it does not outlive its parent. The kernel kills it when an answer exceeds its CPU time, even
inside a C call.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO

MEMORY_LIMIT_BYTES = 4 << 30
"""Address space limit: a power tower fails to allocate before it uses up the machine's memory."""
RETIRE_BYTES = 1 << 30
"""Peak memory above which a process asks to be replaced, before it reaches the limit."""


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], *, warm_up: Callable[[], object]) -> None:
    """Answer requests until the input closes.

    Args:
        answer: Maps a request to a reply; `timeout_s` of the request limits its CPU time. If it raises, the reply is `error`.
        warm_up: Called once before the first request, without a time limit, to load what takes long.
    """
    replies = _claim_standard_output()
    _limit_memory()
    # Ctrl-C is sent to the whole process group; the parent closes our input when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    warm_up()
    _send(replies, {"ready": True})
    _silence_standard_error()
    for line in sys.stdin:
        _send(replies, _within_limits(answer, json.loads(line)))


def _within_limits(answer: Callable[[dict[str, Any]], dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
    # CPU time, not wall-clock time: a busy machine must not turn correct answers into timeouts.
    signal.setitimer(signal.ITIMER_PROF, request["timeout_s"])
    try:
        reply = answer(request)
    except (Exception, RecursionError) as error:
        reply = {"error": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return {**reply, "retire": _peak_memory_bytes() > RETIRE_BYTES}


def _send(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _claim_standard_output() -> TextIO:
    """The pipe to the parent. Output of libraries goes to standard error from now on."""
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    return replies


def _silence_standard_error() -> None:
    """Parsers report every unexpected character on standard error."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)


def _limit_memory() -> None:
    if sys.platform == "linux":  # macOS accepts the limit but does not enforce it
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _peak_memory_bytes() -> int:
    if not os.path.exists("/proc/self/status"):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not ru_maxrss on Linux: it includes the peak of the parent process, which may have loaded a model.
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
