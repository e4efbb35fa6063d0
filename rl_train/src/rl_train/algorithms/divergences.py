"""Divergences between two distributions that are only known for K tokens; pure functions of log-probabilities in nats.

p is the teacher, q the student. Their probabilities of K tokens are completed to distributions in one of two ways:

    bucket        all other tokens form one more entry: the KL of the coarser distributions is never above that of the full ones
                  (data-processing inequality), and equal to it if K is the vocabulary
    renormalize   both are divided by their mass on the K tokens: mass outside is ignored, and not penalized

    forward KL    sum p log(p / q)
    reverse KL    sum q log(q / p)
    JSD(b)        b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q: GKD, https://arxiv.org/abs/2306.13649, equation 1;
                  JSD(b) / b converges to forward KL as b goes to 0, JSD(b) / (1 - b) to reverse KL as b goes to 1

Notation: K tokens, the last axis.
"""

from __future__ import annotations

import math

import torch

REST_FLOOR = 1e-5
"""Lower bound of the mass outside the K tokens, which is 1 minus a float32 sum with an error of a few 1e-6."""


def with_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """[..., K + 1]: log-probabilities of K tokens [..., K], and of all other tokens together."""
    inside = torch.logsumexp(logprobs, dim=-1, keepdim=True).clamp(max=math.log1p(-REST_FLOOR))
    return torch.cat([logprobs, torch.log(-torch.expm1(inside))], dim=-1)


def renormalized(logprobs: torch.Tensor) -> torch.Tensor:
    """[..., K]: log-probabilities, renormalized over these tokens."""
    return torch.log_softmax(logprobs, dim=-1)


def kl_divergence(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """[...] KL of `logprobs` [..., K] to `other` [..., K], each a full distribution."""
    return (logprobs.exp() * (logprobs - other)).sum(dim=-1)


def generalized_jsd(teacher: torch.Tensor, student: torch.Tensor, beta: float) -> torch.Tensor:
    """[...] JSD(beta) of two full distributions [..., K].

    Args:
        teacher: log p.
        student: log q.
        beta: weight of the teacher in the mixture, between 0 and 1.
    """
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * kl_divergence(teacher, mixture) + (1.0 - beta) * kl_divergence(student, mixture)
