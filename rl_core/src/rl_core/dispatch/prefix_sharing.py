"""Decides whether the rows of a batch share the computation of their prompts' prefixes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from rl_core.config.schema import PolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.shared_prefix import MAX_SHARE, computed_tokens, prefix_groups
from rl_core.interfaces.loss import LossFunction

PROMPT = "prompt_id"
_log = logging.getLogger(__name__)


class PrefixSharing:
    """Decides by the config, the workers' model (`facts` of `setup`) and the numbers of tokens; logs each decision once."""

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
