"""The examples in docs/config.md work as shown."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from rl_train.config.foreign_names import INSTEAD

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "config.md").read_text()


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
    [calls] = (code for code in block("python") if "load_config(" in code)
    exec(calls, names)
    assert names["loaded"].run.policy.precision == "bfloat16"


def trl_names():
    """The settings of TRL in the table of `docs/migrate.md`, with our keys for each."""
    table = (DOCS / "migrate.md").read_text().partition("## TRL")[2].partition("## ")[0]
    known = defaultdict(set)
    for theirs, ours in (line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")):
        names, keys = re.findall(r"`(\w+)`", theirs), re.findall(r"`([a-z_.<>]+)", ours)
        for index, name in enumerate(names):
            known[name].update(keys[index : index + 1] if len(keys) == len(names) else keys)
    return known


@pytest.mark.parametrize("name", trl_names())
def test_a_setting_of_trl_suggests_our_key(files, good, name):
    [error] = files.errors(good.replace("  arithmetic: {}", f"  own: {{reward_fn: os.path.join}}\n{name}: 1"))
    assert f"There is no section {name!r}. {INSTEAD.get(name, 'Did you mean the key ')}" in error
    assert any(key.replace("<task>", "own") in error for key in trl_names()[name])


def test_a_setting_of_trl_in_a_section_suggests_the_key_of_that_section(files, good):
    assert files.errors(good.replace("grpo:\n", "grpo:\n  eval_steps: 10\n")) == [
        "config.yaml:2:3: grpo.eval_steps: grpo has no key 'eval_steps'. Did you mean 'val_period'?"
    ]
