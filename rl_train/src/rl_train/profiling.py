"""Profiles single steps of a run with `torch.profiler`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_train.config.schema import ProfilingConfig

_log = logging.getLogger(__name__)


@contextmanager
def profiled(step: int, config: ProfilingConfig, folder: Path) -> Iterator[None]:
    """Profile the block if `step` is one of `config.steps`.

    The trace of CPU and GPU operations is written to `profile/step_NNNNNN.json.gz` of the run folder, unless the block raises.

    Args:
        step: number of the step.
        config: the section `profiling`.
        folder: the run folder.
    """
    if step not in config.steps:
        yield
        return
    # Imported here, because it takes a moment and most runs do not use it.
    from torch.profiler import profile

    with profile() as profiler:
        yield
    target = folder / "profile"
    target.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(target / f"step_{step:06d}.json.gz"))
    _log.info("The trace of step %d is in %s.", step, target)
