"""Takes one optimizer step on all rows, whatever the batch size of a step."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.interfaces.worker import GlobalCounts


class Worker(HFPolicyWorker):
    def train(self, data, loss_fn, *, counts, eval_mode=False, mbs=None):
        one = GlobalCounts(
            valid_seqs=sum(each.valid_seqs for each in counts), valid_toks=sum(each.valid_toks for each in counts)
        )
        return super().train(data, loss_fn, counts=[one], eval_mode=eval_mode, mbs=mbs)


class Policy(PolicyOf):
    worker = Worker
