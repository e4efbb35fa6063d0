"""Peak memory of the processes of models and engine, by phase of a step.

A worker reports the most memory that was in use since it was last asked. Workers run calls in order, so asking at the end of a
phase measures that phase. The answers are awaited with the metrics of the step, so a phase does not wait for them.
"""

from __future__ import annotations

from collections.abc import Iterable

from rl_core.cluster.pending_call import PendingCall
from rl_core.cluster.worker_group import WorkerGroup
from rl_core.dispatch.worker_facade import WorkerFacade
from rl_core.errors import WorkerDiedError
from rl_core.interfaces.worker import MeasuredWorker


class PeakMemory:
    """Measures all ranks of some worker groups.

    Args:
        components: models and engine; those without workers are not measured.
        deadline_s: timeout of the answers, in seconds.
    """

    def __init__(self, components: Iterable[object], *, deadline_s: float) -> None:
        facades = (each for each in components if isinstance(each, WorkerFacade))
        measured = [each for each in facades if issubclass(each.worker_class, MeasuredWorker)]
        in_process = [each for each in measured if each.is_in_process]
        self._facades = [each for each in measured if each not in in_process[1:]]  # one measures this process for all
        self._deadline_s = deadline_s
        self._asked: list[tuple[str, PendingCall]] = []
        self.start()

    @property
    def _groups(self) -> list[WorkerGroup]:
        return [each.group for each in self._facades]

    def start(self) -> None:
        """Forget the peak so far: what is used before the first phase of a step, such as for a checkpoint, is not measured."""
        for group in self._groups:
            group.submit_all("take_peak_memory")

    def end(self, phase: str) -> None:
        """Measure a phase, from the end of the phase before it. A phase may occur several times in a step."""
        self._asked += [(phase, group.submit_all("take_peak_memory")) for group in self._groups]

    def flush(self) -> dict[str, float]:
        """`memory/<phase>_gib` of the phases since the last call: the largest peak of any process, in GiB.

        A process that has died is left out; the next call of it reports its death.

        Raises:
            DeadlineExceededError: a worker did not answer in time.
        """
        peaks: dict[str, float] = {}
        for phase, call in self._asked:
            measured = [each for each in call.settle(self._deadline_s) if not isinstance(each, WorkerDiedError)]
            known = [each / 2**30 for each in measured if each is not None]
            name = f"memory/{phase}_gib"
            if known:
                peaks[name] = max(peaks.get(name, 0.0), *known)
        self._asked.clear()
        return peaks
