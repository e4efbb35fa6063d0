"""Deadlines of remote calls, and the report of workers that did not answer. Does not import Ray."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_core.errors import DeadlineExceededError, UserError

if TYPE_CHECKING:
    from rl_core.cluster.remote_actor import ActorCall


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


def deadline_error(waiting: Sequence[ActorCall], answered: Sequence[str], *, stack_s: float) -> DeadlineExceededError:
    """The error for an expired deadline, with the workers that did not answer, what each was doing, and those that did.

    Args:
        waiting: The calls without an answer.
        answered: Labels of the workers that answered.
        stack_s: Limit of reading the stack of a worker, in seconds.
    """
    seconds = [time.monotonic() - call.started for call in waiting]
    with ThreadPoolExecutor(max_workers=16) as looks:  # reading a stack on another node takes seconds
        stacks = list(looks.map(lambda call: call.actor.stack(stack_s), waiting))
    methods = sorted({call.method for call in waiting})
    lines = [
        f"{', '.join(methods)} did not finish within {round(max(seconds), 1):g} s: "
        f"{len(waiting)} of {len(waiting) + len(answered)} workers did not answer."
    ]
    for call, waited, stack in zip(waiting, seconds, stacks, strict=True):
        lines.append(f"- {call.actor.label}, {call.actor.where()}, in {call.method} for {waited:.1f} s; what it was doing:")
        lines += [f"    {line}" for line in stack.splitlines()]
    lines.append(f"Answered: {', '.join(answered) or 'none'}.")
    lines.append(
        "If the work just takes long, raise the deadline. If ranks wait for each other, look for the one with a different "
        "stack. A worker that did not answer stays busy: restart or shut down its group."
    )
    return DeadlineExceededError("\n".join(lines))
