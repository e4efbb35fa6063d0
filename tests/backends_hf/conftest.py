"""Tiny random Transformers models, created once per session as folders."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from rl_backends_hf.config import HFConfig, HFPolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.loss import LossFunction
from rl_core.interfaces.worker import GlobalCounts
from rl_core.interfaces.worker_context import WorkerContext

VOCAB_SIZE = 160
KINDS = ("llama", "llama-tied", "qwen2", "qwen3")

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Wide enough that log-probabilities differ by whole nats, so that errors are visible.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "llama-tied": lambda: transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**_SHAPE, tie_word_embeddings=False),
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE, tie_word_embeddings=True, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(
        **_SHAPE, head_dim=8, final_logit_softcapping=2.0, sliding_window=8, query_pre_attn_scalar=8
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "granite": lambda: transformers.GraniteConfig(**_SHAPE, logits_scaling=4.0),
    "cohere": lambda: transformers.CohereConfig(**_SHAPE, logit_scale=0.25),
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folder of a tiny float32 model of the kind, such as `llama`, `llama-tied` or `gpt2`; see `_CONFIGS`."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> str:
        if kind not in made:
            with torch.random.fork_rng():
                torch.manual_seed(11 + list(_CONFIGS).index(kind))
                model = transformers.AutoModelForCausalLM.from_config(_CONFIGS[kind]())
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return str(made[kind])

    return folder


class NLL(LossFunction):
    """Weighted negative log-likelihood a token; independent of the losses that the core has."""

    required_keys = frozenset({"weights"})
    metric_reductions = {"lowest": "min"}  # noqa: RUF012
    allows_dropout = True

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(1)
        loss = -(next_token_logprobs * mask * data["weights"].unsqueeze(1)).sum() / global_valid_toks
        return loss, {"nll": loss.detach(), "lowest": (next_token_logprobs * mask).min().detach()}


class SquaredValues(LossFunction):
    """Half the squared distance of the values from the row's weight, the mean over trained tokens."""

    required_keys = frozenset({"weights"})

    def __call__(self, values, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(1)
        loss = ((values - data["weights"].unsqueeze(1)).square() * mask).sum() / 2 / global_valid_toks
        return loss, {"mean_value": (values * mask).detach().sum() / global_valid_toks}


def make_rows(num_rows: int = 8, width: int = 20, *, seed: int = 5) -> BatchedDataDict:
    """Rows of unequal lengths with prompts that are not trained, one of them masked out."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, width - 2, (num_rows,), generator=generator)
    column = torch.arange(width)
    token_mask = (column >= 2) & (column < lengths.unsqueeze(1))
    ids = torch.randint(3, VOCAB_SIZE, (num_rows, width), generator=generator)
    return BatchedDataDict(
        input_ids=torch.where(column < lengths.unsqueeze(1), ids, 0),
        input_lengths=lengths,
        token_mask=token_mask.float(),
        sample_mask=(torch.arange(num_rows) != 1).float(),
        weights=torch.rand(num_rows, generator=generator) + 0.5,
    )


def make_prompt_rows(num_prompts: int = 3, group: int = 4, *, seed: int = 5) -> BatchedDataDict:
    """Rows of `num_prompts` prompts, in random order, with unequal lengths."""
    rows = make_rows(num_prompts * group, 20, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.arange(num_prompts).repeat_interleave(group)[torch.randperm(num_prompts * group, generator=generator)]
    shared = torch.randint(3, VOCAB_SIZE, (num_prompts, 10), generator=generator)[prompts]
    rows["input_ids"][:, :10] = torch.where(rows["input_ids"][:, :10] > 0, shared, 0)
    rows["prompt_id"] = prompts
    return rows


def counts_of(rows: BatchedDataDict, steps: int = 1) -> list[GlobalCounts]:
    """Counts of `steps` global batches of as many rows each."""
    return [
        GlobalCounts(
            valid_seqs=float(part["sample_mask"].sum()),
            valid_toks=float((part["token_mask"] * part["sample_mask"].unsqueeze(1)).sum()),
        )
        for part in (rows.slice(i * rows.size // steps, (i + 1) * rows.size // steps) for i in range(steps))
    ]


def make_context(rank: int = 0, world_size: int = 1, port: int = 0) -> WorkerContext:
    """One CPU rank; several run in separate processes."""
    return WorkerContext(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        node_rank=0,
        master_address="127.0.0.1",
        master_port=port,
        run_in_process=world_size == 1,
    )


def exit_rank() -> None:
    """End a rank program whose results are written, without finalizing the interpreter.

    Torch's caches of device meshes keep a gloo process group alive after `destroy_process_group`. A thread of the group that
    has not yet freed the tensors of the last collective then needs the GIL of a finalizing interpreter, and the process
    aborts ("terminate called without an active exception"). Ray ends real workers in the same way, without finalizing.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def make_config(model: str, *, hf=None, **fields) -> HFPolicyConfig:
    """A policy section; chunks of 7 positions, so that every test crosses chunk borders."""
    return HFPolicyConfig(model_name=model, hf_cfg=HFConfig(**{"logprob_chunk_tokens": 7, **(hf or {})}), **fields)


VALUE_FIELDS = {
    "head": "scalar",
    "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.05}},
    "max_grad_norm": None,
    "train_micro_batch_size": 3,
}
"""A value model in tests."""
SGD = {"name": "torch.optim.SGD", "kwargs": {"lr": 1e4}}
"""A step so large that the change of a weight is its gradient to seven digits."""


def gradients_from(before, after) -> dict[str, torch.Tensor]:
    """What one step of `SGD` took from each weight, as the gradient that it must have seen."""
    return {name: (before[name] - after[name]) / SGD["kwargs"]["lr"] for name in before}


def plain_logprobs(model, rows, *, temperature: float = 1.0) -> torch.Tensor:
    """The reference: all logits of every row alone, log-softmax in float32, [B, T]."""
    found = torch.zeros(rows["input_ids"].shape)
    columns = []
    for ids, length in zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True):
        logits = model(ids[None, :length], use_cache=False).logits[0, :-1].float() / temperature
        picked = torch.log_softmax(logits, dim=-1).gather(1, ids[1:length, None])[:, 0]
        columns.append(torch.nn.functional.pad(picked, (1, len(ids) - length)))
    return torch.stack(columns) + found


def plain_gradients(folder: str, rows, *, temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """The reference: one backward pass over all rows, by Transformers and autograd alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mask = rows["token_mask"] * rows["sample_mask"].unsqueeze(1)
    scored = plain_logprobs(model, rows, temperature=temperature)
    (-(scored * mask * rows["weights"].unsqueeze(1)).sum() / mask.sum()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def largest_relative_error(found, expected) -> float:
    """Over all tensors: norm of the difference by norm of the expected."""
    assert found.keys() == expected.keys()
    return max(float((found[k] - expected[k]).norm() / expected[k].norm().clamp(min=1e-6)) for k in expected)


@pytest.fixture(scope="session")
def parts():
    """The functions of this module, for tests that cannot import it."""
    import types

    return types.SimpleNamespace(**{key: value for key, value in globals().items() if not key.startswith("_")})
