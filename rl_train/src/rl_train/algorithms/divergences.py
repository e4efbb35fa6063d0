"""Divergences between two distributions that are known at a few tokens only; pure functions, of log-probabilities in nats.

p is the teacher, q the student. At K given tokens of a vocabulary both are made distributions again in one of two ways:

    bucket        all other tokens together are one more: KL of the coarser distributions, never above that of the whole ones
                  (data-processing inequality), and equal to it where K is the vocabulary
    renormalize   both are divided by their mass on the K tokens: what lies outside is not seen, and not held back

    forward KL    sum p log(p / q)
    reverse KL    sum q log(q / p)
    JSD(b)        b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q: GKD, https://arxiv.org/abs/2306.13649, equation 1;
                  JSD(b) / b goes to forward KL as b goes to 0, JSD(b) / (1 - b) to reverse KL as b goes to 1

Letters: K tokens, the last axis.
"""

from __future__ import annotations

import math

import torch

REST_FLOOR = 1e-5
"""A mass beyond the K tokens that is smaller counts as this much: it is 1 less a float32 sum, known to a few 1e-6."""


def with_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """[..., K + 1]: log-probabilities of K tokens [..., K], and of all others together."""
    inside = torch.logsumexp(logprobs, dim=-1, keepdim=True).clamp(max=math.log1p(-REST_FLOOR))
    return torch.cat([logprobs, torch.log(-torch.expm1(inside))], dim=-1)


def renormalized(logprobs: torch.Tensor) -> torch.Tensor:
    """[..., K]: log-probabilities given that it is one of these tokens."""
    return torch.log_softmax(logprobs, dim=-1)


def kl_divergence(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """[...] KL of `logprobs` [..., K] to `other` [..., K], each a whole distribution."""
    return (logprobs.exp() * (logprobs - other)).sum(dim=-1)


def generalized_jsd(teacher: torch.Tensor, student: torch.Tensor, beta: float) -> torch.Tensor:
    """[...] JSD(beta) of two whole distributions [..., K].

    Args:
        teacher: log p.
        student: log q.
        beta: the teacher's share of the mixture, within 0 and 1.
    """
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * kl_divergence(teacher, mixture) + (1.0 - beta) * kl_divergence(student, mixture)
