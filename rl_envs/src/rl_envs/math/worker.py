"""The grading process: reads a line of JSON, writes a line of JSON; does not import torch.

Started by `rl_envs.math.grading` as `python -m rl_envs.math.worker`. It exits when its input closes, so it does not outlive
its parent. The kernel kills it when a comparison exceeds its CPU time, even inside a C call.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any, TextIO

from rl_envs.math.answers import grade_answer

MEMORY_LIMIT_BYTES = 4 << 30
"""Address space limit: a power tower fails to allocate before it uses up the machine's memory."""
RETIRE_BYTES = 1 << 30
"""Peak memory above which a process asks to be replaced, before it reaches the limit."""


def main() -> None:
    """Answer requests until the input closes."""
    replies = _claim_standard_output()
    _limit_memory()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is sent to the whole process group; the parent closes our input when it is done
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    grade_answer("1", "\\boxed{1}", require_box=True)  # loads the parser, which takes longer than any comparison
    _send(replies, {"ready": True})
    _silence_standard_error()
    for line in sys.stdin:
        _send(replies, _answer(json.loads(line)))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    # CPU time, not wall-clock time: a busy machine must not turn correct answers into timeouts.
    signal.setitimer(signal.ITIMER_PROF, request["timeout_s"])
    try:
        grade = grade_answer(
            request["expected"],
            request["completion"],
            require_box=request["require_box"],
            allow_unevaluated=request["allow_unevaluated"],
        )
        comparison = None if grade.comparison is None else grade.comparison.name
        reply = {"comparison": comparison, "answer": grade.answer, "boxed": grade.boxed}
    except (Exception, RecursionError) as error:
        reply = {"comparison": None, "answer": None, "boxed": False, "error": f"{type(error).__name__}: {error}"}
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
    """The parser reports every unexpected character on standard error."""
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


if __name__ == "__main__":
    main()
