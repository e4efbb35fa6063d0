"""The section `profiling`: which steps are profiled."""

from rl_train.config.rules import run as run_module
from rl_train.config.rules.rule import CheckedConfig
from rl_train.config.rules.run import recorded_memory_is_that_of_a_gpu


def test_steps_to_profile_must_be_in_the_run_and_the_models_in_this_process(files, good):
    text = good.replace("grpo:\n", "grpo:\n  max_num_steps: 5\n")
    run = files.load(text + "profiling: {steps: [3, 5]}\n", "cluster.backend=in_process").run
    assert run.profiling.steps == [3, 5]
    [error] = files.errors(text + "profiling: {steps: [3, 6]}\n", "cluster.backend=in_process")
    assert "profiling.steps: contains 6, but the run ends after step 5" in error
    [error] = files.errors(text + "profiling: {steps: [3]}\n")
    assert "profiling.steps: requires cluster.backend: in_process" in error
    [error] = files.errors(text + "profiling: {steps: [3], memory: true}\n")
    assert "profiling.steps: requires cluster.backend: in_process" in error
    assert files.errors(text + "profiling: {steps: [0]}\n", "cluster.backend=in_process")


def test_recorded_memory_needs_a_gpu_and_steps(files, good, monkeypatch):
    def problems(profiling):
        text = good.replace("grpo:\n", "grpo:\n  max_num_steps: 5\n") + f"profiling: {profiling}\n"
        run = files.load(text, "cluster.backend=in_process").run
        return [
            str(each) for each in recorded_memory_is_that_of_a_gpu.problems(CheckedConfig(run=run, registry=files.registry))
        ]

    monkeypatch.setattr(run_module, "_has_gpu", lambda: False)
    [problem] = problems("{steps: [3], memory: true}")
    assert "profiling.memory: records allocations on a GPU, and this run uses none" in problem
    monkeypatch.setattr(run_module, "_has_gpu", lambda: True)
    [problem] = problems("{memory: true}")
    assert "profiling.memory: has no effect without profiling.steps" in problem
    assert problems("{steps: [3], memory: true}") == []
