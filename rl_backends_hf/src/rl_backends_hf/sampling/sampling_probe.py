"""Verifies at start-up, on a few tokens, that sampling has the probabilities of the model's own forward pass.

Sampling pads prompts on the left, continues rows from cached keys and values, and shares prompts. A model that derives
positions from a mask, attends in another way or keeps other state would silently sample from another distribution.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch

from rl_backends_hf.sampling.sampler import Sampler
from rl_backends_hf.sampling.token_choice import SamplingParameters
from rl_backends_hf.scoring.probe import refusing_errors, tolerance
from rl_core.backend import BatchedDataDict
from rl_core.errors import NonFiniteError, NotSupportedError

_PROMPTS: Final = ((0, 33), (0, 33), (1, 20))
"""The prompt of each row and its length; the first is long enough to be shared by its rows."""
_NEW: Final = 3


def probe_sampling(sampler: Sampler) -> None:
    """Compare the log-probabilities of sampled tokens with those of each row alone, without a cache.

    Raises:
        NotSupportedError: they differ, or the model's code fails.
    """
    model, longest = sampler.model, sampler.max_model_len - _NEW
    if longest < 1:
        return
    settings = replace(
        sampler.settings, parameters=SamplingParameters(), max_new_tokens=_NEW, stop_strings=(), stop_token_ids=()
    )
    with refusing_errors(model, "be sampled from; use another generation backend"):
        try:
            output = Sampler(model, settings=settings).generate(_prompts(sampler.vocab_size, longest))
        except NonFiniteError:  # the weights are; the first call of `generate` says so
            return
        difference = _largest_difference(sampler, output)
    allowed = tolerance(model.dtype)
    if not difference <= allowed:
        raise NotSupportedError(
            f"{type(model).__name__}: log-probabilities of sampled tokens differ by {difference:.3g} from those of the model's "
            f"own forward pass ({allowed:g} is allowed), so this sampler would draw from another distribution. Use another "
            "generation backend for this model."
        )


def _prompts(vocab_size: int, longest: int) -> BatchedDataDict[Any]:
    prompts, lengths = torch.tensor(_PROMPTS).unbind(dim=1)
    lengths = lengths.clamp(max=longest)
    ids = torch.randint(vocab_size, (2, int(lengths.max())), generator=torch.Generator().manual_seed(0))[prompts]
    ids = torch.where(torch.arange(ids.shape[1]) < lengths.unsqueeze(1), ids, 0)
    seeds = torch.arange(len(prompts))
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths, "prompt_id": prompts, "sample_seeds": seeds})


def _largest_difference(sampler: Sampler, output: BatchedDataDict[Any]) -> float:
    """Between the log-probabilities of sampled tokens and those of a forward pass over their row."""
    model, differences = sampler.model, []
    with sampler.without_gradients():
        for row, end in enumerate(output["unpadded_sequence_lengths"].tolist()):
            ids, first = output["output_ids"][row, :end].to(model.device), end - int(output["generation_lengths"][row])
            logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, first - 1 : -1].float()
            expected = torch.log_softmax(logits, dim=-1).gather(1, ids[first:, None])[:, 0]
            sampled = output["logprobs"][row, first:end].to(expected.device)
            differences.append((sampled - expected).abs().max())
    return float(torch.stack(differences).max())
