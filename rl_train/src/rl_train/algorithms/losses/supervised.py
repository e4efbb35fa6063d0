"""Losses on given answers: likelihood (SFT), pairs (DPO and its relatives), labels (KTO), and scores of a reward model.

Row 2i of a batch of pairs is a chosen answer and row 2i + 1 the rejected answer to the same prompt. Each answer has a score;
the loss is a function of the margin, the score of the chosen answer minus that of the rejected one. With L the
log-probability of an answer in nats, L_ref that of the reference policy, n its number of tokens and m the margin:

    DPO     score b (L - L_ref)              -(1 - e) log s(m) - e log s(-m)    https://arxiv.org/abs/2305.18290, equation 7;
                                             e > 0: conservative DPO, https://ericmitchell.ai/cdpo.pdf
    IPO     score t (L - L_ref)              (m / t - 1 / (2 t))^2              https://arxiv.org/abs/2310.12036, equation 17
    hinge   score b (L - L_ref)              max(0, 1 - m)                      https://arxiv.org/abs/2309.06657, hinge-norm
    SimPO   score b L / n                    -log s(m - g)                      https://arxiv.org/abs/2405.14734, equation 6
    ORPO    score log(p / (1 - p)),          -log s(m)                          https://arxiv.org/abs/2403.07691, equations 6, 7
            p = exp(L / n)

s is the logistic function. Notation: B rows, T tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import logsigmoid, relu, sigmoid

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.policy import LossFunction, LossType
from rl_train.algorithms.losses.config import NLLLossConfig
from rl_train.algorithms.losses.means import divided_by_shares, row_means, row_sums, token_mean
from rl_train.algorithms.losses.preference_configs import (
    BradleyTerryLossConfig,
    DPOLossConfig,
    HingeLossConfig,
    IPOLossConfig,
    KTOLossConfig,
    ORPOLossConfig,
    PreferenceLossConfig,
    SimPOLossConfig,
)


class NLLLossFn(LossFunction):
    """-log p(token), a mean over all trained tokens of the global batch."""

    loss_type = LossType.TOKEN_LEVEL
    allows_dropout = True

    def __init__(self, config: NLLLossConfig | None = None) -> None:
        self.config = config or NLLLossConfig()

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss in nats per token, and its metrics; see `LossFunction`."""
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        loss = token_mean(-next_token_logprobs, mask, global_valid_toks)
        return loss, {"loss/nll": loss.detach()}


REFERENCE = "reference_policy_logprobs"
TIE = 1e-5
"""Scores that differ by at most this much are equal: two passes over the same tokens may sum in another order."""
_DESIRABLE, _UNDESIRABLE = "kto/reward_desirable", "kto/reward_undesirable"
_MAX_MEAN_LOGPROB = -1e-6
"""Upper bound of mean log-probabilities in odds: an answer with probability 1 has infinite odds."""


class PreferenceLossFn(LossFunction):
    """A function of the margins, averaged over pairs, plus the weighted likelihood of the chosen answers.

    Subclasses define the score of an answer, and may define the loss of a margin; by default it is -log s(margin), the
    negative log-likelihood of the preference under the Bradley-Terry model.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    rows_per_unit = 2
    config: PreferenceLossConfig

    @abstractmethod
    def scores(self, logprobs: torch.Tensor, data: BatchedDataDict[Any], mask: torch.Tensor) -> torch.Tensor:
        """[B] the score of each answer.

        Args:
            logprobs: [B, T] in nats, with the gradient.
            data: the rows, with `required_keys`.
            mask: [B, T] float32, `token_mask * sample_mask`.
        """

    def margin_loss(self, margins: torch.Tensor) -> torch.Tensor:
        """The loss of each margin [B / 2]."""
        return _smoothed(margins, 0.0)

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of the pairs and its metrics; both rows of a pair have the same `sample_mask`. See `LossFunction`."""
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        mean = _mean_over_pairs(data, global_valid_seqs)
        scores = self.scores(next_token_logprobs, data, mask)
        margins = scores[0::2] - scores[1::2]
        likelihood = row_means if self.config.sft_average_log_probs else row_sums
        preference = mean(self.margin_loss(margins))
        nll = mean(-likelihood(next_token_logprobs, mask)[0::2])
        loss = self.config.preference_loss_weight * preference + self.config.sft_loss_weight * nll
        scores, margins = scores.detach(), margins.detach()
        logprobs = row_means(next_token_logprobs.detach(), mask)
        return loss, {
            "loss/preference": preference.detach(),
            **({"loss/sft": nll.detach()} if self.config.sft_loss_weight else {}),
            "preference/accuracy": mean(_is_preferred(margins)),
            "preference/margin": mean(margins),
            "preference/score_chosen": mean(scores[0::2]),
            "preference/score_rejected": mean(scores[1::2]),
            "preference/logprob_chosen": mean(logprobs[0::2]),
            "preference/logprob_rejected": mean(logprobs[1::2]),
        }


