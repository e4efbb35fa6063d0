"""What surrounds a run: its locked folder, log files, status.json, stop signals and error reporting.

The first signal ends a run after the current step with a checkpoint, the second at once.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rl_core.cluster import daemons
from rl_core.errors import RayDiedError
from rl_train.assembly.error_locations import with_location
from rl_train.checkpoints.disk_space import explain_disk_errors
from rl_train.config.loader import LoadedConfig
from rl_train.errors import RunInterrupted, StopReason, lost_interrupts
from rl_train.run import Run
from rl_train.run_folders.run_folder import ResumePoint, choose_start, lock_run_folder
from rl_train.run_folders.status import Status

_log = logging.getLogger("rlcore")
_REASONS = {
    signal.SIGINT: StopReason.CTRL_C,
    signal.SIGTERM: StopReason.SIGTERM,
    signal.SIGHUP: StopReason.SIGHUP,
}


class StopSignals:
    """Handles SIGINT, SIGTERM and SIGHUP inside `listen`.

    Before `attend`, while the run is being built, and at a second signal, the main thread is interrupted at once. Signals
    that this process was started to ignore, for example by `nohup`, stay ignored.

    Args:
        grace_s: Time limit in seconds for the step and its checkpoint after the first signal; None for no limit.
    """

    def __init__(self, grace_s: float | None = None) -> None:
        self._grace_s = grace_s
        self._reason: StopReason | None = None
        self._run: Run | None = None
        self._timer: threading.Timer | None = None
        self._is_over = False
        self._has_interrupted = False

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Handle the signals in the block.

        Raises:
            RunInterrupted: A signal interrupted the block.
        """
        before = self._install()
        try:
            with lost_interrupts(self._interrupt):
                yield
        except BaseException as error:
            # Libraries convert the KeyboardInterrupt of `_handle` to other errors.
            if self._reason is None or not self._has_interrupted or isinstance(error, RunInterrupted):
                raise
            raise RunInterrupted.at_once(self._reason) from error
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for number, handler in before.items():
                signal.signal(number, handler)

    def end_after_step(self, run: Run) -> None:
        """Let the first signal end this run after its current step; before this call, a signal interrupts at once."""
        self._run = run

    def _install(self) -> dict[signal.Signals, Any]:
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
            return {}
        handled = [number for number in _REASONS if signal.getsignal(number) is not signal.SIG_IGN]
        return {number: signal.signal(number, self._handle) for number in handled}

    def _handle(self, number: int, frame: object) -> None:
        reason = _REASONS[signal.Signals(number)]
        is_first, self._reason = self._reason is None, self._reason or reason
        if self._run is not None and is_first:
            self._request_stop(self._run, reason)
            return
        self._has_interrupted = True
        if self._run is None:
            raise KeyboardInterrupt
        why = f"checkpointing.stop_grace_s ({self._grace_s:g} s) is over" if self._is_over else f"{reason.label} again"
        _log.warning("%s: stopping at once; progress since the last checkpoint is lost", why)
        raise KeyboardInterrupt

    def _request_stop(self, run: Run, reason: StopReason) -> None:
        run.stop_reason = run.stop_reason or reason  # a run that has reached its time limit may be writing its checkpoint
        how = "with a checkpoint" if run.checkpoints is not None else "without a checkpoint, because checkpointing is disabled"
        limit = "" if self._grace_s is None else f", within {self._grace_s:g} s"
        _log.warning("%s: stopping after this step%s, %s; a second signal stops at once", reason.label, limit, how)
        if self._grace_s is not None:
            self._timer = threading.Timer(self._grace_s, self._end_grace)
            self._timer.daemon = True
            self._timer.start()

    def _end_grace(self) -> None:
        # A signal to the main thread also interrupts its blocking system calls.
        self._is_over = True
        self._interrupt()

    def _interrupt(self) -> None:
        if self._reason is not None:
            number = next(number for number, reason in _REASONS.items() if reason is self._reason)
            signal.pthread_kill(threading.main_thread().ident or 0, number)


