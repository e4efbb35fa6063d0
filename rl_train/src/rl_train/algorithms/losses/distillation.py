"""Distillation losses: the divergence between student and teacher at each trained token.

On the teacher's K most likely tokens (`topk`), the divergence itself, with an exact gradient at the given positions:

    forward KL, reverse KL, JSD(b)   GKD, https://arxiv.org/abs/2306.13649, equations 1 to 3
    mixed                            w times forward KL, 1 - w times reverse KL

The probabilities of the K tokens are completed to distributions in one of two ways:

    bucket        all other tokens form one more entry: the KL of the coarser distributions is never above that of the full ones
                  (data-processing inequality), and equal to it if K is the vocabulary
    renormalize   both are divided by their mass on the K tokens: mass outside is ignored, and not penalized

On sampled tokens only, reverse KL as a policy gradient (https://thinkingmachines.ai/blog/on-policy-distillation): with the
advantage A = log p - log q before the step, without a gradient, and the importance ratio r of the token, with its logarithm
clamped to plus and minus 20 nats (`LOG_RATIO_BOUND`),

    minimize -r A        its on-policy gradient is that of (log q - log p)² / 2, the k2 estimator of the KL

A teacher with another tokenizer scores spans of text. With the log-probabilities of all tokens of a span s, the advantage of
each of the student's tokens in it is

    A_s = log p(s) - log q(s)        of which each token has the gradient, as for a single action with several tokens

Aligned spans are those of https://arxiv.org/abs/2503.20083 (section 3), there for whole distributions and given text.

Each token only gets its own divergence, unlike in MiniLLM (https://arxiv.org/abs/2306.08543), where it also gets those of later
tokens.

Notation: B rows, T tokens, K candidates; p is the teacher, q the student. All quantities are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import NotSupportedError
from rl_core.interfaces.policy import LossFunction, LossType
from rl_train.algorithms.losses.config import DistillationLossConfig
from rl_train.algorithms.losses.means import bounded_log_ratio, divided_by_shares, sequence_mean, token_mean
from rl_train.data.teacher_spans import over_spans

TOPK_IDS, TOPK_LOGPROBS = "teacher_topk_token_ids", "teacher_topk_logprobs"
CANDIDATES = "candidate_logprobs"

Metrics = dict[str, torch.Tensor]


NUMBERS, SPANS = "teacher_numbers", "teacher_spans"
_BY_TEACHER = ("distillation/kl_forward", "distillation/kl_reverse", "distillation/kl_sampled")
_SHARE = "distillation/tokens_frac/"


class DistillationLossFn(LossFunction):
    """The divergence of `DistillationLossConfig`, averaged over trained tokens (or over sequence means).

    Attributes:
        teachers: tasks of the teachers, whose number is in the batch, if metrics are also reported for each of them.
    """

    def __init__(self, config: DistillationLossConfig | None = None) -> None:
        self.config = config or DistillationLossConfig()
        self.loss_type = LossType.TOKEN_LEVEL if self.config.token_level_loss else LossType.SEQUENCE_LEVEL
        self.candidates_key = TOPK_IDS if self.config.topk is not None else None
        self.teachers: tuple[str, ...] = ()

    @property
    def required_keys(self) -> frozenset[str]:
        """Keys of the teacher's log-probabilities; for sampled tokens also the student's before the step, unless on-policy."""
        several = frozenset({NUMBERS} if self.teachers else ())
        if self.config.topk is not None:
            return several | {TOPK_IDS, TOPK_LOGPROBS}
        return several | ({"teacher_logprobs"} if self.on_policy else {"teacher_logprobs", "prev_logprobs"})

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, Metrics]:
        """The divergence from the teacher in nats, averaged as configured, and its metrics."""
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        if self.config.topk is not None:
            per_token, metrics = self._of_candidates(data)
        else:
            per_token, metrics = self._of_samples(next_token_logprobs, data, mask)
        if self.loss_type is LossType.TOKEN_LEVEL:
            loss = token_mean(per_token, mask, global_valid_toks)
        else:
            loss = sequence_mean(per_token, mask, global_valid_seqs)
        metrics["entropy/sampled"] = -next_token_logprobs
        means = {name: token_mean(values.detach(), mask, global_valid_toks) for name, values in metrics.items()}
        for number, name in enumerate(self.teachers):
            own = mask * (data[NUMBERS] == number).unsqueeze(-1)
            of_teacher = {f"{key}/{name}": metrics[key].detach() for key in _BY_TEACHER if key in metrics}
            of_teacher[_SHARE + name] = torch.ones_like(mask)
            means |= {key: token_mean(values, own, global_valid_toks) for key, values in of_teacher.items()}
        return loss, means

    @property
    def optional_keys(self) -> frozenset[str]:
        """The spans of text of a teacher with its own tokenizer."""
        return frozenset({SPANS})

    def reported_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """The divergence from each of several teachers is a mean over the tokens that it scores."""
        shares = {f"{key}/{name}": metrics.get(_SHARE + name, 0.0) for key in _BY_TEACHER for name in self.teachers}
        return divided_by_shares(metrics, shares)

    def _of_candidates(self, data: BatchedDataDict[Any]) -> tuple[torch.Tensor, Metrics]:
        """[B, T] the divergence at each position, and metrics [B, T]."""
        if CANDIDATES not in data:
            raise NotSupportedError(
                "The policy backend did not return log-probabilities of the teacher's most likely tokens, which this loss "
                "needs. "
                "Use a backend with the capability `topk_logprobs`, or `loss_fn: {divergence: reverse_kl, topk: null}`."
            )
        teacher_topk, student_topk = data[TOPK_LOGPROBS], data[CANDIDATES]
        complete = with_rest if self.config.beyond_topk == "bucket" else renormalized
        teacher, student = complete(teacher_topk), complete(student_topk)
        forward, reverse = kl_divergence(teacher, student), kl_divergence(student, teacher)
        return self._divergence(teacher, student, forward, reverse), {
            "distillation/kl_forward": forward,
            "distillation/kl_reverse": reverse,
            "distillation/topk_mass_teacher": teacher_topk.exp().sum(dim=-1),
            "distillation/topk_mass_student": student_topk.exp().sum(dim=-1),
            "distillation/argmax_agreement": (student_topk.argmax(dim=-1) == teacher_topk.argmax(dim=-1)).to(
                student_topk.dtype
            ),
        }

    def _divergence(
        self, teacher: torch.Tensor, student: torch.Tensor, forward: torch.Tensor, reverse: torch.Tensor
    ) -> torch.Tensor:
        if self.config.divergence == "forward_kl":
            return forward
        if self.config.divergence == "reverse_kl":
            return reverse
        if self.config.divergence == "mixed_kl":
            weight = self.config.mixed_kl_weight
            return weight * forward + (1.0 - weight) * reverse
        return generalized_jsd(teacher, student, self.config.jsd_beta)

    def _of_samples(
        self, logprobs: torch.Tensor, data: BatchedDataDict[Any], mask: torch.Tensor
    ) -> tuple[torch.Tensor, Metrics]:
        """[B, T] the surrogate of each sampled token, and metrics [B, T]."""
        previous = logprobs.detach() if self.on_policy else data["prev_logprobs"]
        ratio = bounded_log_ratio(logprobs, previous, mask).exp()
        if SPANS in data:
            spans = data[SPANS]
            scored = (spans > 0).to(logprobs.dtype)
            advantage = scored * (data["teacher_logprobs"] - over_spans(previous, spans))
            excess = over_spans(logprobs.detach(), spans) - data["teacher_logprobs"]
            # A mean over tokens: each token of a span has an equal part of it.
            parts = scored * excess / over_spans(torch.ones_like(logprobs), spans)
            return -ratio * advantage, {"distillation/kl_sampled": parts, "distillation/aligned_frac": scored}
        surrogate = -ratio * (data["teacher_logprobs"] - previous)
        return surrogate, {"distillation/kl_sampled": logprobs - data["teacher_logprobs"]}


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
    """[...] JSD(beta) of two full distributions [..., K], GKD, https://arxiv.org/abs/2306.13649, equation 1.

    beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q. JSD(beta) / beta converges to forward KL as beta
    goes to 0, JSD(beta) / (1 - beta) to reverse KL as beta goes to 1.

    Args:
        teacher: log p.
        student: log q.
        beta: weight of the teacher in the mixture, between 0 and 1.
    """
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * kl_divergence(teacher, mixture) + (1.0 - beta) * kl_divergence(student, mixture)