class _ReferenceLossFn(PreferenceLossFn):
    """Scores an answer by its log-ratio to the reference policy."""

    config: DPOLossConfig | IPOLossConfig | HingeLossConfig

    @property
    def required_keys(self) -> frozenset[str]:
        return frozenset({REFERENCE})

    def scores(self, logprobs: torch.Tensor, data: BatchedDataDict[Any], mask: torch.Tensor) -> torch.Tensor:
        of_answer = row_means if self.config.preference_average_log_probs else row_sums
        return self.config.reference_policy_kl_penalty * of_answer(logprobs - data[REFERENCE], mask)


class DPOLossFn(_ReferenceLossFn):
    """Direct preference optimization, with optional label smoothing."""

    config: DPOLossConfig

    def __init__(self, config: DPOLossConfig | None = None) -> None:
        self.config = config or DPOLossConfig()

    def margin_loss(self, margins: torch.Tensor) -> torch.Tensor:
        return _smoothed(margins, self.config.label_smoothing)


class IPOLossFn(_ReferenceLossFn):
    """Identity preference optimization: the log-ratios of a pair are trained to differ by 1 / (2 tau)."""

    config: IPOLossConfig

    def __init__(self, config: IPOLossConfig | None = None) -> None:
        self.config = config or IPOLossConfig()

    def margin_loss(self, margins: torch.Tensor) -> torch.Tensor:
        tau = self.config.reference_policy_kl_penalty
        return (margins / tau - 0.5 / tau).square()


class HingeLossFn(_ReferenceLossFn):
    """Hinge loss on the DPO margin."""

    config: HingeLossConfig

    def __init__(self, config: HingeLossConfig | None = None) -> None:
        self.config = config or HingeLossConfig()

    def margin_loss(self, margins: torch.Tensor) -> torch.Tensor:
        return relu(1.0 - margins)


class SimPOLossFn(PreferenceLossFn):
    """Simple preference optimization: no reference policy."""

    config: SimPOLossConfig

    def __init__(self, config: SimPOLossConfig | None = None) -> None:
        self.config = config or SimPOLossConfig()

    def scores(self, logprobs: torch.Tensor, data: BatchedDataDict[Any], mask: torch.Tensor) -> torch.Tensor:
        return self.config.beta * row_means(logprobs, mask)

    def margin_loss(self, margins: torch.Tensor) -> torch.Tensor:
        return _smoothed(margins - self.config.gamma, self.config.label_smoothing)


class ORPOLossFn(PreferenceLossFn):
    """Odds-ratio preference optimization: no reference policy, and mainly the likelihood of the chosen answers."""

    config: ORPOLossConfig

    def __init__(self, config: ORPOLossConfig | None = None) -> None:
        self.config = config or ORPOLossConfig()

    def scores(self, logprobs: torch.Tensor, data: BatchedDataDict[Any], mask: torch.Tensor) -> torch.Tensor:
        mean = row_means(logprobs, mask).clamp(max=_MAX_MEAN_LOGPROB)
        return mean - torch.log(-torch.expm1(mean))


