"""Profiles single steps of a run with `torch.profiler`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rl_core.errors import ConfigError
from rl_train.config.schema import ProfilingConfig

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
