"""What all policies here have in common: the Transformers policy with another worker."""

from rl_backends_base.distributed_policy import DistributedPolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.interfaces.policy import LossFunction


class PolicyOf(DistributedPolicy):
    """A policy of `worker`, which a subclass sets; its section is that of the backend `hf`."""

    worker = None
    capabilities = ("in_process", "multiple_ranks", "by_reference", "shared_memory", "topk_logprobs")

    def __init__(self, *, config, **kwargs):
        section = HFPolicyConfig(**{**dict(config), "backend": "hf"})
        super().__init__(worker_class=self.worker, config=section, **kwargs)


class TrainsOnOtherScores(HFPolicyWorker):
    """Passes `altered` log-probabilities to the loss, and returns right ones from `get_logprobs`."""

    _trains = False

    def load(self):
        facts = super().load()
        score = self.model.score
        self.model.score = lambda inputs: self.altered(score(inputs)) if self._trains else score(inputs)
        return facts

    def train_step(self, *args, **kwargs):
        self._trains = True
        try:
            return super().train_step(*args, **kwargs)
        finally:
            self._trains = False


class OtherLoss(LossFunction):
    """`loss_fn` with other losses or metrics: `change` takes and returns both."""

    def __init__(self, loss_fn, change):
        self.loss_fn, self.change = loss_fn, change
        for name in ("loss_type", "rows_per_unit", "candidates_key", "on_policy", "metric_reductions", "allows_dropout"):
            setattr(self, name, getattr(loss_fn, name))

    @property
    def required_keys(self):
        return self.loss_fn.required_keys

    def rows_with_gradient(self, data):
        return self.loss_fn.rows_with_gradient(data)

    def __call__(self, *args):
        return self.change(*self.loss_fn(*args))


class DividesTheLoss(HFPolicyWorker):
    """Divides each loss by `number`, such as the number of its microbatches or ranks."""

    number = 1

    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        divided = OtherLoss(loss_fn, lambda loss, metrics: (loss / self.number, metrics))
        return super().train_step(microbatches, divided, counts, eval_mode=eval_mode)