_OWN_LOGGERS = ("rlcore", "rl_core", "rl_backends_base", "rl_train")


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run of this process, from the lock on its folder to the end.

    Attributes:
        start: the run folder, which this process has locked, and the checkpoint to resume from.
        status: writes status.json.
        stop: handles stop signals.
        exits: closes the components of the run in reverse order, before the session ends.
        console: whether progress is shown on standard output.
    """

    start: ResumePoint
    status: Status
    stop: StopSignals
    exits: ExitStack
    console: bool

    def show(self, text: str) -> None:
        """Print a line of progress."""
        if self.console:
            _print(text)


@contextmanager
def open_session(loaded: LoadedConfig, *, resume: str, console: bool, since: float) -> Iterator[Session]:
    """Lock the folder of a run; in the block, log to it, report to it, and handle signals.

    Args:
        loaded: the config.
        resume: `auto`, `never` or a path.
        console: show progress on standard output.
        since: start of the run, by `time.perf_counter`.
    """
    config = loaded.run
    with ExitStack() as exits:
        start = choose_start(config, name=config.logger.run_name or loaded.path.stem, resume=resume)
        start = lock_run_folder(start, config.checkpointing, exits)
        exits.enter_context(_logging_to(start.folder, loaded.secrets.redact))
        status = Status(start.folder, since=since, resumes=start.checkpoint is not None, redact=loaded.secrets.redact)
        stop = StopSignals(config.checkpointing.stop_grace_s)
        session = Session(start=start, status=status, stop=stop, exits=exits, console=console)
        session.show(f"run folder {start.folder}{start.name_note}")
        if not config.checkpointing.enabled:
            session.show("checkpointing.enabled is false: this is a new run, which cannot be resumed")
        give_up = partial(_report_dead_cluster, status)
        # Entered before all components are created, left after they are closed.
        for context in (
            status,
            explain_disk_errors(start.folder),
            with_location(loaded),
            stop.listen(),
            daemons.watch_daemons(logs=start.folder / "logs", give_up=give_up),
        ):
            exits.enter_context(context)
        yield session


def _report_dead_cluster(status: Status, error: RayDiedError) -> None:
    """Report the error before the process exits, because the main thread is blocked by a Ray cluster that died."""
    status.__exit__(type(error), error, None)
    _print(f"error: {error}", file=sys.stderr)


def _print(text: str, file: TextIO | None = None) -> None:
    with suppress(OSError):  # the screen may be gone
        print(text, file=file, flush=True)


@contextmanager
def _logging_to(folder: Path, redact: Callable[[str], str]) -> Iterator[None]:
    """Write rlcore's warnings to the screen, and all of its messages to logs/driver.log, without the config's secrets."""
    (folder / "logs").mkdir(exist_ok=True)
    file = _DriverLog(folder / "logs" / "driver.log", encoding="utf-8")
    file.setFormatter(_RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", redact))
    handlers = [(logging.getLogger(), file), *((logging.getLogger(name), _ScreenWarnings(redact)) for name in _OWN_LOGGERS)]
    for logger, handler in handlers:
        logger.addHandler(handler)
    levels = {name: logging.getLogger(name).level for name in _OWN_LOGGERS}
    for name in levels:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for logger, handler in handlers:
            logger.removeHandler(handler)
            with suppress(OSError):  # on a full disk the last lines are lost, but the error of the run is still reported
                handler.close()


class _DriverLog(logging.FileHandler):
    """A log file that drops lines on a full disk, without a traceback on the screen for each."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Does nothing: the run reports a full disk once."""


class _RedactingFormatter(logging.Formatter):
    """Removes secrets from each record, including its traceback."""

    def __init__(self, text: str, redact: Callable[[str], str]) -> None:
        super().__init__(text)
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self._redact(super().format(record))


class _ScreenWarnings(logging.Handler):
    """Warnings on the current standard error, which a live display may replace."""

    def __init__(self, redact: Callable[[str], str]) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(_RedactingFormatter("warning: %(message)s", redact))

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # the screen may be gone; the file has the warning too
            print(self.format(record), file=sys.stderr, flush=True)
