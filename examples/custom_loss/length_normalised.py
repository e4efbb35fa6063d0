"""Likelihood with adjustable length normalization: a custom loss, named by its import path.

    loss = mean over answers of  sum over tokens of -log p(token)  /  length ** exponent

With exponent 0 the weight of an answer is proportional to its length; with 1 all answers have the same weight.
"""

from rl_core.interfaces.policy import LossFunction, LossType


class LengthNormalisedLoss(LossFunction):
    loss_type = LossType.SEQUENCE_LEVEL  # metrics of held-out rows are means over sequences

    def __init__(self, config):
        # A loss named by its import path gets every key of `loss_fn` unchecked, so it checks them itself.
        self.exponent = float(getattr(config, "exponent", 1.0))
        if not 0.0 <= self.exponent <= 1.0:
            raise ValueError(f"loss_fn.exponent is {self.exponent}: it must be from 0 to 1")

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        # [B, T]: position t scores token t. 1 on trained tokens, 0 on prompts, padding and dropped rows.
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        nll = -(next_token_logprobs * mask).sum(-1)  # [B], in nats
        lengths = mask.sum(-1).clamp(min=1.0)
        # Divide by the count of the global batch, so ranks and microbatches do not change the gradient.
        loss = (nll / lengths**self.exponent).sum() / global_valid_seqs.clamp(min=1.0)
        return loss, {
            "loss/nll_of_answers": nll.detach().sum() / global_valid_seqs.clamp(min=1.0),
            "loss/nll_of_tokens": nll.detach().sum() / global_valid_toks.clamp(min=1.0),
        }
