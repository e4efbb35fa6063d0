"""Deadlines of remote calls, and the report of workers that did not answer. Does not import Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_core.errors import DeadlineExceededError, UserError


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Maximum seconds for each kind of remote work.

    Attributes:
        start_s: From requesting a process until its worker is built (including model loading).
        call_s: One call of a worker's method, unless the call sets its own.
        stop_s: A worker's own `shutdown()`; afterwards its process is killed.
        stack_s: Reading the stack of a worker that does not answer.
    """

    start_s: float = 900.0
    call_s: float = 3600.0
    stop_s: float = 15.0
    stack_s: float = 10.0

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in vars(self).items() if not value > 0}
        if wrong:
            raise UserError(f"a deadline is a positive number of seconds, found {wrong}")


@dataclass(frozen=True, kw_only=True)
class Unanswered:
    """A worker that was still busy at the deadline.

    Attributes:
        who: Such as "rank 1 (data=1) of 'policy'".
        where: Host and pid, or that its process has not started.
        method: The method that was called.
        seconds: Seconds since the call.
        doing: The Python stack, or why it is unavailable.
    """

    who: str
    where: str
    method: str
    seconds: float
    doing: str


def deadline_error(deadline_s: float, waiting: Sequence[Unanswered], answered: Sequence[str]) -> DeadlineExceededError:
    """The error for an expired deadline, with the workers that did not answer, what each was doing, and those that did."""
    methods = sorted({one.method for one in waiting})
    lines = [
        f"{', '.join(methods)} did not finish within {deadline_s:g} s: "
        f"{len(waiting)} of {len(waiting) + len(answered)} workers did not answer."
    ]
    for one in waiting:
        lines.append(f"- {one.who}, {one.where}, in {one.method} for {one.seconds:.1f} s; what it was doing:")
        lines += [f"    {line}" for line in one.doing.splitlines()]
    lines.append(f"Answered: {', '.join(answered) or 'none'}.")
    lines.append(
        "If the work just takes long, raise the deadline. If ranks wait for each other, look for the one with a different "
        "stack. A worker that did not answer stays busy: restart or shut down its group."
    )
    return DeadlineExceededError("\n".join(lines))
