"""Results of the checks of an environment."""

from __future__ import annotations

from collections.abc import Callable, Generator

from rl_core.testing.promises import Found
from rl_train.diagnostics.diagnosis import Diagnosis, DiagnosisStatus


def check_result(
    name: str, check: Callable[[], str | tuple[DiagnosisStatus, str]], *, passed: DiagnosisStatus = DiagnosisStatus.OK
) -> Generator[Diagnosis, None, bool]:
    """Yields the result of a check, and returns whether it passed; an exception is a failure.

    Args:
        name: name of the check.
        check: returns what it found, or a status and what it found.
        passed: status of a check that returns none.
    """
    try:
        found = check()
    except Found as error:
        yield Diagnosis(status=DiagnosisStatus.FAILED, name=name, found=str(error))
        return False
    except (Exception, SystemExit) as error:  # of the environment, which may raise anything
        yield Diagnosis(status=DiagnosisStatus.FAILED, name=name, found=f"{type(error).__name__}: {error}")
        return False
    status, detail = (passed, found) if isinstance(found, str) else found
    yield Diagnosis(status=status, name=name, found=detail)
    return True
