"""The metrics of one step, the peak memory of its phases, the FLOP/s of its training, and profiles of single steps.

A worker reports the most memory that was in use since it was last asked. Workers run calls in order, so asking at the end of a
phase measures that phase. The answers are awaited with the metrics of the step, so a phase does not wait for them.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch

from rl_core.cluster.worker_group import PendingCall, WorkerGroup
from rl_core.dispatch.worker_facade import WorkerFacade
from rl_core.errors import ConfigError, WorkerDiedError
from rl_core.interfaces.worker import MeasuredWorker
from rl_train.config.schema import ProfilingConfig
from rl_train.metrics.progress import Progress

PEAK_TFLOPS: Final[Mapping[str, float]] = {
    "B200": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "H800": 989.4,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI300X": 1307.4,
}
"""Dense bfloat16 TFLOP/s with float32 accumulation, by the name that torch reports, from the vendors' data sheets and
architecture white papers. Figures that are given with sparsity are halved. The first name that matches counts."""


class Recorder:
    """Collects the metrics of one step; a name recorded twice becomes the mean of its values."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self.spans: list[tuple[str, float, float]] = []
        """Phase, start and end, in seconds of `time.perf_counter`, of each block of the step that was timed."""
        self.progress = Progress()
        """What the run is doing now."""
        self.memory: PeakMemory | None = None
        """Measures the memory of each phase, if it is set."""

    def add(self, metrics: Mapping[str, float | int | torch.Tensor], *, prefix: str = "") -> None:
        """Record metrics named `area/quantity`."""
        for name, value in metrics.items():
            self._values.setdefault(prefix + name, []).append(float(value))

    @property
    def phase(self) -> str | None:
        """Current phase of the run, for status and error reports; None between two phases."""
        return self.progress.phase

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Record the duration of the block as `time/<phase>_s`; equal names add up. An error leaves `phase` unchanged.

        The memory of the block is recorded as `memory/<phase>_gib`, which is the largest value for equal names.
        """
        outer = self.progress.phase
        self.progress.begin(phase)
        started = time.perf_counter()
        yield
        name, ended = f"time/{phase}_s", time.perf_counter()
        before = self._values.get(name, [0.0])[0]
        self._values[name] = [before + ended - started]
        self.spans.append((phase, started, ended))
        if self.memory is not None:
            self.memory.end(phase)
        self.progress.end(outer)

    def peek(self) -> dict[str, float]:
        """The metrics of the step so far."""
        return {name: sum(values) / len(values) for name, values in self._values.items()}

    def flush(self) -> dict[str, float]:
        """The metrics of the step; the recorder is empty afterwards."""
        flushed = self.peek() | (self.memory.flush() if self.memory is not None else {})
        self._values.clear()
        self.spans.clear()
        return flushed


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


def peak_tflops(device_name: str | None, precision: str) -> float | None:
    """The published peak of a device in TFLOP/s; None if it is unknown, or not that of `precision`."""
    if device_name is None or precision != "bfloat16":
        return None
    return next((peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


class ModelFlops:
    """FLOPs of the training of one model: its forward and backward pass, without recomputation and optimizer.

    A matrix takes 2 FLOPs per weight and token in the forward pass, 2 for the gradient of its input and, if it is trained, 2
    for its own gradient. In attention, a token and one that it attends to take two products of the width of all heads in each
    of the three. Attention counts as causal over the whole row; norms, activations and softmax are left out.

    Args:
        sizes: what the model's worker reports as `matrix_sizes`: weights that each token is multiplied with (`trained`,
            `frozen`), those of the LM head, which is applied to trained tokens only (`trained_head`, `frozen_head`), and the
            width of all heads of all layers (`attention`). Absent sizes are 0.
        ranks: number of devices that the FLOPs are divided by.
        peak: peak of one device in TFLOP/s; None if it is unknown.
    """

    def __init__(self, sizes: Mapping[str, float], *, ranks: int, peak: float | None) -> None:
        self._sizes, self._ranks, self._peak = sizes, ranks, peak

    def tflop(self, result: Mapping[str, Any]) -> float:
        """Model TFLOPs of a training call; rows without a gradient, which were not computed, do not count.

        Args:
            result: of `TrainableInterface.train`, with `computed_lengths`.
        """
        of = {name: self._sizes.get(name, 0.0) for name in ("trained", "frozen", "trained_head", "frozen_head", "attention")}
        lengths = torch.tensor(result["computed_lengths"], dtype=torch.float64)
        scored: float = result["global_valid_toks"] - result["skipped_valid_toks"]
        pairs = float((lengths * (lengths + 1)).sum()) / 2
        matrices = (6 * of["trained"] + 4 * of["frozen"]) * float(lengths.sum())
        head = (6 * of["trained_head"] + 4 * of["frozen_head"]) * scored
        return (matrices + head + 12 * of["attention"] * pairs) / 1e12

    def metrics(self, result: Mapping[str, Any], seconds: float) -> dict[str, float]:
        """`tflops_per_s` of a training call of this duration and, if the peak is known, `mfu`; empty without lengths."""
        if "computed_lengths" not in result:
            return {}
        speed = self.tflop(result) / seconds / self._ranks
        return {"tflops_per_s": speed} | ({"mfu": speed / self._peak} if self._peak is not None else {})


_log = logging.getLogger(__name__)


@contextmanager
def profiled(step: int, config: ProfilingConfig, folder: Path) -> Iterator[None]:
    """Profile the block if `step` is one of `config.steps`.

    The trace of CPU and GPU operations is written to `profile/step_NNNNNN.json.gz` of the run folder, unless the block raises.
    With `config.memory`, the allocations on the GPU are written to `profile/memory_NNNNNN.pickle`, also if it raises.

    Args:
        step: number of the step.
        config: the section `profiling`.
        folder: the run folder.

    Raises:
        ConfigError: torch has no GPU whose memory could be recorded.
    """
    if step not in config.steps:
        yield
        return
    # Imported here, because it takes a moment and most runs do not use it.
    from torch.profiler import profile

    target = folder / "profile"
    target.mkdir(exist_ok=True)
    recorded = _recorded_memory(target / f"memory_{step:06d}.pickle") if config.memory else nullcontext()
    with recorded, profile() as profiler:
        yield
    profiler.export_chrome_trace(str(target / f"step_{step:06d}.json.gz"))
    _log.info("The trace of step %d is in %s.", step, target)


@contextmanager
def _recorded_memory(file: Path) -> Iterator[None]:
    """Write the allocations on the GPU within the block, with their stacks, to `file`."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"profiling.memory records the memory of a GPU, but torch {torch.__version__} finds none. Remove it: "
            "`memory/<phase>_gib` in the metrics is the memory of a process on any device.",
            key="profiling.memory",
        )
    record = torch.cuda.memory._record_memory_history
    record(stacks="python")
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(file))
        record(enabled=None)
        _log.info("The allocations of the step are in %s.", file)
