"""SFT: supervised fine-tuning on the assistant's messages.

Maximum likelihood with one departure from the usual loop: the loss is a mean over all trained tokens of a global batch,
across ranks and microbatches, so neither accumulation nor data parallelism gives tokens of short rows more weight.

Notation: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.policy import LossFunction, TrainableInterface
from rl_train.algorithms.supervised_configs import SFTConfig
from rl_train.rollouts.trajectory import sample_seed
from rl_train.run import Run
from rl_train.step import next_rows, optimize, validate


def train(config: SFTConfig, run: Run) -> None:
    """Train `run.policy` up to step `config.max_num_steps`, starting after `run.first_step`."""
    validate(run, step=0)
    for step in run.steps():
        optimize(run, next_rows(run))
        validate(run, step)


def train_epochs(
    model: TrainableInterface,
    loss_fn: LossFunction,
    rows: BatchedDataDict[Any],
    *,
    passes: int,
    seed: tuple[int, int],
) -> dict[str, Any]:
    """Train on `rows` for `passes` epochs; each takes the same number of optimizer steps.

    Args:
        model: the model to train, prepared for training.
        loss_fn: the loss.
        rows: the rows of one step.
        passes: number of epochs.
        seed: the run's seed and the step: the order of rows only depends on them and the epoch, so that a resumed run
            shuffles like an uninterrupted one.

    Returns:
        The result of `TrainableInterface.train` over all epochs: means and extremes over optimizer steps, and summed counts.
    """
    results = []
    for number in range(passes):
        draw = torch.Generator().manual_seed(sample_seed(*seed, number))
        results.append(model.train(rows.select_indices(torch.randperm(rows.size, generator=draw)), loss_fn))
    return _merge_results(results, loss_fn)


def _merge_results(results: Sequence[Mapping[str, Any]], loss_fn: LossFunction) -> dict[str, Any]:
    extremes = {"min": min, "max": max}

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    metrics = {}
    for name in results[0]["metrics"]:
        reduce = extremes.get(loss_fn.metric_reductions.get(name, "sum"), mean)
        metrics[name] = reduce([result["metrics"][name] for result in results])
    return {
        "loss": mean([result["loss"] for result in results]),
        "grad_norm": mean([result["grad_norm"] for result in results]),
        "lr": results[-1]["lr"],
        **({"group_lrs": results[-1]["group_lrs"]} if "group_lrs" in results[-1] else {}),
        **{
            name: sum(result[name] for result in results)
            for name in ("num_optimizer_steps", "global_valid_seqs", "global_valid_toks")
        },
        **_computed_lengths(results),
        "skipped_valid_toks": sum(result.get("skipped_valid_toks", 0) for result in results),
        "metrics": metrics,
    }


def _computed_lengths(results: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """The lengths of all computed rows; nothing if a model does not report them."""
    if any("computed_lengths" not in result for result in results):
        return {}
    return {"computed_lengths": [length for result in results for length in result["computed_lengths"]]}
