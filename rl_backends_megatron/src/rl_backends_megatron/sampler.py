"""Samples from the parallel model with a full forward pass per token, without a cache: for tests and small runs.

The last stage draws each token and broadcasts it to all ranks of the replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_backends_base import Row, RowSampler, TokenModel
from rl_backends_base.row_sampler import Alternatives
from rl_backends_megatron.model_inputs import ModelInput
from rl_backends_megatron.parallel import Ranks
from rl_backends_megatron.scoring import forward
from rl_core.config.diagnostics import dotted
from rl_core.config.schema import GenerationConfig
from rl_core.errors import NotSupportedError


class Sampler(TokenModel):
    """Samples the rows of one call after another. Collective over all ranks of the policy.

    Args:
        models: this rank's chunks.
        config: the section `policy.generation` of any backend.
        ranks: the ranks.
        vocab_size: V, without padding.
        end_ids: tokens that end a row.
        max_model_len: maximum number of tokens of prompt and completion.
        seed: for rows without a seed.
        tokenizer: for stop strings; None if there is none.

    Attributes:
        rows: the rows.

    Raises:
        NotSupportedError: the config changes the distribution other than by temperature, such as by top-p.
    """

    def __init__(
        self,
        models: Sequence[Any],
        config: GenerationConfig,
        ranks: Ranks,
        *,
        vocab_size: int,
        end_ids: frozenset[int],
        max_model_len: int,
        seed: int,
        tokenizer: Any,
    ) -> None:
        changes = config.sampling_filters() | config.logit_changes()
        if changes:
            settings = ", ".join(f"{dotted(key)}: {'null' if value is None else value}" for key, value in changes.items())
            raise NotSupportedError(
                "MegatronPolicy.generate supports only the unmodified distribution: set "
                f"{settings} in `policy.generation`, or choose a generation backend there.",
                key="policy.generation",
            )
        if ranks.context.size() > 1:
            raise NotSupportedError(
                "MegatronPolicy.generate does not support context parallelism: set context_parallel_size to 1, or choose a "
                "generation backend in `policy.generation`.",
                key="policy.generation",
            )
        self._models, self._ranks, self._vocab_size = models, ranks, vocab_size
        self.rows = RowSampler(
            self,
            config,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            end_ids=end_ids,
            tokenizer=tokenizer,
            seed=seed,
            rank=parallel_state.get_data_parallel_rank(),
        )

    def prefill(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits [len(rows), V] on the last stage, and [len(rows), 0] on others."""
        self._ranks.any(True)
        return self._forward([row.sequence for row in rows])

    def assist(self) -> bool:
        # Replicas with other rows share the experts, so all of them continue until the last one has finished.
        if not self._ranks.any(False):
            return False
        self._forward([[0]])
        return True

    def draw(self, rows: Sequence[Row], logits: torch.Tensor) -> tuple[torch.Tensor, Alternatives]:
        nothing: tuple[torch.Tensor, Alternatives] = torch.zeros(2, len(rows), dtype=torch.float64), {}
        drawn, likely = super().draw(rows, logits) if logits.shape[1] else nothing
        if any(row.num_likely for row in rows):
            likely = self._ranks.from_last_stage(likely)
        return self._ranks.tensor_from_last_stage(drawn), likely

    def without_gradients(self) -> AbstractContextManager[Any]:
        return torch.no_grad()  # modules keep tensors, which training uses too

    def _forward(self, sequences: Sequence[list[int]]) -> torch.Tensor:
        inputs = self._input(sequences)
        # An interleaved pipeline needs a multiple of its number of stages.
        copies = self._ranks.pipeline.size() if len(self._models) > 1 else 1
        logits = forward(self._models, [inputs] * copies, lambda logits, _: self._gather_vocab(logits))
        return logits[0].float() if logits else torch.empty(len(sequences), 0)

    def _gather_vocab(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, V] from [B, V' / R], gathered over the tensor-parallel ranks."""
        gathered = [torch.empty_like(logits) for _ in range(self._ranks.tensor.size())]
        dist.all_gather(gathered, logits.contiguous(), group=self._ranks.tensor)
        return torch.cat(gathered, dim=1)[:, : self._vocab_size]

    def _input(self, sequences: Sequence[list[int]]) -> ModelInput:
        multiple = self._ranks.tensor.size()
        width = -(-max(map(len, sequences)) // multiple) * multiple
        ids = torch.tensor([sequence + [0] * (width - len(sequence)) for sequence in sequences])
        last = torch.tensor([number * width + len(sequence) - 1 for number, sequence in enumerate(sequences)])
        device = self._ranks.device
        return ModelInput(
            input_ids=ids.to(device),
            position_ids=torch.arange(width).expand(len(sequences), -1).to(device),
            packing=None,
            hidden_index=last.to(device),
            targets=torch.zeros(0, dtype=torch.int64),
            output_index=torch.zeros(0, dtype=torch.int64),
            shape=(len(sequences), width),
        )
