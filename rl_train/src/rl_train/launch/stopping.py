"""Stop signals, which end a run, and the event hooks of plugins, which follow it.

The first signal ends a run after the current step with a checkpoint, the second at once.
"""

from __future__ import annotations

import inspect
import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rl_core.plugins import hookspecs
from rl_core.plugins.component import Plugin, describe
from rl_core.plugins.manager import DISABLE_VARIABLE, PluginManager
from rl_train.errors import PluginHookError, RunInterrupted, StopReason
from rl_train.run import Run

_log = logging.getLogger("rlcore")
_REASONS = {
    signal.SIGINT: StopReason.CTRL_C,
    signal.SIGTERM: StopReason.SIGTERM,
    signal.SIGHUP: StopReason.SIGHUP,
}
EVENT_HOOKS = ("rlcore_run_started", "rlcore_step_finished", "rlcore_run_finished")


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
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def call_event(manager: PluginManager, event: str, /, **arguments: Any) -> None:
    """Call one event hook of every working plugin, the last registered first.

    The remaining plugins are called even if one raises.

    Args:
        manager: The plugins.
        event: The name of the hook: 'rlcore_run_started', 'rlcore_step_finished' or 'rlcore_run_finished'.
        **arguments: All arguments of the hook's specification.

    Raises:
        PluginHookError: Plugins raised; the error names each one, its distribution and its exception.
        ValueError: The event hook does not exist, or the arguments do not match its specification.
    """
    if event not in EVENT_HOOKS:
        raise ValueError(f"There is no event hook {event!r}.")
    parameters = set(inspect.signature(getattr(hookspecs, event)).parameters)
    if set(arguments) != parameters:
        raise ValueError(f"{event} takes {sorted(parameters)}, not {sorted(arguments)}.")
    failures: list[tuple[Plugin, Exception]] = []
    for plugin, implementation in manager.event_hooks(event):
        try:
            implementation.function(*(arguments[name] for name in implementation.argnames))
        except Exception as error:
            failures.append((plugin, error))
    if failures:
        raise _hook_error(event, failures) from failures[0][1]


def _hook_error(event: str, failures: Sequence[tuple[Plugin, Exception]]) -> PluginHookError:
    raised = [f"{event} of the plugin {plugin.name!r} ({plugin.label}) raised {describe(error)}." for plugin, error in failures]
    names = ",".join(plugin.name for plugin, _ in failures)
    return PluginHookError("\n".join([*raised, f"To run without it: {DISABLE_VARIABLE}={names}"]))
