"""The section `profiling`: which steps are profiled."""


def test_steps_to_profile_must_be_in_the_run_and_the_models_in_this_process(files, good):
    text = good.replace("grpo:\n", "grpo:\n  max_num_steps: 5\n")
    run = files.load(text + "profiling: {steps: [3, 5]}\n", "cluster.backend=in_process").run
    assert run.profiling.steps == [3, 5]
    [error] = files.errors(text + "profiling: {steps: [3, 6]}\n", "cluster.backend=in_process")
    assert "profiling.steps: contains 6, but the run ends after step 5" in error
    [error] = files.errors(text + "profiling: {steps: [3]}\n")
    assert "profiling.steps: requires cluster.backend: in_process" in error
    assert files.errors(text + "profiling: {steps: [0]}\n", "cluster.backend=in_process")
