"""Checks that an engine respects its length limit, with prompts just below it and one that leaves no space for a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DeadlineExceededError, RLCoreError, WorkerDiedError
from rl_core.interfaces.generation import GenerationInterface
from rl_train.diagnostics.diagnosis import Diagnosis, DiagnosisStatus

NAME = "length_limit"
_ROOM = (1, 2, 4, 8)
"""Number of tokens left for the completion of each row."""
_WHY = (
    "Rows longer than the limit have positions beyond those the model was trained on, need more memory than planned, and "
    "cannot be scored by the policy."
)


def check_length_limit(generation: GenerationInterface, prompts: Sequence[torch.Tensor], *, limit: int) -> Diagnosis:
    """Check that rows that start a few tokens below `limit` do not exceed it, and that a prompt of `limit` tokens is refused.

    Args:
        generation: the engine.
        prompts: token ids [T] each; repeated until they are long enough.
        limit: maximum number of tokens of prompt and completion (`max_model_len`).
    """
    rooms = [room for room in _ROOM if room < limit]
    rows = [_of_length(prompts[number % len(prompts)], limit - room) for number, room in enumerate(rooms)]
    generation.prepare_for_generation()
    try:
        output = generation.generate(_batch(rows), greedy=False)
        accepts = _accepts(generation, _of_length(prompts[0], limit))
    finally:
        generation.finish_generation()
    problems = [problem for row in range(len(rows)) if (problem := _problem(output, row, rows[row], limit))]
    if accepts:
        problems.append(f"a prompt of {limit} tokens, which leaves no space for a completion, was accepted")
    longest = int(output["unpadded_sequence_lengths"].max())
    reached = int(((output["unpadded_sequence_lengths"] == limit) & output["truncated"]).sum())
    details = {"limit": limit, "longest_row": longest, "rows_cut_at_the_limit": reached, "problems": problems}
    if problems:
        return Diagnosis(
            name=NAME,
            status=DiagnosisStatus.FAILED,
            found=f"the engine violates the limit of {limit} tokens: " + "; ".join(problems),
            why=_WHY,
            remedy="Set the limit in the engine's section (max_model_len), or lower policy.max_total_sequence_length.",
            details=details,
        )
    if not reached:
        return Diagnosis(
            name=NAME,
            status=DiagnosisStatus.WARNING,
            found=f"all {len(rows)} rows ended before the limit of {limit} tokens, so the limit was not tested",
            why=_WHY,
            remedy="Repeat the check with other prompts (--num-prompts) or a higher temperature.",
            details=details,
        )
    return Diagnosis(
        name=NAME,
        status=DiagnosisStatus.OK,
        found=f"{reached} of {len(rows)} rows were truncated at the limit of {limit} tokens, and none is longer; a prompt of "
        "that length is refused",
        details=details,
    )


def _of_length(prompt: torch.Tensor, length: int) -> torch.Tensor:
    return prompt.repeat(-(-length // len(prompt)))[:length]


def _batch(rows: Sequence[torch.Tensor]) -> BatchedDataDict[Any]:
    return BatchedDataDict(
        {
            "input_ids": torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True),
            "input_lengths": torch.tensor([len(row) for row in rows]),
            "sample_seeds": torch.arange(len(rows)),
        }
    )


def _accepts(generation: GenerationInterface, prompt: torch.Tensor) -> bool:
    try:
        generation.generate(_batch([prompt]), greedy=False)
    except (WorkerDiedError, DeadlineExceededError):
        raise
    except (RLCoreError, ValueError):
        return False
    return True


def _problem(output: BatchedDataDict[Any], row: int, prompt: torch.Tensor, limit: int) -> str | None:
    length, sampled = int(output["unpadded_sequence_lengths"][row]), int(output["generation_lengths"][row])
    if length > limit:
        return f"a prompt of {len(prompt)} tokens became a row of {length}"
    if length - sampled != len(prompt) or not torch.equal(output["output_ids"][row, : len(prompt)], prompt):
        return f"a prompt of {len(prompt)} tokens was returned changed, with {length - sampled} tokens"
    if not sampled:
        return f"a prompt of {len(prompt)} tokens got no completion, although {limit - len(prompt)} tokens were left"
    return None
