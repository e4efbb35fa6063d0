"""Results of the checks of an environment."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import StrEnum


class CheckStatus(StrEnum):
    """Result of a check: a note is neither good nor bad."""

    OK = "ok"
    NOTE = "note"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What one check found."""

    status: CheckStatus
    name: str
    detail: str


class CheckFailedError(Exception):
    """A check found a mistake in the environment."""


def check_result(
    name: str, check: Callable[[], str | tuple[CheckStatus, str]], *, passed: CheckStatus = CheckStatus.OK
) -> Generator[CheckResult, None, bool]:
    """Yields the result of a check, and returns whether it passed; an exception is a failure.

    Args:
        name: name of the check.
        check: returns what it found, or a status and what it found.
        passed: status of a check that returns none.
    """
    try:
        found = check()
    except CheckFailedError as error:
        yield CheckResult(status=CheckStatus.FAILED, name=name, detail=str(error))
        return False
    except (Exception, SystemExit) as error:  # of the environment, which may raise anything
        yield CheckResult(status=CheckStatus.FAILED, name=name, detail=f"{type(error).__name__}: {error}")
        return False
    status, detail = (passed, found) if isinstance(found, str) else found
    yield CheckResult(status=status, name=name, detail=detail)
    return True
