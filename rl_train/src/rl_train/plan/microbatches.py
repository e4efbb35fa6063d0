"""The largest microbatches of a run, as its config describes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rl_core.config.policy_sections import rows_per_optimizer_step
from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.data.shared_prefix import MAX_SHARE
from rl_train.config.schema import RunConfig


def ranks_of(run: RunConfig) -> int:
    """Number of ranks of each model."""
    cluster = run.cluster
    return 1 if cluster.backend == "in_process" else cluster.num_nodes * cluster.workers_per_node


def replicas_of(run: RunConfig, section: GenerationConfig, *, processes: int) -> int:
    """Number of replicas of the engine, of `processes` processes each."""
    if section.num_workers is not None:
        return section.num_workers
    own = section.resources
    workers = ranks_of(run) if own is None else own.num_nodes * own.workers_per_node
    return max(1, workers // processes)


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Rows of one pass, all of the largest possible length.

    Attributes:
        rows: Number of rows, at least 1.
        length: Their length in tokens.
        several: Whether an optimizer step has more than one.
    """

    rows: int
    length: int
    several: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and length."""
        return self.rows, self.length


def rows_of_step(run: RunConfig) -> int:
    """Number of rows of a step over all ranks; of preference pairs, both rows count."""
    needs = run.algorithm.runtime_needs
    if needs.rollouts is not None:
        return needs.rollouts.rows_per_draw
    if needs.records is not None:
        return needs.records.records_per_step * (2 if needs.records.pairs else 1)
    return 1


def longest_prompt(run: RunConfig) -> int:
    """Length in tokens of the longest prompt whose completion can still have all of its new tokens; at least 1."""
    generation = run.policy.generation
    new_tokens = 0 if generation is None else generation.max_new_tokens
    return max(1, run.policy.max_total_sequence_length - new_tokens)


def microbatch(run: RunConfig, model: PolicyConfig, *, training: bool) -> Microbatch:
    """The largest microbatch of a model on one rank; with `sequence_packing`, one row of the token budget."""
    length, ranks = min(run.policy.max_total_sequence_length, model.max_total_sequence_length), model.data_ranks(run.cluster)
    rows = rows_of_step(run)
    if training:
        rows = rows_per_optimizer_step(rows, batch_size=model.train_global_batch_size, multiple_of=1)
    on_rank = max(1, -(-rows // ranks))
    _, limit, _ = model.microbatch_limit(training=training)
    if model.sequence_packing.enabled:
        tokens = min(limit, on_rank * length)
        return Microbatch(rows=1, length=tokens, several=on_rank * length > tokens)
    together = max(1, limit // length) if model.dynamic_batching.enabled else limit
    return Microbatch(rows=min(together, on_rank), length=length, several=on_rank > together)


def with_shared_prefixes(run: RunConfig, batch: Microbatch) -> Microbatch:
    """The largest microbatch if rows of the same prompt compute it once; such rows become one sequence.

    All completions have the maximum length. The prompt is the longest one, or the longest one with which sharing is not
    worthwhile, whichever has more tokens to compute.
    """
    rollouts = run.algorithm.runtime_needs.rollouts
    prompt = min(longest_prompt(run), batch.length)
    completion = batch.length - prompt
    if rollouts is None or batch.rows == 1:
        return batch
    prompts = -(-batch.rows // min(batch.rows, rollouts.samples_per_prompt))
    saved = MAX_SHARE * batch.rows - prompts
    alone = prompt
    if saved > 0:
        alone = min(prompt, int((1 - MAX_SHARE) * batch.rows * completion / saved))
    together = prompts * prompt + batch.rows * completion
    if alone == prompt or batch.rows * (alone + completion) >= together:
        return replace(batch, length=alone + completion)
    return replace(batch, rows=1, length=together)


def prompts_in(run: RunConfig, batch: Microbatch) -> int:
    """Number of different prompts in a microbatch, whose rows are in the order of their groups."""
    needs, rows = run.algorithm.runtime_needs, max(batch.rows, batch.length // run.policy.max_total_sequence_length)
    together = 2 if needs.records is not None and needs.records.pairs else 1
    return -(-rows // (needs.rollouts.samples_per_prompt if needs.rollouts is not None else together))
