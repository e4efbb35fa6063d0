"""The examples in docs/config.md work as shown."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "config.md").read_text()


def block(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_the_first_config_is_valid(files):
    run = files.load(block("yaml")[0]).run
    assert (run.algorithm_name, run.policy.backend, list(run.env)) == ("grpo", "hf", ["arithmetic"])


def test_the_errors_that_are_shown_are_those_that_are_printed(files):
    text = (
        block("yaml")[0]
        .replace("num_prompts_per_step: 8", "num_prompts_per_step: eight")
        .replace("    backend: hf", "    backend: vllm")
        .replace("  generation:", "  temperature: 1.0\n  generation:")
    )
    assert files.errors(text, "policy.precision=bf16") == block("text")[0].splitlines()


def test_the_overrides_that_are_shown_can_be_applied(files):
    run = files.load(
        block("yaml")[0],
        "policy.precision=bfloat16",
        "grpo.max_num_steps=20",
        "++policy.optimizer.kwargs.betas=[0.9, 0.95]",
    ).run
    assert (run.policy.precision, run.algorithm.max_num_steps) == ("bfloat16", 20)


def test_the_calls_that_are_shown_work(files, monkeypatch):
    files.write(block("yaml")[0])
    monkeypatch.chdir(files.folder)
    names = {}
    exec(block("python")[0], names)
    assert names["loaded"].run.policy.precision == "bfloat16"
