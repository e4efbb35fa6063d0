"""Losses that break a promise of losses; `Right` is the control: the mean over the tokens of the global batch."""

from rl_core.interfaces.policy import LossFunction, LossType


class Right(LossFunction):
    """The mean negative log-likelihood over the tokens of the global batch, whose steps can be replaced."""

    loss_type = LossType.TOKEN_LEVEL

    def __init__(self, config):
        pass

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        loss = -(self.weighted(next_token_logprobs, data) * mask).sum() / self.count(mask, global_valid_toks).clamp(min=1.0)
        return loss, {"loss/nll": loss.detach()}

    def weighted(self, logprobs, data):
        return logprobs

    def count(self, mask, global_valid_toks):
        return global_valid_toks


class AveragesOverTheMicrobatch(Right):
    """The mean over the tokens of the microbatch, so the gradient depends on how a batch is divided."""

    def count(self, mask, global_valid_toks):
        return mask.sum()


class LooksForAnUndeclaredColumn(Right):
    """Weighted by `advantages` if there are any: workers get none, so it is never weighted."""

    def weighted(self, logprobs, data):
        weights = data.get("advantages")
        return logprobs if weights is None else logprobs * weights


class ReadsAnUndeclaredColumn(Right):
    """Weighted by `advantages`, which `required_keys` does not name, so workers do not get them."""

    def weighted(self, logprobs, data):
        return logprobs * data["advantages"]