def _mean_over(weights: torch.Tensor, count: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The contribution of values [N], of weight 0 or 1, to their mean over `count` rows or pairs of the global batch."""

    def mean(values: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = (values * weights).sum() / count.clamp(min=1.0)
        return total

    return mean


def _mean_over_pairs(data: BatchedDataDict[Any], global_valid_seqs: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return _mean_over(data["sample_mask"][0::2] * data["sample_mask"][1::2], global_valid_seqs / 2)


def _is_preferred(margins: torch.Tensor) -> torch.Tensor:
    """1.0 where the chosen answer has the higher score, 0.5 for ties, else 0.0."""
    return (margins > TIE).float() + 0.5 * (margins.abs() <= TIE).float()


def _smoothed(margins: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    loss: torch.Tensor = -(1.0 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
    return loss


class KTOLossFn(LossFunction):
    """Kahneman-Tversky optimization: each answer has a label, desirable or undesirable.

    With R = log p - log p_ref of the whole answer in nats, and K the KL of the policy to the reference policy, which has no
    gradient, the loss of an answer is

        desirable     w_d (1 - s(b (R - K)))
        undesirable   w_u (1 - s(b (K - R)))

    as in section 4 of https://arxiv.org/abs/2402.01306. `rl_train.algorithms.kto` estimates K from all rows of a step
    (`kl_estimates`), so it is the same in every microbatch. The loss is a mean over the answers of the global batch.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    required_keys = frozenset({REFERENCE, "desirable", "kl_estimates"})
    optional_keys = frozenset({"accuracies"})

    def __init__(self, config: KTOLossConfig | None = None) -> None:
        self.config = config or KTOLossConfig()

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of the answers and its metrics, see `LossFunction`; rewards are divided by all answers."""
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        is_desirable, beta = data["desirable"] > 0, self.config.reference_policy_kl_penalty
        mean = _mean_over(data["sample_mask"], global_valid_seqs)
        rewards = beta * row_sums(next_token_logprobs - data[REFERENCE], mask)
        leads = (rewards - beta * data["kl_estimates"]) * torch.where(is_desirable, 1.0, -1.0)
        weights = torch.where(is_desirable, self.config.desirable_weight, self.config.undesirable_weight)
        loss = mean(weights * sigmoid(-leads))  # 1 - s(x) = s(-x)
        rewards, desirable = rewards.detach(), is_desirable.float()
        return loss, {
            **({"kto/accuracy": mean(data["accuracies"])} if "accuracies" in data else {}),
            _DESIRABLE: mean(rewards * desirable),
            _UNDESIRABLE: mean(rewards * (1.0 - desirable)),
            "kto/desirable_frac": mean(desirable),
            "kto/kl": mean(data["kl_estimates"]),
        }

    def reported_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """The metrics with mean rewards of each label that occurs, and with the margin if both do."""
        share = metrics["kto/desirable_frac"]
        means = divided_by_shares(metrics, {_DESIRABLE: share, _UNDESIRABLE: 1.0 - share})
        if {_DESIRABLE, _UNDESIRABLE} <= means.keys():
            means["kto/margin"] = means[_DESIRABLE] - means[_UNDESIRABLE]
        return means


class BradleyTerryLossFn(LossFunction):
    """The negative log-likelihood of the preferences, averaged over the pairs of the global batch.

    With r_c and r_r the scores of a pair, the values after their last tokens, and m the margin of the pair's record (0 by
    default):

        -log s(r_c - r_r - m) + w (r_c + r_r)^2

    Bradley and Terry 1952, with the probability s(r_c - r_r) that the chosen answer is preferred. The margin is that of
    Llama 2, https://arxiv.org/abs/2307.09288, equation 2. The second term fixes the mean of all scores, which pairs leave
    undetermined: https://arxiv.org/abs/2312.09244, equation 2.

    It is called with values instead of log-probabilities, and uses the value after each row's last token; only this token
    must be in `token_mask`.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    rows_per_unit = 2
    required_keys = frozenset({"margins"})

    def __init__(self, config: BradleyTerryLossConfig | None = None) -> None:
        self.config = config or BradleyTerryLossConfig()

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss and its metrics from the values [B, T] float32, the first argument; see `LossFunction`.

        Both rows of a pair have the same `sample_mask`.
        """
        mean = _mean_over_pairs(data, global_valid_seqs)
        scores = last_values(next_token_logprobs, data["input_lengths"])
        chosen, rejected = scores[0::2], scores[1::2]
        leads = chosen - rejected
        preference = mean(-logsigmoid(leads - data["margins"][0::2]))
        centring = mean((chosen + rejected).square())
        loss = preference + self.config.centring_weight * centring
        leads = leads.detach()
        return loss, {
            "loss/preference": preference.detach(),
            "loss/centring": centring.detach(),
            "preference/accuracy": mean(_is_preferred(leads)),
            "preference/margin": mean(leads),
            "preference/score_chosen": mean(chosen.detach()),
            "preference/score_rejected": mean(rejected.detach()),
        }


def last_values(values: torch.Tensor, input_lengths: torch.Tensor) -> torch.Tensor:
    """[B] the value after each row's last token.

    Args:
        values: [B, T] float32.
        input_lengths: [B] int64, tokens of each row.
    """
    return values.gather(1, (input_lengths - 1).unsqueeze(1)).squeeze(1)
