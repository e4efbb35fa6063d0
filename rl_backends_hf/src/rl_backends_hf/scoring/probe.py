"""Verifies at start-up, on a few tokens, that scoring matches the model's own forward pass.

Scoring assumes that the model is its head applied to its backbone, and packing assumes that rows do not attend to each other.
Some Transformers models silently violate this; a few tiny forward passes are cheap compared to wrong gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from rl_backends_base import padded_input
from rl_backends_base.optimizer import compile_error
from rl_backends_base.shards import fill, reshard
from rl_backends_hf.scoring.model_inputs import packed_input
from rl_backends_hf.scoring.scoring_model import ScoringModel, ValueScoring
from rl_backends_hf.scoring.token_scoring import TokenScoring
from rl_core.errors import NotSupportedError, RLCoreError

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""In nats, or for values of about 1. A missing scale or soft cap, or attention between rows, shows as tenths."""

_DISABLE_PACKING = "Set `policy.sequence_packing.enabled: false` and use `policy.dynamic_batching`"


def probe_scoring(
    scoring: ScoringModel,
    *,
    device: torch.device,
    packing: bool,
    variable_length_kernel: str | None,
    computed_in: torch.dtype,
) -> None:
    """Compare scoring with the model's own output, and packed rows with the same rows alone.

    Args:
        scoring: the model.
        device: device of the model.
        packing: whether rows will be packed.
        variable_length_kernel: see `packed_input`.
        computed_in: dtype to which products are rounded.

    Raises:
        NotSupportedError: they differ.
    """
    ids, lengths = _tokens(scoring)
    is_token = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
    with torch.no_grad(), random_head(scoring), refusing_errors(scoring.model, "be trained by this backend"):
        padded = scoring.score(padded_input(ids, lengths, device=device, shift=scoring.shift))
        with torch.compiler.set_stance("force_eager"):  # compiled layers are compared with those of the model
            own, has_output = _model_outputs(scoring, ids.to(device), lengths)
        _compare(
            scoring,
            own,
            padded,
            is_token & has_output,
            computed_in,
            finding="The model's output is not its head applied to its backbone",
            advice="This backend cannot train it: use a model whose head is a plain matrix",
        )
        if packing:
            packed = _packed_outputs(scoring, ids, lengths, device=device, variable_length_kernel=variable_length_kernel)
            finding = "Packed rows attend to each other in this model"
            _compare(scoring, padded, packed, is_token, computed_in, finding=finding, advice=_DISABLE_PACKING)


@contextmanager
def refusing_errors(model: PreTrainedModel, what: str) -> Iterator[None]:
    """Raise errors of the model's code on a test input as NotSupportedError: it cannot do `what`.

    Errors of the machine keep their class: full memory, a device, and, with several ranks, one that has died.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        has_peers = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        explains_itself = isinstance(error, (RLCoreError, compile_error()))
        if explains_itself or "memory" in str(error) or (has_peers and isinstance(error, RuntimeError)):
            raise
        raise NotSupportedError(
            f"{type(model).__name__} cannot {what}. On a test input, its code raised {type(error).__name__}: {error}"
        ) from error


def tolerance(computed_in: torch.dtype) -> float:
    """Largest difference between two computations of the same numbers that rounding explains; see `_TOLERANCE`."""
    return _TOLERANCE.get(computed_in, 0.25)


def _tokens(scoring: ScoringModel) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, scoring.vocab_size, (2, 8), generator=generator)
    # Transformers' classifiers use the last token that is not padding.
    padding = getattr(scoring.model.config.get_text_config(), "pad_token_id", None)
    if padding is not None:
        ids = torch.where(ids == padding, (ids + 1) % scoring.vocab_size, ids)
    return ids, torch.tensor([6, 8])


@contextmanager
def random_head(scoring: ScoringModel) -> Iterator[None]:
    """Give a scalar head values of about 1 while the block runs: with an initial head of zeros, differences would not show.

    Weights that the block has gathered are freed.
    """
    if not isinstance(scoring, ValueScoring):
        yield
        reshard(scoring)
        return
    head = scoring.head
    original = head.weight.detach().clone()
    weight = torch.randn(original.shape, generator=torch.Generator().manual_seed(0)) / original.shape[1] ** 0.5
    # The model's own forward pass does not support a float32 head on a bfloat16 base, as used with adapters.
    fill(head.to(scoring.model.dtype).weight, weight)
    try:
        yield
    finally:
        reshard(scoring)
        head.to(original.dtype).weight.copy_(original)


def _packed_outputs(
    scoring: ScoringModel, ids: torch.Tensor, lengths: torch.Tensor, *, device: torch.device, variable_length_kernel: str | None
) -> torch.Tensor:
    packed = packed_input(ids, lengths, device=device, shift=scoring.shift, variable_length_kernel=variable_length_kernel)
    try:
        return scoring.score(packed)
    except TypeError as error:
        raise NotSupportedError(
            f"{type(scoring.model).__name__} does not accept position IDs ({error}), so rows cannot be packed. "
            f"{_DISABLE_PACKING}."
        ) from error


def _model_outputs(scoring: ScoringModel, ids: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own outputs [b, T], and a mask [b, T] of the tokens that have one."""
    if isinstance(scoring, TokenScoring):
        return _model_logprobs(scoring, ids), torch.ones(ids.shape, dtype=torch.bool)
    own, has_output = torch.zeros(ids.shape, device=ids.device), torch.zeros(ids.shape, dtype=torch.bool)
    for row, length in enumerate(lengths.tolist()):
        own[row, length - 1] = scoring.model_logits(ids[row : row + 1, :length])[0, 0]
        has_output[row, length - 1] = True
    return own, has_output


def _model_logprobs(scoring: TokenScoring, ids: torch.Tensor) -> torch.Tensor:
    logits = scoring.model_logits(ids) / scoring.transform.temperature
    scored = torch.log_softmax(logits[:, :-1], dim=-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    return torch.nn.functional.pad(scored, (1, 0))


def _compare(
    scoring: ScoringModel,
    own: torch.Tensor,
    ours: torch.Tensor,
    where: torch.Tensor,
    computed_in: torch.dtype,
    *,
    finding: str,
    advice: str,
) -> None:
    difference = float((own - ours).abs()[where.to(own.device)].max())
    allowed = tolerance(computed_in)
    if not difference <= allowed:
        raise NotSupportedError(
            f"{type(scoring.model).__name__}: {finding} ({scoring.column} of a test input differ by {difference:.3g}, "
            f"{allowed:g} is allowed), so training would be silently wrong. {advice}."
        )
