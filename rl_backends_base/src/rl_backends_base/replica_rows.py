"""Rows and refits of an engine's replicas, and the rows that a training step computes.

Rows of a call are checked, reduced to the columns that workers read, placed on replicas by prompt, and put back in order.
Training drops rows without a gradient before rows are sharded: the remaining work is spread over all ranks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rl_core.cluster.worker_group import WorkerGroup
from rl_core.config.schema import DeadlineConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.images import prompt_identity
from rl_core.dispatch.facades import ReplicaRefits, equal_answer
from rl_core.dispatch.rows import ROW_KEYS, global_counts, padding_rows, select_columns
from rl_core.errors import BrokenPromiseError, NonFiniteError, WorkerDiedError
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationOutputSpec
from rl_core.interfaces.policy import LossFunction
from rl_core.interfaces.worker import GlobalCounts, StepResult

_log = logging.getLogger(__name__)


def generate_on(
    group: WorkerGroup, data: BatchedDataDict[Any], *, greedy: bool, deadline_s: float, ranks: Sequence[int] | None = None
) -> BatchedDataDict[GenerationOutputSpec]:
    """Split the rows over `ranks` of `group` (all by default), sample, and return the outputs in the order of `data`.

    Raises:
        WorkerDiedError: a rank died.
    """
    rows = prompt_columns(data)
    answers, deaths = sample_rows(group, rows, list(range(rows.size)), greedy=greedy, deadline_s=deadline_s, ranks=ranks)
    if deaths:
        raise deaths[0]
    return in_row_order(answers)


Answer = tuple[list[int], BatchedDataDict[Any]]
"""Row indices, and one replica's output for them."""


