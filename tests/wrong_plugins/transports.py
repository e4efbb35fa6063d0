"""Weight transports that break a promise of transports; all send files, one at a time, in steps that can be replaced."""

import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file

from rl_core.errors import DeadlineExceededError, RLCoreError
from rl_core.interfaces.policy import WeightTransport


class Files(WeightTransport):
    name = "files"
    requires = ("disk",)

    def push(self, policy, generation):
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


class Right(Files):
    """The right control: files as they are."""


class ClosesOnce(Files):
    """Closing it a second time is an error."""

    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("the transport is closed")
        self.closed = True


class HasNoDeadline(Files):
    """Waits for the engine for any time."""

    def __init__(self, context):
        super().__init__(replace(context, deadline_s=float("inf")))


class IgnoresErrorsOfTheEngine(Files):
    """Continues with the next bucket if the engine cannot load one."""

    def load(self, generation, handles):
        with suppress(RLCoreError):
            super().load(generation, handles)


class IgnoresTheBuffer(Files):
    """Sends all weights at once."""

    def buckets(self, policy):
        # The first bucket is sent alone, so that there is a time to look at the deadline.
        first, *others = super().buckets(policy)
        return [first, [name for names in others for name in names]]


class LeavesItsFiles(Files):
    """Keeps a copy of every file in the folder of the run."""

    def load(self, generation, handles):
        super().load(generation, handles)
        shutil.copy(handles["file"], self.context.folder)


class LeavesOutTheLastBucket(Files):
    """An off-by-one error: the last bucket is not sent."""

    def buckets(self, policy):
        return super().buckets(policy)[:-1]


class ReturnsTheNumberOfBuckets(Files):
    """Returns how many buckets it sent, instead of their bytes."""

    def push(self, policy, generation):
        super().push(policy, generation)
        return len(self.buckets(policy))


class SendsFloat16(Files):
    """Halves the bytes: wide tensors are rounded to float16, and widened again on arrival."""

    def load(self, generation, handles):
        tensors = load_file(handles["file"])
        wide = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
        save_file({name: t.half().float() if name in wide else t for name, t in tensors.items()}, handles["file"])
        super().load(generation, handles)
