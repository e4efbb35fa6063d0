"""SFT: supervised fine-tuning on the assistant's messages.

Maximum likelihood with one departure from the usual loop: the loss is a mean over all trained tokens of a global batch,
across ranks and microbatches, so neither accumulation nor data parallelism gives tokens of short rows more weight.

Notation: B rows, T tokens.
"""

from __future__ import annotations

from rl_train.algorithms.sft_config import SFTConfig
from rl_train.algorithms.validation import validate
from rl_train.run import Run


def train(config: SFTConfig, run: Run) -> None:
    """Train `run.policy` up to step `config.max_num_steps`, starting after `run.first_step`."""
    assert run.batches is not None
    validate(run, step=0)
    for step in run.steps():
        with run.timed("data"):
            batch = run.batches.next_batch()

        with run.timed("train"):
            run.policy.prepare_for_training()
            run.record_training(run.policy.train(batch, run.loss_fn), batch)
            run.policy.finish_training()

        validate(run, step)
