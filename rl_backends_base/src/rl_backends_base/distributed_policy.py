"""A policy over the ranks of a worker group: shards rows, dispatches calls and restores the order of results."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from rl_backends_base.replica_rows import TrainingRows, generate_on
from rl_core.config.policy_sections import rows_per_optimizer_step
from rl_core.config.schema import PolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import SETS, image_column
from rl_core.data.shared_prefix import MAX_SHARE, computed_tokens, prefix_groups, right_padded
from rl_core.dispatch.facades import PolicyFacade
from rl_core.dispatch.rows import check_rows, pad_rows_to_multiple, select_columns
from rl_core.dispatch.text_generation import TextGeneration
from rl_core.errors import DataError, NonFiniteError, NotSupportedError, WorkerError
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationOutputSpec
from rl_core.interfaces.policy import (
    LogprobOutputSpec,
    LossFunction,
    ReferenceLogprobOutputSpec,
    TopkLogprobOutputSpec,
    ValueOutputSpec,
)
from rl_core.interfaces.worker import StepResult

SCORING_KEYS = ("input_ids", "input_lengths")
PROMPT = "prompt_id"
TRAINING_KEYS = (*SCORING_KEYS, "token_mask", "sample_mask")
_log = logging.getLogger(__name__)


class DistributedPolicy(PolicyFacade, TextGeneration):
    """A group of `PolicyWorker`s as one policy or, with `head: scalar`, as one value model.

    Rows are split over the `data` axis of `sharding` and replicated over its other axes. Loading starts in the constructor
    and is awaited at the first use, so that several groups load at the same time.

    Arguments as `WorkerFacade`; `config` is the section `policy`.
    """

    def get_logprobs(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[LogprobOutputSpec]:
        return self._score(data, "get_logprobs", reference=False)

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec]
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        return BatchedDataDict({"reference_logprobs": self._score(data, "get_logprobs", reference=True)["logprobs"]})

    def get_topk_logprobs(self, data: BatchedDataDict[GenerationDatumSpec], k: int) -> BatchedDataDict[TopkLogprobOutputSpec]:
        self._require_head("tokens")
        vocab_size = self.config.vocab_size or self.facts.get("vocab_size", k)
        if not 1 <= k <= vocab_size:
            raise DataError(
                f"The {k} most likely tokens of {self.config.model_name} were requested, but its vocabulary has {vocab_size}: "
                f"use 1 to {vocab_size} (`loss_fn.topk`)."
            )
        return self._score(data, "get_topk_logprobs", k=k)

    def get_values(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[ValueOutputSpec]:
        return self._score(data, "get_values", head="scalar")

    def _reject_unknown_tokens(self, candidates: torch.Tensor, key: str) -> None:
        """Checked before any rank starts, because ranks would wait for one that fails alone."""
        self._require_head("tokens")
        vocab_size = self.facts["vocab_size"]
        outside = candidates[(candidates < 0) | (candidates >= vocab_size)]
        if outside.numel():
            raise DataError(
                f"`{key}` contains token id {int(outside[0])}, outside the {vocab_size} tokens of {self.config.model_name}: "
                "the model that chose the candidates has a larger vocabulary. Set `vocab_size` in its section to "
                f"{vocab_size}, if the other ids are unused."
            )

    def _require_head(self, head: str) -> None:
        if self.config.head != head:
            own = {
                "scalar": "a scalar head (`head: scalar`), which does not score tokens",
                "tokens": "a language-model head, not a scalar head",
            }
            raise NotSupportedError(f"{self.config.model_name} has {own[self.config.head]}: set `head: {head}` in its section.")

    def _score(self, data: BatchedDataDict[Any], method: str, *, head: str = "tokens", **kwargs: Any) -> BatchedDataDict[Any]:
        """The ranks' results, in the order and width of `data`."""
        self._require_head(head)
        self.wait_ready()
        sets = {SETS} & data.keys() if method == "get_logprobs" else ()
        keys = (*SCORING_KEYS, *sets, *self._sharing.columns(data), *self._image_columns(data))
        rows = select_columns(data, keys)
        shards, order = self._shards(pad_rows_to_multiple(rows, self.data_ranks), None, training=False)
        results = self.group.run_sharded(method, shards, deadline_s=self._deadlines.train_s, **kwargs)
        for shard, result in zip(shards, results, strict=True):
            check_rows(result, method.removeprefix("get_"), shard.size)
        scored: BatchedDataDict[Any] = BatchedDataDict.from_batches(results)
        if order is not None:
            scored.reorder_data(order)
        width = rows["input_ids"].shape[1]
        return BatchedDataDict({name: right_padded(column, width)[: data.size] for name, column in scored.items()})

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        *,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        if not isinstance(loss_fn, LossFunction):
            raise DataError(
                f"The second argument of train must be a loss, such as GRPOLossFn(): found {type(loss_fn).__name__}. "
                "Rewards reach a loss as the column `advantages` of the batch."
            )
        self.wait_ready()
        candidates = {loss_fn.candidates_key} if loss_fn.candidates_key is not None else set()
        optional = loss_fn.optional_keys | ({SETS} if self.config.head == "tokens" else set())
        read = loss_fn.required_keys | (optional & data.keys()) | candidates
        shared = self._sharing.columns(data, loss_fn)
        rows = select_columns(data, (*TRAINING_KEYS, *sorted(read | {*shared, *self._image_columns(data)})))
        for key in candidates:
            self._reject_unknown_tokens(rows[key], key)
        gbs, unit = gbs or self.config.train_global_batch_size or rows.size, loss_fn.rows_per_unit
        if rows.size % unit or gbs % unit:
            raise DataError(
                f"{loss_fn.label} reads {unit} rows together, but the batch has {rows.size} rows, and an optimizer "
                f"step {gbs}. Make both multiples of {unit}."
            )
        rows_per_step = rows_per_optimizer_step(rows.size, batch_size=gbs, multiple_of=self.data_ranks * unit)
        rows = pad_rows_to_multiple(rows, rows_per_step)
        chosen = TrainingRows.all_of(rows, rows_per_step)
        if not eval_mode:
            chosen = chosen.with_gradient(loss_fn, multiple_of=self.data_ranks * unit)
        if unit > 1:
            mbs = max((mbs or self.config.train_micro_batch_size) // unit, 1) * unit
        shards, _ = self._shards(chosen.rows, chosen.rows_per_step, training=True, rows_per_unit=unit, mbs=mbs)
        try:
            results: list[list[StepResult]] = self.group.run_sharded(
                "train", shards, loss_fn, counts=chosen.counts, eval_mode=eval_mode, mbs=mbs, deadline_s=self._deadlines.train_s
            )
        except WorkerError as error:
            if isinstance(error.__cause__, NonFiniteError):
                raise NonFiniteError(str(error)) from error
            raise
        return chosen.combine(results, loss_fn)

    def _image_columns(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        """The column `images`, if a row has some; NotSupportedError if the model reads none."""
        reads = bool(self.facts.get("images"))
        return () if image_column(data, reads_images=reads, reader=f"The {self._name}") is None else ("images",)

    @cached_property
    def _sharing(self) -> PrefixSharing:
        return PrefixSharing(self.config, self.facts, name=self._name)

    def _refuse_ids_without_rows(self, rows: BatchedDataDict[Any]) -> None:
        vocab_size = self.facts.get("vocab_size")
        if vocab_size is not None and rows.size and (largest := int(rows["input_ids"].max())) >= vocab_size:
            raise DataError(
                f"The batch has token id {largest}, but the embedding of {self.config.model_name} has rows for ids 0 to "
                f"{vocab_size - 1}. Tokenize with the model's own tokenizer. If you already do, drop the rows with this token."
            )

    def _shards(
        self,
        rows: BatchedDataDict[Any],
        batch_size: int | None,
        *,
        training: bool,
        rows_per_unit: int = 1,
        mbs: int | None = None,
    ) -> tuple[Sequence[BatchedDataDict[Any]], list[int] | None]:
        """Split `rows` over the data axis, with the microbatch plan of the config, and the order of rows if it has changed."""
        packing, dynamic = self.config.sequence_packing, self.config.dynamic_batching
        plan: dict[str, Any] = {}
        limit = self.config.microbatch_limit(training=training)[1]
        common = {"max_tokens_per_microbatch": limit, "input_key": "input_ids", "input_lengths_key": "input_lengths"}
        if packing.enabled:
            own = {"algorithm": packing.algorithm, "sequence_length_pad_multiple": packing.sequence_length_pad_multiple}
            plan["sequence_packing_args"] = common | own
        elif dynamic.enabled:
            plan["dynamic_batching_args"] = common | {"sequence_length_round": dynamic.sequence_length_round}
        fixed = (mbs or self.config.train_micro_batch_size) if training else self.config.logprob_batch_size
        rows = self._sharing.select(rows, rows_per_microbatch=None if plan else fixed)
        if PROMPT in rows:
            plan["keep_together"] = PROMPT
        self._refuse_ids_without_rows(rows)
        sharded: Any = rows.shard_by_batch_size(self.data_ranks, batch_size=batch_size, rows_per_unit=rows_per_unit, **plan)
        return sharded if plan else (sharded, None)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        self.wait_ready()
        if (output := self._generate_messages(data, greedy)) is not None:
            return output
        return generate_on(self.group, data, greedy=greedy, deadline_s=self._deadlines.generate_s)


class PrefixSharing:
    """Decides whether rows share the computation of their prompts' prefixes, and logs each decision once.

    By the config, the workers' model (`facts` of `setup`) and the numbers of tokens.
    """

    def __init__(self, config: PolicyConfig, facts: Mapping[str, Any], *, name: str) -> None:
        self._name = name
        self._logged: set[bool] = set()
        self.enabled = config.shared_prefix != "off" and bool(facts.get("shared_prefix", False))
        self._reason = "`shared_prefix` is off"
        if config.shared_prefix != "off":
            self._reason = facts.get("shared_prefix_reason", "the backend does not support it")

    def columns(self, data: Mapping[str, Any], loss_fn: LossFunction | None = None) -> tuple[str, ...]:
        """The column of prompt ids, if `data` has it and the workers, and in training the loss, can use it."""
        if PROMPT not in data:
            return ()
        reason = None if self.enabled else self._reason
        if reason is None and loss_fn is not None and loss_fn.allows_dropout:
            reason = f"{loss_fn.label} allows dropout, and rows would share the dropped elements of their prefix"
        if reason is not None:
            self._log_once(False, reason)
        return (PROMPT,) if reason is None else ()

    def select(self, rows: BatchedDataDict[Any], *, rows_per_microbatch: int | None) -> BatchedDataDict[Any]:
        """`rows`, without prompt ids if sharing would not leave at most `MAX_SHARE` of the tokens to compute.

        Args:
            rows: rows with `input_ids` and `input_lengths`.
            rows_per_microbatch: rows that are computed together, if microbatches have a fixed number of rows.
        """
        if PROMPT not in rows:
            return rows
        lengths = rows["input_lengths"].to("cpu", torch.int64)
        order = torch.argsort(rows[PROMPT], stable=True)
        ids = torch.unique_consecutive(rows[PROMPT][order], return_inverse=True)[1]
        if rows_per_microbatch is not None:
            ids = ids * len(order) + torch.arange(len(order)) // rows_per_microbatch
        groups = prefix_groups(rows["input_ids"][order], lengths[order], ids)
        alone, shared = int(lengths.sum()), computed_tokens(groups, lengths[order].tolist())
        worthwhile = shared <= MAX_SHARE * alone
        counts = f"{shared} instead of {alone} tokens to compute in this batch"
        self._log_once(worthwhile, f"{self._reason}; {counts}" if worthwhile else f"{counts}, which is not worthwhile")
        return rows if worthwhile else BatchedDataDict({key: rows[key] for key in rows if key != PROMPT})

    def _log_once(self, is_shared: bool, why: str) -> None:
        if is_shared not in self._logged:
            self._logged.add(is_shared)
            how = "are computed as one sequence with a shared prefix" if is_shared else "are computed separately"
            _log.info("%s: rows with the same prompt %s: %s.", self._name, how, why)
