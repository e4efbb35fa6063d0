"""A loss, rows and reference computations for the tests of every policy backend; independent of the losses of the core."""

from __future__ import annotations

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.policy import LossFunction
from rl_core.interfaces.worker import GlobalCounts
from rl_core.interfaces.worker_context import WorkerContext

SGD = {"name": "torch.optim.SGD", "kwargs": {"lr": 1e4}}
"""A step so large that the change of a weight is its gradient to seven digits."""

WITH_MUON = {
    "kwargs": {"lr": 1e-2},
    "groups": {"matrices": {"name": "torch.optim.Muon", "kwargs": {"lr": 0.02, "weight_decay": 0.1}}},
}
"""Muon for the matrices of layers, and AdamW for all other parameters."""

TINY_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Wide enough that log-probabilities differ by whole nats, so that errors are visible.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""The configuration of the tiny models, without vocabulary and number of layers."""


class NLL(LossFunction):
    """Weighted negative log-likelihood per token."""

    required_keys = frozenset({"weights"})
    metric_reductions = {"lowest": "min"}  # noqa: RUF012
    allows_dropout = True

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(1)
        loss = -(next_token_logprobs * mask * data["weights"].unsqueeze(1)).sum() / global_valid_toks
        return loss, {"nll": loss.detach(), "lowest": (next_token_logprobs * mask).min().detach()}


def make_rows(num_rows: int = 8, width: int = 20, *, seed: int = 5, vocab_size: int = 160) -> BatchedDataDict:
    """Rows of unequal lengths with prompts that are not trained, one of them masked out."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, width - 2, (num_rows,), generator=generator)
    column = torch.arange(width)
    token_mask = (column >= 2) & (column < lengths.unsqueeze(1))
    ids = torch.randint(3, vocab_size, (num_rows, width), generator=generator)
    return BatchedDataDict(
        input_ids=torch.where(column < lengths.unsqueeze(1), ids, 0),
        input_lengths=lengths,
        token_mask=token_mask.float(),
        sample_mask=(torch.arange(num_rows) != 1).float(),
        weights=torch.rand(num_rows, generator=generator) + 0.5,
    )


def counts_of(rows: BatchedDataDict, steps: int = 1) -> list[GlobalCounts]:
    """Counts of `steps` global batches of as many rows each."""
    return [
        GlobalCounts(
            valid_seqs=float(batch["sample_mask"].sum()),
            valid_toks=float((batch["token_mask"] * batch["sample_mask"].unsqueeze(1)).sum()),
        )
        for batch in (rows.slice(i * rows.size // steps, (i + 1) * rows.size // steps) for i in range(steps))
    ]


def make_context(rank: int = 0, world_size: int = 1, port: int = 0, **fields: bool) -> WorkerContext:
    """One CPU rank; several run in separate processes."""
    return WorkerContext(
        rank=rank, world_size=world_size, local_rank=rank, node_rank=0, master_address="127.0.0.1", master_port=port, **fields
    )


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any result (of `dtype`) has."""

    elements = 0

    def __init__(self, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and self._dtype in (None, tensor.dtype):
                self.elements = max(self.elements, tensor.numel())
        return result


def plain_model(folder):
    """The model by Transformers, float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def plain_logprobs(model, rows, *, temperature: float = 1.0) -> torch.Tensor:
    """The reference: all logits of every row alone, log-softmax in float32, [B, T]."""
    columns = []
    for ids, length in zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True):
        logits = model(ids[None, :length], use_cache=False).logits[0, :-1].float() / temperature
        picked = torch.log_softmax(logits, dim=-1).gather(1, ids[1:length, None])[:, 0]
        columns.append(torch.nn.functional.pad(picked, (1, len(ids) - length)))
    return torch.stack(columns)


def plain_loss(model, rows, *, temperature: float = 1.0) -> torch.Tensor:
    """The loss of `NLL` over all rows, by Transformers and autograd alone."""
    mask = rows["token_mask"] * rows["sample_mask"].unsqueeze(1)
    return -(plain_logprobs(model, rows, temperature=temperature) * mask * rows["weights"].unsqueeze(1)).sum() / mask.sum()


def largest_relative_error(found, expected) -> float:
    """Over all tensors: norm of the difference by norm of the expected."""
    assert found.keys() == expected.keys()
    return max(float((found[k] - expected[k]).norm() / expected[k].norm().clamp(min=1e-6)) for k in expected)


def plain_distributions(model, rows, *, temperature: float = 1.0) -> torch.Tensor:
    """The reference: at t the whole log-distribution over token t given those before it, [B, T, V]; zeros elsewhere."""
    columns = []
    for ids, length in zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True):
        logits = model(ids[None, :length], use_cache=False).logits[0, :-1].float() / temperature
        columns.append(torch.nn.functional.pad(torch.log_softmax(logits, -1), (0, 0, 1, len(ids) - length)))
    return torch.stack(columns)
