"""Weighted by `advantages`, which `required_keys` does not name, so workers do not get them."""

from rl_core.interfaces.policy import LossFunction, LossType


class Loss(LossFunction):
    loss_type = LossType.TOKEN_LEVEL

    def __init__(self, config):
        pass

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        next_token_logprobs = next_token_logprobs * data["advantages"]
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        loss = -(next_token_logprobs * mask).sum() / global_valid_toks.clamp(min=1.0)
        return loss, {"loss/nll": loss.detach()}
