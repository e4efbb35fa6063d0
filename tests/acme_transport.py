"""A weight transport as a plugin would have it: built from the interface alone, through files, one bucket after the other."""

from tempfile import TemporaryDirectory

from rl_core.interfaces.policy import WeightTransport


class AcmeFiles(WeightTransport):
    name = "acme_files"
    requires = ("disk",)

    def push(self, policy, generation):
        moved = 0
        with TemporaryDirectory(dir=self.context.folder) as folder:
            buckets = policy.prepare_weights_for_ipc(self.context.buffer_bytes, receiver_dtypes=self.context.receiver_dtypes())
            for number, names in enumerate(buckets):
                bucket = policy.get_weights_ipc_handles(names, file=f"{folder}/{number}.safetensors")
                generation.update_weights(bucket)
                moved += bucket["num_bytes"]
        return moved
