"""The policy: LitGPT's model and its files. On several ranks, each has a shard of every weight (FSDP2)."""

from rl_backends_base import FullyShard, TorchPolicyWorker, join_ranks
from rl_backends_base.shards import fill
from rl_backends_litgpt import model as litgpt_model
from rl_core.errors import CheckpointError


class LitGPTPolicyWorker(TorchPolicyWorker):
    """One rank."""

    def join(self):
        join_ranks(self.context)
        return FullyShard(self.context, compute_dtype=self.dtype) if self.context.world_size > 1 else super().join()

    def build(self):
        return litgpt_model.load(self.config.model_name)

    def place(self):
        if not self.parallel.shards:
            return super().place()
        self.parallel.distribute(self.model, self.model.transformer.h, trainable=not self.config.frozen)
        self.model.to(self.device).eval()

    def logits(self, batch):
        return self.model(batch["input_ids"])[..., : self.model.config.vocab_size]  # the rest pads the matrix

    def save_weights(self, folder):
        weights = dict(self.iter_weights())  # whole tensors, gathered by all ranks
        if self.context.rank == 0:
            litgpt_model.save(weights, self.model.config, folder)

    def load_weights(self, folder):
        stored, own = litgpt_model.read_weights(folder), self.checkpoint_weights()
        if {name: each.shape for name, each in stored.items()} != {name: each.shape for name, each in own.items()}:
            raise CheckpointError(f"{folder} is of another model.")
        for name, each in own.items():
            fill(each, stored[name])
