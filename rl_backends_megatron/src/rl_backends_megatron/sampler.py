"""Samples from the parallel model with a full forward pass per token, without a cache: for tests and small runs.

The last stage draws each token and broadcasts it to all ranks of the replica. A row's draws depend only on its seed and its own
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_backends_megatron.model_inputs import ModelInput
from rl_backends_megatron.parallel import Ranks
from rl_backends_megatron.scoring import forward
from rl_core.config.diagnostics import dotted
from rl_core.config.schema import GenerationConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import LengthLimits, PromptReader, SampledRow, to_output
from rl_core.errors import NotSupportedError

Decode = Callable[[Sequence[int]], str]


@dataclass(kw_only=True, eq=False)
class Row(SampledRow):
    """One unfinished completion.

    Attributes:
        generator: random generator of its draws.
        done: stopped, or at its limit.
    """

    generator: torch.Generator
    done: bool = False


class Sampler:
    """Samples the rows of one call after another.

    Args:
        config: the section `policy.generation` of any backend.
        ranks: the ranks.
        vocab_size: V, without padding.
        end_ids: tokens that end a row.
        max_model_len: maximum number of tokens of prompt and completion.
        seed: for rows without a seed.
        multiple: rows are padded to a multiple of this many tokens.
        decode: token ids to text, for stop strings; None without a tokenizer.

    Raises:
        NotSupportedError: the config changes the distribution other than by temperature, such as by top-p.
    """

    def __init__(
        self,
        config: GenerationConfig,
        ranks: Ranks,
        *,
        vocab_size: int,
        end_ids: frozenset[int],
        max_model_len: int,
        seed: int,
        multiple: int,
        decode: Decode | None,
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
        self._config, self._ranks = config, ranks
        self._vocab_size, self._multiple = vocab_size, multiple
        self._end_ids = end_ids | set(config.stop_token_ids or ())
        self._decode = decode
        self._reader = PromptReader(
            LengthLimits(vocab_size=vocab_size, max_model_len=max_model_len, max_new_tokens=config.max_new_tokens),
            stop_strings=config.stop_strings or (),
            reads_text=decode is not None,
            seed=seed,
            rank=parallel_state.get_data_parallel_rank(),
        )

    def generate(
        self, models: Sequence[Any], data: BatchedDataDict[Any], *, greedy: bool, weight_version: int
    ) -> BatchedDataDict[Any]:
        """Complete this rank's rows; see `GenerationInterface.generate`. Collective over all ranks of the policy."""
        rows = [Row(prompt=prompt, generator=torch.Generator().manual_seed(prompt.seed)) for prompt in self._reader.read(data)]
        # Replicas with other rows share the experts, so all of them continue until the last one has finished.
        while self._ranks.any(any(not row.done for row in rows)):
            drawn = self._draw(models, rows, greedy=greedy)
            for row, token, logprob in zip(rows, drawn[0].tolist(), drawn[1].tolist(), strict=True):
                if not row.done:
                    self._append(row, int(token), logprob)
        return to_output([row.completion(weight_version=weight_version) for row in rows])

    def _draw(self, models: Sequence[Any], rows: Sequence[Row], *, greedy: bool) -> torch.Tensor:
        """[2, B] float64, the next token of each row and its log-probability, the same on every rank of the replica."""
        inputs = self._input(rows)
        # An interleaved pipeline needs a multiple of its number of stages.
        copies = self._ranks.pipeline.size() if len(models) > 1 else 1
        logits_of_copies = forward(models, [inputs] * copies, lambda logits, _: self._gather_vocab(logits))
        drawn = torch.zeros(2, len(rows), dtype=torch.float64)
        if logits_of_copies:
            logprobs = torch.log_softmax(logits_of_copies[0].float().cpu() / self._config.temperature, dim=-1)
            for number, row in enumerate(rows):
                token = self._choose(row, logprobs[number], greedy=greedy)
                drawn[0, number], drawn[1, number] = token, logprobs[number, token]
        return self._ranks.tensor_from_last_stage(drawn.to(self._ranks.device)).cpu()

    def _gather_vocab(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, V] from [B, V' / R], gathered over the tensor-parallel ranks."""
        gathered = [torch.empty_like(logits) for _ in range(self._ranks.tensor.size())]
        dist.all_gather(gathered, logits.contiguous(), group=self._ranks.tensor)
        return torch.cat(gathered, dim=1)[:, : self._vocab_size]

    def _choose(self, row: Row, logprobs: torch.Tensor, *, greedy: bool) -> int:
        if greedy or row.done:
            return int(logprobs.argmax())
        return int(torch.multinomial(logprobs.exp(), 1, generator=row.generator))

    def _input(self, rows: Sequence[Row]) -> ModelInput:
        sequences = [row.sequence for row in rows]
        width = -(-max(map(len, sequences)) // self._multiple) * self._multiple
        ids = torch.tensor([sequence + [0] * (width - len(sequence)) for sequence in sequences])
        last = torch.tensor([number * width + len(sequence) - 1 for number, sequence in enumerate(sequences)])
        device = self._ranks.device
        return ModelInput(
            input_ids=ids.to(device),
            position_ids=torch.arange(width).expand(len(rows), -1).to(device),
            packing=None,
            hidden_index=last.to(device),
            targets=torch.zeros(0, dtype=torch.int64),
            output_index=torch.zeros(0, dtype=torch.int64),
            shape=(len(rows), width),
        )

    def _append(self, row: Row, token: int, logprob: float) -> None:
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.stopped = token in self._end_ids
        if row.prompt.stop_strings and not row.stopped:
            assert self._decode is not None
            text = self._decode(row.tokens)
            row.stopped = any(string in text for string in row.prompt.stop_strings)
        row.done = row.stopped or len(row.tokens) >= row.prompt.limit
