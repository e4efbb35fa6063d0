"""Which errors of workers count as full memory."""

import errno

import pytest
import torch

from rl_core.cluster.in_process import InProcessWorkerGroup
from rl_core.errors import RLCoreError, UserError, WorkerError
from rl_core.interfaces.worker import MeasuredWorker


class Raising(MeasuredWorker):
    """A worker that raises what it is given."""

    def __init__(self, context):
        self.context = context
        self.held = torch.ones(2**28, dtype=torch.uint8)

    def fail(self, error):
        raise error

    train = generate = fail

    def tensors_by_kind(self):
        return {"weights": [self.held, self.held], "copies": [self.held]}

    def memory_advice(self, doing):
        return f"Change something for {doing}."


class Plain:
    """A worker that does not report its memory, such as that of an environment."""

    def fail(self, error):
        raise error


def error_of(worker_class, method, error):
    with pytest.raises(WorkerError) as raised:
        InProcessWorkerGroup(worker_class).run_all(method, error)
    return raised.value.__cause__


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_full_memory_is_explained_with_each_tensor_once(error):
    explained = error_of(Raising, "train", error)
    assert type(explained) is RLCoreError
    assert explained.__cause__ is error
    assert str(explained).startswith(f"Out of memory in training ({type(error).__name__}: ")
    assert " GiB were, in GiB: weights 0.25, " in str(explained)
    assert "copies" not in str(explained)
    assert str(explained).endswith(" Change something for training.")


@pytest.mark.parametrize(("method", "phase"), [("generate", "sampling"), ("fail", "a refit")])
def test_the_phase_follows_from_the_method(method, phase):
    assert f"Out of memory in {phase} (" in str(error_of(Raising, method, MemoryError()))


@pytest.mark.parametrize("error", [ValueError("too long"), UserError("out of memory"), KeyError("memory")])
def test_other_errors_and_those_with_an_explanation_are_not_changed(error):
    assert error_of(Raising, "train", error) is error


def test_errors_of_workers_that_do_not_report_their_memory_are_not_changed():
    error = MemoryError()
    assert error_of(Plain, "fail", error) is error