def prompt_columns(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """The columns that a replica samples from."""
    return select_columns(data, [key for key in ROW_KEYS if key in data or key == "input_ids" or key == "input_lengths"])


def sample_rows(
    group: WorkerGroup,
    rows: BatchedDataDict[Any],
    wanted: list[int],
    *,
    greedy: bool,
    deadline_s: float,
    ranks: Sequence[int] | None = None,
) -> tuple[list[Answer], list[WorkerDiedError]]:
    """The outputs of the `wanted` rows, spread over `ranks` (all by default), and an error for each rank that died."""
    ranks = range(group.world_size) if ranks is None else ranks
    prompts = prompt_keys(rows.select_indices(wanted))
    parts = [[wanted[row] for row in part] for part in split_by_prompt(prompts, len(ranks))]
    shards = {rank: (rows.select_indices(part),) for rank, part in zip(ranks, parts, strict=False)}
    outcomes = group.submit_some("generate", shards, greedy=greedy).settle(deadline_s)
    deaths = [outcome for outcome in outcomes if isinstance(outcome, WorkerDiedError)]
    answers = [(part, o) for part, o in zip(parts, outcomes, strict=True) if not isinstance(o, WorkerDiedError)]
    return answers, deaths


def newest_version(answers: Sequence[Answer]) -> list[Answer]:
    """The answers sampled with the newest weights: the policy may have been updated between a death and the next refit."""
    newest = max((int(output["weight_version"].max()) for _, output in answers), default=-1)
    kept = [answer for answer in answers if bool((answer[1]["weight_version"] == newest).all())]
    if len(kept) < len(answers):
        _log.warning("answers sampled before weight version %d are dropped: the rows of a call must have one version", newest)
    return kept


def in_row_order(answers: Sequence[Answer]) -> BatchedDataDict[GenerationOutputSpec]:
    """All outputs in the order of the rows."""
    output: BatchedDataDict[Any] = BatchedDataDict.from_batches([answer for _, answer in answers])
    output.reorder_data([row for part, _ in answers for row in part])
    return output


_MAX_SESSIONS: Final = 100_000
"""Number of sessions whose replica is remembered if callers do not close them."""

PromptKey = int | bytes | tuple[Any, ...]


def prompt_keys(rows: BatchedDataDict[Any]) -> list[PromptKey]:
    """The identity of each row's prompt: its `prompt_id`, or its tokens and images if the batch has no such column."""
    if "prompt_id" in rows:
        return list(rows["prompt_id"].tolist())
    ids, lengths = rows["input_ids"], rows["input_lengths"]
    tokens = [ids[row, : int(lengths[row])].numpy().tobytes() for row in range(rows.size)]
    if "images" not in rows:
        return [*tokens]
    return [(each, *prompt_identity(images)) for each, images in zip(tokens, rows["images"], strict=True)]


def split_by_prompt(prompts: Iterable[PromptKey], num_shards: int) -> list[list[int]]:
    """Row indices of at most `num_shards` non-empty shards of similar size; rows with equal keys are in one shard."""
    groups: dict[PromptKey, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)
    parts: list[list[int]] = [[] for _ in range(num_shards)]
    for members in sorted(groups.values(), key=len, reverse=True):
        min(parts, key=len).extend(members)
    return [part for part in parts if part]


class ReplicaAffinity:
    """A row goes to the replica of its session, else of rows in progress with the same prompt, else to the least loaded one.

    Args:
        replicas: number of replicas.
    """

    def __init__(self, replicas: int) -> None:
        self._rows: dict[str, tuple[int, PromptKey]] = {}
        self._prompts: list[Counter[PromptKey]] = [Counter() for _ in range(replicas)]
        self._sessions: dict[str, int] = {}
        self.excluded: set[int] = set()
        """Replicas that get no more rows, unless all are excluded."""

    @property
    def load(self) -> list[int]:
        """Number of rows in progress on each replica."""
        return [prompts.total() for prompts in self._prompts]

    def assign(self, name: str, row: BatchedDataDict[Any]) -> int:
        """Choose the replica for a row (a batch of one), which counts as in progress there until `release`."""
        [prompt] = prompt_keys(row)
        session = row["session_ids"][0] if "session_ids" in row else None
        rank = self._sessions.pop(session, None) if session is not None else None
        if rank is None or rank in self.excluded:
            rank = next((rank for rank, prompts in enumerate(self._prompts) if prompt in prompts), None)
        if rank is None:
            load = self.load
            rank = min(range(len(load)), key=lambda one: (one in self.excluded, load[one]))
        if session is not None:
            self._sessions[session] = rank  # now the most recently used one
            if len(self._sessions) > _MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        self._rows[name] = (rank, prompt)
        self._prompts[rank][prompt] += 1
        return rank

    def release(self, name: str) -> None:
        """Release a row's slot on its replica."""
        rank, prompt = self._rows.pop(name)
        self._prompts[rank][prompt] -= 1
        if self._prompts[rank][prompt] == 0:
            del self._prompts[rank][prompt]

    def close(self, session: str) -> int | None:
        """Forget a session; returns its replica, if it had one."""
        return self._sessions.pop(session, None)


@dataclass(frozen=True, kw_only=True)
class TrainingRows:
    """The rows to compute, and what they stand for.

    Attributes:
        rows: the rows of all optimizer steps, in order.
        rows_per_step: number of rows of each optimizer step.
        counts: normalizing counts of each optimizer step, including the rows that are not computed.
        computed_toks: number of trained tokens in `rows`, by optimizer step.
    """

    rows: BatchedDataDict[Any]
    rows_per_step: int
    counts: list[GlobalCounts]
    computed_toks: list[float]

    @classmethod
    def all_of(cls, rows: BatchedDataDict[Any], rows_per_step: int) -> TrainingRows:
        """Train on all `rows`, with the counts of each optimizer step."""
        counts = global_counts(rows, rows_per_step)
        return cls(rows=rows, rows_per_step=rows_per_step, counts=counts, computed_toks=[count.valid_toks for count in counts])

    def with_gradient(self, loss_fn: LossFunction, *, multiple_of: int) -> TrainingRows:
        """The rows that must be computed: those with a gradient under `loss_fn`, which may declare others as unneeded.

        Every optimizer step keeps as many rows as the one that needs the most; the others are filled with padding rows. A step
        in which no row has a gradient still computes one unit, for the loss's metrics: its gradient is zero, and the optimizer
        takes the step.

        Args:
            loss_fn: the loss; see `LossFunction.rows_with_gradient`.
            multiple_of: data-parallel ranks times the rows that stay together.
        """
        needed = loss_fn.rows_with_gradient(self.rows)
        if needed is None:
            return self
        unit = loss_fn.rows_per_unit
        needed = needed.view(-1, unit).any(dim=1).repeat_interleave(unit)
        for start in range(0, len(needed), self.rows_per_step):
            if not needed[start : start + self.rows_per_step].any():
                first = start + self._first_trained(start) // unit * unit
                needed[first : first + unit] = True
        by_step = [part.nonzero().flatten() for part in needed.split(self.rows_per_step)]
        most = max(len(part) for part in by_step)
        rows_per_step = max(-(-most // multiple_of), 1) * multiple_of
        if rows_per_step >= self.rows_per_step:
            return self
        kept = []
        for step, part in enumerate(by_step):
            first = step * self.rows_per_step
            kept += [self.rows.select_indices(part + first), padding_rows(self.rows, first, rows_per_step - len(part))]
        rows: BatchedDataDict[Any] = BatchedDataDict.from_batches([each for each in kept if each.size])
        computed = [count.valid_toks for count in global_counts(rows, rows_per_step)]
        return TrainingRows(rows=rows, rows_per_step=rows_per_step, counts=self.counts, computed_toks=computed)

    def _first_trained(self, start: int) -> int:
        """Offset of the first row with trained tokens in the optimizer step that starts at row `start`; 0 if there is none."""
        step = self.rows.slice(start, start + self.rows_per_step)
        trained = ((step["token_mask"] > 0) & (step["sample_mask"] > 0).unsqueeze(-1)).any(dim=-1)
        return int(trained.int().argmax())

    def combine(self, results: Sequence[Sequence[StepResult]], loss_fn: LossFunction) -> dict[str, Any]:
        """The result of `TrainableInterface.train`: shares of each rank summed, then averaged over optimizer steps.

        Raises:
            NonFiniteError: a loss is NaN.
            BrokenPromiseError: a rank took another number of steps.
        """
        for rank, shares in enumerate(results):
            if len(shares) != len(self.counts):
                raise BrokenPromiseError(
                    f"`train` of the worker of data rank {rank} returned {len(shares)} results for {len(self.counts)} "
                    "optimizer steps: it must take one step for each of `counts` and return its result."
                )
        steps = [list(step) for step in zip(*results, strict=True)]
        losses = [sum(share.loss for share in step) for step in steps]
        for step, loss in enumerate(losses):
            if loss != loss:
                raise NonFiniteError(f"The loss of optimizer step {step + 1} of {len(losses)} is NaN.")
        return {
            "loss": sum(losses) / len(losses),
            "grad_norm": sum(step[0].grad_norm for step in steps) / len(steps),
            "lr": steps[-1][0].lr,
            "group_lrs": dict(steps[-1][0].group_lrs),
            "num_optimizer_steps": len(steps),
            "global_valid_seqs": sum(count.valid_seqs for count in self.counts),
            "global_valid_toks": sum(count.valid_toks for count in self.counts),
            "computed_lengths": self.rows["input_lengths"].tolist(),
            "skipped_valid_toks": sum(count.valid_toks for count in self.counts) - sum(self.computed_toks),
            "metrics": self._metrics(steps, loss_fn),
        }

    def _metrics(self, steps: Sequence[Sequence[StepResult]], loss_fn: LossFunction) -> dict[str, float]:
        """Means and extremes over the optimizer steps."""
        metrics: dict[str, float] = {}
        for name in steps[0][0].metrics:
            how = loss_fn.metric_reductions.get(name, "sum")
            shares = [[share.metrics[name] for share in step] for step in steps]
            if how in ("min", "max"):
                extreme = min if how == "min" else max
                metrics[name] = extreme(extreme(step) for step in shares)
                continue
            sums = [sum(step) for step in shares]
            if how == "token_mean":
                # The loss divided by the count of all tokens.
                pairs = zip(self.counts, self.computed_toks, strict=True)
                sums = [share * (count.valid_toks / max(done, 1.0)) for share, (count, done) in zip(sums, pairs, strict=True)]
            metrics[name] = sum(sums) / len(sums)
        return metrics


class RestartedReplicas(ReplicaRefits):
    """The replicas of an engine that were restarted and have no weights; only for their refit.

    No other replica is called, so rows in progress there continue. A death is raised to the owner of weight synchronization,
    which restarts the replica.

    Args:
        group: all replicas.
        ranks: the restarted ones.
        processes: number of processes that load weights, per replica.
        restarts: number of workers of the engine restarted so far.
        deadlines: timeouts by kind of call.
    """

    def __init__(
        self, group: WorkerGroup, ranks: Sequence[int], *, processes: int, restarts: int, deadlines: DeadlineConfig
    ) -> None:
        self._group, self.ranks, self._processes = group, list(ranks), processes
        self._restarts, self._deadlines = restarts, deadlines

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every row of `data` with the restarted replicas, for the canary.

        Raises:
            WorkerDiedError: a replica died.
        """
        return generate_on(self._group, data, greedy=greedy, deadline_s=self._deadlines.generate_s, ranks=self.ranks)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._run("prepare_for_generation")
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._run("finish_generation")
        return True

    @property
    def num_workers(self) -> int:
        return len(self.ranks) * self._processes

    @property
    def restarts(self) -> int:
        return self._restarts

    @property
    def weight_version(self) -> int:
        return int(equal_answer(self._run("get_weight_version"), "get_weight_version"))

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        # A replica counts the processes of all replicas before it, of which only those of restarted ones join.
        left_out = {rank: (rank - index) * self._processes for index, rank in enumerate(self.ranks)}
        calls = {rank: (ip, port, world_size, number) for rank, number in left_out.items()}
        return [self._group.submit_some("init_collective", calls)]

    def update_weights_from_collective(self) -> list[Any]:
        return [self._group.submit_some("update_weights_from_collective", dict.fromkeys(self.ranks, ()))]

    def _run(self, method: str, *args: Any) -> list[Any]:
        calls = self._group.submit_some(method, dict.fromkeys(self.ranks, args), deadline_s=self._deadlines.refit_s)
        return list(calls.result())
