"""Full memory of Megatron's worker is reported with the phase, its buffers and its keys."""

import pytest

from rl_core.errors import RLCoreError, WorkerError

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    ("failing", "phase", "key"),
    [
        ("_inputs", "training", "lower `train_micro_batch_size` from 8 to 4;"),
        ("step", "the optimizer step", "raise `megatron_cfg.tensor_model_parallel_size` from 1 to 2"),
    ],
)
def test_full_memory_is_reported_with_phase_contents_and_keys(policy, monkeypatch, failing, phase, key):
    from policy_cases import NLL, make_rows

    trained, rows = policy(), make_rows()
    trained.train(rows, NLL())
    worker = trained.group.worker

    def fail(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(worker if failing == "_inputs" else worker.state, failing, fail)
    with pytest.raises(WorkerError) as raised:
        trained.train(rows, NLL())
    error = raised.value.__cause__
    assert type(error) is RLCoreError
    assert str(error).startswith(f"Out of memory in {phase} (RuntimeError: ")
    assert " GiB were, in GiB: weights 0.00, gradients 0.00, optimizer state 0.00, activations and others " in str(error)
    assert key in str(error)
