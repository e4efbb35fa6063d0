"""Likelihood in which an answer's weight falls with its length, as far as one wants: a loss of your own, given by its path.

    loss = mean over answers of  sum over tokens of -log p(token)  /  length ** exponent

At exponent 0 a long answer weighs as its tokens do, at 1 every answer weighs the same.
"""

from rl_core.interfaces.loss import LossFunction, LossType


class LengthNormalisedLoss(LossFunction):
    loss_type = LossType.SEQUENCE_LEVEL  # what the metrics of held-out rows are means of

    def __init__(self, config):
        # Given by its path, a loss gets every key of `loss_fn`, unchecked: what it can be is for the loss to say.
        self.exponent = float(getattr(config, "exponent", 1.0))
        if not 0.0 <= self.exponent <= 1.0:
            raise ValueError(f"loss_fn.exponent is {self.exponent}: it must be from 0 to 1")

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        # [B, T]: position t scores token t. 1 on the tokens that are trained, 0 on prompts, padding and dropped rows.
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        nll = -(next_token_logprobs * mask).sum(-1)  # [B], in nats
        lengths = mask.sum(-1).clamp(min=1.0)
        # By the count of the whole batch, over all ranks and microbatches: so neither of them changes the gradient.
        loss = (nll / lengths**self.exponent).sum() / global_valid_seqs.clamp(min=1.0)
        return loss, {
            "loss/nll_of_answers": nll.detach().sum() / global_valid_seqs.clamp(min=1.0),
            "loss/nll_of_tokens": nll.detach().sum() / global_valid_toks.clamp(min=1.0),
        }
