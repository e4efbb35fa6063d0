"""The mean over the tokens of the microbatch, so the gradient depends on how a batch is divided."""

from rl_core.interfaces.policy import LossFunction, LossType


class Loss(LossFunction):
    loss_type = LossType.TOKEN_LEVEL

    def __init__(self, config):
        pass

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        loss = -(next_token_logprobs * mask).sum() / mask.sum().clamp(min=1.0)
        return loss, {"loss/nll": loss.detach()}
