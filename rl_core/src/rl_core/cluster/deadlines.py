"""How long a remote call may take, and the report of who did not answer; knows no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_core.errors import DeadlineExceededError, UserError


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds that each kind of remote work may take before the run gives up and says who hangs.

    Attributes:
        start_s: From asking for a process until its worker is built (a model is loaded within it).
        call_s: One call of a worker's method, unless the call names its own.
        stop_s: A worker's own `shutdown()`; then its process is killed.
        stack_s: Getting the stack of a worker that does not answer.
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
    """One worker that was still busy when the time was up.

    Attributes:
        who: Such as "rank 1 (data=1) of 'policy'".
        where: Host and pid, or that its process has not started.
        method: What it was asked to do.
        seconds: How long ago it was asked.
        doing: The Python stack, or why there is none.
    """

    who: str
    where: str
    method: str
    seconds: float
    doing: str


def exceeded(deadline_s: float, waiting: Sequence[Unanswered], answered: Sequence[str]) -> DeadlineExceededError:
    """The error that says who was waited for, what each was doing, and who had answered."""
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
        "Where the work is merely long, raise the deadline; where ranks wait for each other, look for the one whose "
        "stack differs. A worker that did not answer stays busy: restart or shut down its group."
    )
    return DeadlineExceededError("\n".join(lines))
