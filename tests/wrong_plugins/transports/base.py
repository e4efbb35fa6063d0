"""What all transports here have in common: a transport through files, one at a time, whose steps can be replaced."""

from pathlib import Path
from tempfile import TemporaryDirectory

from rl_core.errors import DeadlineExceededError
from rl_core.interfaces.policy import WeightTransport


class Files(WeightTransport):
    name = "files"
    requires = ("disk",)

    def push(self, policy, generation):
        import time

        end, moved = time.monotonic() + self.context.deadline_s, 0
        with TemporaryDirectory(dir=self.context.folder) as folder:
            for number, names in enumerate(self.buckets(policy)):
                if time.monotonic() > end:
                    raise DeadlineExceededError("the deadline of the refit has passed")
                handles = policy.get_weights_ipc_handles(names, file=str(Path(folder) / f"{number}.safetensors"))
                self.load(generation, handles)
                Path(handles["file"]).unlink()
                moved += int(handles["num_bytes"])
        return moved

    def buckets(self, policy):
        dtypes = self.context.receiver_dtypes()
        return policy.prepare_weights_for_ipc(self.context.buffer_bytes, receiver_dtypes=dtypes)

    def load(self, generation, handles):
        generation.update_weights(handles)
