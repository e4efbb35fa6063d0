"""Rows of models that keep more than keys and values, such as recurrent states, in Transformers' own cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel

from rl_backends_base import Row
from rl_backends_hf.sampling.prefill import PrefillPlan, PromptScorer, prefill
from rl_backends_hf.sampling.rows import group_by_prompt
from rl_backends_hf.torch_internals import tree_map
from rl_backends_hf.transformers_internals import cache_keyword
from rl_core.data.batched_data_dict import to_device

_PADDED: Final = ("keys", "values")


@dataclass(kw_only=True)
class Cohort:
    """Rows and the model's cache, whose rows are in the same order; keys and values of shorter rows are padded on the left."""

    rows: list[Row]
    cache: DynamicCache

    def keep(self, staying: set[Row]) -> None:
        """Drop the other rows, and columns that only they had."""
        kept = [number for number, row in enumerate(self.rows) if row in staying]
        if kept and len(kept) < len(self.rows):
            self.cache.reorder_cache(torch.tensor(kept))
            columns = max(self.rows[number].num_tokens for number in kept) - 1  # the latest token has none yet
            for layer, name in self._padded():
                setattr(layer, name, getattr(layer, name)[..., -columns:, :])
        self.rows = [self.rows[number] for number in kept]

    def mask(self, device: torch.device) -> torch.Tensor | None:
        """The mask [N, T] of padding for the next token; None if there is none."""
        lengths = torch.tensor([row.num_tokens for row in self.rows])
        longest = int(lengths.max())
        if int(lengths.min()) == longest or not self._padded():
            return None
        return to_device(torch.arange(longest) >= longest - lengths.unsqueeze(1), device)

    def _padded(self) -> list[tuple[Any, str]]:
        """Layers with keys or values, and the names of these."""
        return [(layer, name) for layer in self.cache.layers for name in _PADDED if _is_tensor(vars(layer).get(name))]

    @classmethod
    def joined(cls, cohorts: Sequence[Cohort]) -> Cohort | None:
        """All rows in the first cache; None if layers keep what cannot be padded, such as the tokens of a sliding window."""
        layers = [*zip(*(each.cache.layers for each in cohorts), strict=True)]
        if any(_without_rows(first) != _without_rows(other) for first, *others in layers for other in others):
            return None
        for first, *others in layers:
            states = [vars(layer).copy() for layer in (first, *others)]
            for name in _PADDED if _is_tensor(states[0].get("keys")) else ():
                columns = max(state[name].shape[-2] for state in states)
                for state in states:
                    state[name] = F.pad(state[name], (0, 0, columns - state[name].shape[-2], 0))
            for other in others:
                vars(other).clear()  # frees its tensors before the next layer's are joined
            vars(first).update(tree_map(lambda one, *rest: torch.cat([one, *rest]) if _is_tensor(one) else one, *states))
        return cls(rows=[row for each in cohorts for row in each.rows], cache=cohorts[0].cache)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _without_rows(layer: Any) -> dict[str, Any]:
    """What must be equal in layers whose rows are joined: shapes of tensors without rows and padding, and other values."""
    state = {name: value for name, value in vars(layer).items() if name not in _PADDED}
    plain: dict[str, Any] = tree_map(lambda value: value.shape[1:] if _is_tensor(value) else value, state)
    return plain


class CohortRows:
    """Rows of a model whose layers keep something other than keys and values, such as recurrent or sparse attention.

    Padding would change a recurrence, so only equally long prompts are computed together; such rows are a cohort. The next
    tokens have no padding, so cohorts are then joined: only keys and values are padded, on the left, and masked. If the cache
    has something else that depends on the length, as with sparse attention, each cohort has a separate forward pass.

    Args:
        model: a causal LM.
        scorer: scores prompts; None if the model's logits are computed in another way.
        max_tokens: maximum number of tokens of one prefill.

    Attributes:
        joins: whether cohorts are joined, if their cache allows it.
    """

    def __init__(self, model: PreTrainedModel, scorer: PromptScorer | None, *, max_tokens: int) -> None:
        self._model, self._scorer, self._max_tokens = model, scorer, max_tokens
        self._cohorts: list[Cohort] = []
        self.joins = True

    def prefill(self, rows: Sequence[Row]) -> tuple[torch.Tensor, list[Row]]:
        """Start rows; logits [len(rows), V] of the next token, and the rows in their order."""
        logits, begun = list[torch.Tensor](), list[Row]()
        for plan in self._plans(rows):
            computed, cache = prefill(self._model, plan, self._scorer, cache=DynamicCache(config=self._model.config))
            sources = [source for source, group in enumerate(plan.groups) for _ in group.rows]
            cohort = Cohort(rows=[row for group in plan.groups for row in group.rows], cache=cache)
            if len(sources) > len(plan.groups):
                cache.reorder_cache(torch.tensor(sources))
            self._cohorts.append(cohort)
            logits.append(computed[torch.tensor(sources, device=computed.device)])
            begun += cohort.rows
        if self.joins and len(self._cohorts) > 1 and (joined := Cohort.joined(self._cohorts)) is not None:
            self._cohorts = [joined]
        return torch.cat(logits), begun

    def _plans(self, rows: Sequence[Row]) -> list[PrefillPlan]:
        """Prefills of equally long prompts."""
        plans: dict[int, list[PrefillPlan]] = {}
        for group in group_by_prompt(rows):
            found = plans.setdefault(len(group.prompt), [])
            if not found or not found[-1].has_space_for(group, max_tokens=self._max_tokens):
                found.append(PrefillPlan(groups=[], prefixes=[]))
            found[-1].groups.append(group)
        return [plan for equally_long in plans.values() for plan in equally_long]

    def decode(self) -> tuple[torch.Tensor, list[Row]]:
        """Logits [N, V] of the next token of all rows, and the rows in their order."""
        logits = [self._decoded(cohort) for cohort in self._cohorts]
        return torch.cat(logits), [row for cohort in self._cohorts for row in cohort.rows]

    def _decoded(self, cohort: Cohort) -> torch.Tensor:
        device = self._model.get_input_embeddings().weight.device
        tokens = torch.tensor([row.tokens[-1:] for row in cohort.rows], device=device)
        positions = torch.tensor([[row.num_tokens - 1 + (row.state or 0)] for row in cohort.rows], device=device)
        arguments = {"attention_mask": cohort.mask(device), cache_keyword(self._model): cohort.cache}
        output: torch.Tensor = self._model(input_ids=tokens, position_ids=positions, use_cache=True, **arguments).logits
        return output[:, -1]

    def keep(self, rows: Sequence[Row]) -> None:
        """Drop all rows but these."""
        staying = set(rows)
        for cohort in self._cohorts:
            cohort.keep(staying)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
