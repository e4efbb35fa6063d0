"""Starts real processes that each run one rank of a program, and waits for all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_core.cluster.ports import free_port


def run_ranks(program: str, world: int, models: Path, out: Path, names: Sequence[str], *, ports: int, timeout_s: float) -> None:
    """Run `program` of this folder as `world` ranks; fails with what they said where one of them fails."""
    free = {str(free_port("127.0.0.1")) for _ in range(3 * ports)}
    assert len(free) >= ports
    path = str(Path(__file__).with_name(program))
    arguments = [str(models), str(out), ",".join(names), *sorted(free)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONWARNINGS": "ignore"}
    logs = [(out / f"{program}-{world}-{rank}.log").open("w+") for rank in range(world)]
    processes = [
        subprocess.Popen(
            [sys.executable, path, str(rank), str(world), *arguments],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for process in processes:
            process.wait(timeout=timeout_s)
    finally:
        for process in processes:
            process.kill()
    said = []
    for log in logs:
        log.seek(0)
        said.append(log.read()[-4000:])
        log.close()
    assert [process.returncode for process in processes] == [0] * world, "\n".join(said)
