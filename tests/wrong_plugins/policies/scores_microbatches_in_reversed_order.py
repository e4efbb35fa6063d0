"""Returns the scores of the microbatches in reversed order, and 0.0 on padding."""

import torch
from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def score_microbatches(self, microbatches, *, topk=None, reference=False):
        return super().score_microbatches(microbatches, topk=topk, reference=reference)[::-1]

    def get_logprobs(self, data, *, reference=False):
        scores = super().get_logprobs(data, reference=reference)
        inside = torch.arange(data["input_ids"].shape[1]) < data["input_lengths"].unsqueeze(1)
        scores["logprobs"] = torch.where(inside, scores["logprobs"], 0.0)
        return scores


class Policy(PolicyOf):
    worker = Worker
