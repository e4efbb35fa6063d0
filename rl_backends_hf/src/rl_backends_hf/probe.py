"""Proves at start-up, on a few tokens, that scoring does what the model itself does; knows no training.

Chunked scoring assumes logits = transform(head(backbone)), and packing assumes that rows do not see each other. Both hold for
most models of Transformers and break in silence for some; a wrong gradient is dearer than two tiny forward passes.
"""

from __future__ import annotations

import torch

from rl_backends_hf.scoring import ScoringModel, packed_input, padded_input
from rl_core.errors import NotSupportedError

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Nats. A family's scale or cap that is not applied, or a row that sees another, shows as tenths to whole nats."""

_UNPACKED = "Set `policy.sequence_packing.enabled: false` and use `policy.dynamic_batching`"


def probe_scoring(scoring: ScoringModel, *, device: torch.device, packing: bool, variable_length_kernel: bool) -> None:
    """Compare scoring with the model's own logits, and packed rows with the same rows alone.

    Raises:
        NotSupportedError: they differ.
    """
    ids, lengths = _tokens(scoring.vocab_size)
    with torch.no_grad():
        own = _own_logprobs(scoring, ids.to(device))
        padded = scoring.score(padded_input(ids, lengths, device=device))
        _compare(
            scoring,
            own,
            padded,
            lengths,
            found="The model's own logits are not its LM head applied to its backbone",
            advice="This backend cannot train it: use a causal LM whose head is a plain matrix",
        )
        if packing:
            packed = _packed_logprobs(scoring, ids, lengths, device=device, variable_length_kernel=variable_length_kernel)
            _compare(
                scoring,
                own,
                packed,
                lengths,
                found="Packed rows see each other in this model",
                advice=_UNPACKED,
            )


def _tokens(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (2, 8), generator=generator), torch.tensor([6, 8])


def _packed_logprobs(
    scoring: ScoringModel, ids: torch.Tensor, lengths: torch.Tensor, *, device: torch.device, variable_length_kernel: bool
) -> torch.Tensor:
    packed = packed_input(ids, lengths, device=device, variable_length_kernel=variable_length_kernel)
    try:
        return scoring.score(packed)
    except TypeError as error:
        raise NotSupportedError(
            f"{type(scoring.model).__name__} takes no positions from outside ({error}), so rows cannot be packed. {_UNPACKED}."
        ) from error


def _own_logprobs(scoring: ScoringModel, ids: torch.Tensor) -> torch.Tensor:
    logits = scoring.model(input_ids=ids, use_cache=False).logits.float() / scoring.transform.temperature
    scored = torch.log_softmax(logits[:, :-1], dim=-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    return torch.nn.functional.pad(scored, (1, 0))


def _compare(
    scoring: ScoringModel,
    own: torch.Tensor,
    ours: torch.Tensor,
    lengths: torch.Tensor,
    *,
    found: str,
    advice: str,
) -> None:
    is_token = torch.arange(own.shape[1]) < lengths.unsqueeze(1)
    difference = float((own - ours).abs()[is_token.to(own.device)].max())
    tolerance = _TOLERANCE.get(scoring.model.dtype, 0.25)
    if not difference <= tolerance:
        raise NotSupportedError(
            f"{type(scoring.model).__name__}: {found} (log-probabilities of a test input differ by {difference:.3g} nats, "
            f"{tolerance:g} are allowed), so training would be wrong in silence. {advice}."
        )
