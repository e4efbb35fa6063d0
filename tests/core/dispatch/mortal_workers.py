"""Generation workers that kill themselves with SIGKILL when a file requests it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from rl_backends_hf.generation_worker import HFGenerationWorker

FOLDER = "RLCORE_TEST_DEATHS"


def condemn(folder: Path, verb: str, rank: int, times: int = 1) -> None:
    """Make the rank die in its next call of this method, and its successors too, `times` times in total."""
    (folder / f"{verb}-{rank}").write_text(str(times))


def die_if_condemned(verb: str, rank: int) -> None:
    path = Path(os.environ[FOLDER]) / f"{verb}-{rank}"
    if path.exists():
        left = int(path.read_text()) - 1
        if left:
            path.write_text(str(left))
        else:
            path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class MortalWorker(HFGenerationWorker):
    """Dies after the first row of a call has ended, while others are being decoded."""

    def generate(self, data, *, greedy=False):
        if (Path(os.environ[FOLDER]) / f"generate-{self.context.rank}").exists():
            next(iter(self.stream(data, greedy=greedy)))
            die_if_condemned("generate", self.context.rank)
        return super().generate(data, greedy=greedy)

    def setup(self):
        die_if_condemned("setup", self.context.rank)
        facts = super().setup()
        other = Path(os.environ[FOLDER]) / "other-model"
        return {**facts, "vocab_size": 7} if other.exists() else facts

    def process(self):
        return os.getpid()
