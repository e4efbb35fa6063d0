"""Starts one process per rank of a program and waits for all of them or for the first failure."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def run_ranks(program: str, world: int, models: Path, out: Path, names: Sequence[str]) -> None:
    """Run `program` of this folder as `world` ranks; if one fails, raises with their output.

    How long they may take is the business of the test's own time limit.
    """
    path = str(Path(__file__).with_name(program))
    arguments = [str(models), str(out), ",".join(names)]
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
        # The others would wait for a rank that is gone.
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = []
    for log in logs:
        log.seek(0)
        said.append(log.read()[-4000:])
        log.close()
    assert codes == [0] * world, "\n".join(said)
