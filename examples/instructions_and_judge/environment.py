"""Instructions that a program checks and a judge that reads the answer: an answer needs both.

The keywords alone, or one letter a hundred times, follow many instructions. The judge scores what the program cannot check, and
only sees answers that follow the instructions, so no request is spent on others.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_envs import InstructionFollowingEnvironment, JudgeEnvironment


class InstructionsAndJudge(EnvironmentInterface):
    """Rewards an answer that follows all instructions of its row with the judge's score, from 0.0 to 1.0, and others with 0.0.

    Args:
        config: the settings of `env.judge`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._instructions = InstructionFollowingEnvironment()
        self._judge = JudgeEnvironment(config)

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        """Check B answers, and send those that follow their instructions to the judge."""
        checked = self._instructions.step(message_log_batch, metadata)
        assert isinstance(checked.rewards, torch.Tensor)
        assert checked.scored is not None
        rows = (checked.rewards * checked.scored).nonzero().flatten().tolist()
        judged = self._judge.step([message_log_batch[row] for row in rows], [checked.metadata[row] for row in rows])
        assert isinstance(judged.rewards, torch.Tensor)
        assert judged.scored is not None
        rewards, scored, updated = torch.zeros(len(metadata)), checked.scored.clone(), list(checked.metadata)
        rewards[rows], scored[rows] = judged.rewards, judged.scored
        for row, info in zip(rows, judged.metadata, strict=True):
            updated[row] = info
        return checked._replace(rewards=rewards, scored=scored, metadata=updated)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float | int]]:
        """`accuracy` (all instructions followed) and `instruction_accuracy`; the judge's scores are the reward."""
        return self._instructions.global_post_process_and_metrics(batch)

    def shutdown(self) -> None:
        self._judge.shutdown()
