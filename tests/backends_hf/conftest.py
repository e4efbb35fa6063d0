"""Tiny random Transformers models, created once per session as folders."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent))

import policy_cases
import tiny_vlms
from policy_cases import NLL, SGD, TINY_SHAPE, counts_of, largest_relative_error, make_rows, plain_logprobs, plain_loss

from rl_backends_hf.config import HFConfig, HFPolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.policy import LossFunction
from rl_core.interfaces.worker_context import WorkerContext

__all__ = ["NLL", "SGD", "counts_of", "largest_relative_error", "make_rows", "plain_logprobs"]

VOCAB_SIZE = 160
KINDS = ("llama", "llama-tied", "qwen2", "qwen3")

_SHAPE = {**TINY_SHAPE, "vocab_size": VOCAB_SIZE, "num_hidden_layers": 2}
_CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "llama-tied": lambda: transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**_SHAPE, tie_word_embeddings=False),
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE, tie_word_embeddings=True, head_dim=8),
    "gemma2": lambda: _gemma2(attn_logit_softcapping=None),
    "gemma2-capped": lambda: _gemma2(attn_logit_softcapping=1.0),
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


def _gemma2(**fields) -> transformers.Gemma2Config:
    sizes = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
    return transformers.Gemma2Config(**_SHAPE, **sizes, final_logit_softcapping=2.0, **fields)


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


@pytest.fixture(scope="session")
def vlm_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Folder of a tiny vision-language model of a family of `tiny_vlms`, with or without tied embeddings."""
    made: dict[tuple[str, bool], str] = {}

    def folder(family: str, *, tied: bool = False) -> str:
        if (family, tied) not in made:
            made[family, tied] = tiny_vlms.make(family, tmp_path_factory.mktemp(family), tied=tied)
        return made[family, tied]

    return folder


class SquaredValues(LossFunction):
    """Half the squared distance of the values from the row's weight, the mean over trained tokens."""

    required_keys = frozenset({"weights"})

    def __call__(self, values, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(1)
        loss = ((values - data["weights"].unsqueeze(1)).square() * mask).sum() / 2 / global_valid_toks
        return loss, {"mean_value": (values * mask).detach().sum() / global_valid_toks}


def make_prompt_rows(num_prompts: int = 3, group: int = 4, *, seed: int = 5) -> BatchedDataDict:
    """Rows of `num_prompts` prompts, in random order, with unequal lengths."""
    rows = make_rows(num_prompts * group, 20, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.arange(num_prompts).repeat_interleave(group)[torch.randperm(num_prompts * group, generator=generator)]
    shared = torch.randint(3, VOCAB_SIZE, (num_prompts, 10), generator=generator)[prompts]
    rows["input_ids"][:, :10] = torch.where(rows["input_ids"][:, :10] > 0, shared, 0)
    rows["prompt_id"] = prompts
    return rows


def make_context(rank: int = 0, world_size: int = 1, port: int = 0) -> WorkerContext:
    """One CPU rank; several run in separate processes."""
    return policy_cases.make_context(rank, world_size, port, run_in_process=world_size == 1)


def make_config(model: str, *, hf=None, **fields) -> HFPolicyConfig:
    """A policy section; chunks of 7 positions, so that every test crosses chunk borders."""
    return HFPolicyConfig(model_name=model, hf_cfg=HFConfig(**{"logprob_chunk_tokens": 7, **(hf or {})}), **fields)


def train_steps(worker, *seeds):
    """The result of each of these steps, one for each seed of the rows."""
    found = []
    for rows in (make_rows(seed=seed) for seed in seeds):
        found += worker.train(rows, NLL(), counts=counts_of(rows))
    return found


VALUE_FIELDS = {
    "head": "scalar",
    "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.05}},
    "max_grad_norm": None,
    "train_micro_batch_size": 3,
}
"""A value model in tests."""


def gradients_from(before, after) -> dict[str, torch.Tensor]:
    """What one step of `SGD` took from each weight, as the gradient that it must have seen."""
    return {name: (before[name] - after[name]) / SGD["kwargs"]["lr"] for name in before}


def plain_gradients(folder: str, rows, *, temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """The reference: one backward pass over all rows, by Transformers and autograd alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain_loss(model, rows, temperature=temperature).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture(scope="session")
def peft():
    """peft, which is an extra of the distribution."""
    return importlib.import_module("peft")


@pytest.fixture(scope="session")
def parts():
    """The functions of this module, for tests that cannot import it."""
    import types

    return types.SimpleNamespace(**{key: value for key, value in globals().items() if not key.startswith("_")})
