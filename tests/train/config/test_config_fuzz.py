"""Hundreds of broken configs: each gives a run or a list of errors, never another exception."""

import copy
import os
import random
import string
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.config.diagnostics import InvalidConfigError
from rl_core.errors import UserError
from rl_train.config.loader import LoadedConfig, load_config

FOLDER = Path(__file__).parents[3] / "examples"
EXAMPLES = [path.read_text().replace("addition/", f"{FOLDER}/addition/") for path in sorted(FOLDER.glob("*_addition.yaml"))]
"""Each a run as it stands, from any folder."""
VALUES = [
    None, True, False, 0, -1, 1.5, 10**30, float("nan"), float("inf"), "", " ", "x", "no", "1e-5", "${policy.model_name}",
    "${", "${a", "${..}", "${.x}", "${policy}", "${grpo.seed}", "${oc.env:NO_SUCH}", "${oc.env:HOME}", "\\${x}", "???", "a.b.C",
    "os.path:join", "__main__.X", "..", "a..b", ":", "\u202e", "\U0001f600", "é", [], [1], ["x", None], {}, {"a": 1},
    {"backend": "hf"}, {"name": "math"}, [[[[]]]], {"_override_": True}, "x" * 5000, "/", "~", "\u0000", "hf", "vllm", "jsonl",
]  # fmt: skip
KEYS = ["x", "backend", "name", "env_cls", "hf_cfg", "defaults", "_override_", "<<", "", ".", "a.b", "é", "grpo", "sft", "0",
        "policy", "generation", "loggers", "train", "\u202e", "model_config", "__class__", "self", "$"]  # fmt: skip


def outcome(path, overrides, registry):
    """A run or the list of errors; other exceptions are not caught."""
    try:
        return load_config(path, overrides, registry=registry)
    except InvalidConfigError as error:
        return error


def containers(value):
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from containers(item)
    elif isinstance(value, list):
        yield value
        for item in value:
            yield from containers(item)


def mutate_tree(rng, tree):
    for _ in range(rng.randint(1, 4)):
        filled = [item for item in containers(tree) if item]
        if not filled:
            return tree
        holder = rng.choice(filled)
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        match rng.choice(["delete", "rename", "retype", "nest", "add", "typo", "move"]):
            case "delete":
                del holder[key]
            case "rename" if isinstance(holder, dict):
                holder[rng.choice(KEYS)] = holder.pop(key)
            case "typo" if isinstance(holder, dict):
                at = rng.randrange(len(str(key)) + 1)
                holder[str(key)[:at] + rng.choice(string.ascii_lowercase) + str(key)[at + 1 :]] = holder.pop(key)
            case "nest":
                holder[key] = rng.choice([[holder[key]], {rng.choice(KEYS): holder[key]}])
            case "add" if isinstance(holder, dict):
                holder[rng.choice(KEYS)] = copy.deepcopy(rng.choice(VALUES))
            case "move":
                holder[key] = copy.deepcopy(rng.choice(filled))
            case _:
                holder[key] = copy.deepcopy(rng.choice(VALUES))
    return tree


def mutate_text(rng, text):
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        lines = text.splitlines(keepends=True)
        line = rng.randrange(len(lines)) if lines else 0
        match rng.choice(["cut", "insert", "double", "swap", "indent", "tab", "drop", "character"]):
            case "cut":
                text = text[:at] + text[at + rng.randint(1, 20) :]
            case "insert":
                junk = [
                    ":",
                    "- ",
                    "{",
                    "}",
                    "[",
                    "]",
                    "'",
                    '"',
                    "\n",
                    "&a ",
                    "*a",
                    "!!int ",
                    "#",
                    "|",
                    ">",
                    "%",
                    "---\n",
                    "<<: ",
                    "? ",
                    "\t",
                ]
                text = text[:at] + rng.choice(junk) + text[at:]
            case "double" if lines:
                text = "".join([*lines[: line + 1], *lines[line:]])
            case "swap" if len(lines) > 1:
                other = rng.randrange(len(lines))
                lines[line], lines[other] = lines[other], lines[line]
                text = "".join(lines)
            case "indent" if lines:
                text = "".join([*lines[:line], " " * rng.randint(1, 4) + lines[line], *lines[line + 1 :]])
            case "tab" if lines:
                text = "".join([*lines[:line], "\t" + lines[line], *lines[line + 1 :]])
            case "drop" if lines:
                text = "".join(lines[:line] + lines[line + 1 :])
            case _:
                text = (
                    text[:at]
                    + chr(rng.choice([0, 7, 0x85, 0xA0, 0x2028, 0xFEFF, 0x1F600, rng.randrange(32, 0xD7FF)]))
                    + text[at:]
                )
    return text


FULL = pytest.mark.full("the same mutations, drawn from other seeds")
BLOCKS = [0, pytest.param(1, marks=FULL), pytest.param(2, marks=FULL)]


def write(path, text):
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_a_config_with_mutated_values_gives_a_run_or_a_list_of_errors(files, block):
    rng = random.Random(block)
    outcomes = []
    for _ in range(100):
        tree = mutate_tree(rng, yaml.safe_load(rng.choice(EXAMPLES)))
        path = write(files.folder / "config.yaml", yaml.safe_dump(tree, allow_unicode=True, sort_keys=False))
        outcomes.append(outcome(path, [], files.registry))
    # If all were rejected or all accepted, the mutations would not reach later checks.
    assert 0 < sum(isinstance(item, LoadedConfig) for item in outcomes) < len(outcomes)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_config_with_mutated_text_gives_a_run_or_a_list_of_errors(files, block):
    rng = random.Random(100 + block)
    outcomes = []
    for _ in range(60):
        path = write(files.folder / "config.yaml", mutate_text(rng, rng.choice(EXAMPLES)))
        outcomes.append(outcome(path, [], files.registry))
    assert 0 < sum(isinstance(item, LoadedConfig) for item in outcomes) < len(outcomes)


def test_random_bytes_give_a_list_of_errors(files):
    rng = random.Random(7)
    for _ in range(60):
        path = files.folder / "config.yaml"
        path.write_bytes(rng.randbytes(rng.randint(1, 300)))
        assert isinstance(outcome(path, [], files.registry), InvalidConfigError)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(override=st.one_of(
    st.text(max_size=40),
    st.builds(
        "{}{}={}".format,
        st.sampled_from(["", "++", "+", "~"]),
        st.sampled_from(
            ["policy", "policy.backend", "policy.generation", "env", "env.math", "env.x.y", "grpo", "grpo.seed", "data.train",
             "logger.loggers.x", "policy.optimizer.kwargs.x", "data.train.operations.0", "policy.hf_cfg", "a", "[0]"]
        ),
        st.one_of(st.text(max_size=20), st.sampled_from([yaml.safe_dump(value).strip() for value in VALUES])),
    ),
))  # fmt: skip
def test_any_override_gives_a_run_or_a_list_of_errors(files, override):
    found = outcome(write(files.folder / "config.yaml", EXAMPLES[0]), [override], files.registry)
    assert isinstance(found, LoadedConfig) or str(found)


@pytest.mark.slow
def test_mutated_inherited_files_give_a_run_or_a_list_of_errors(files):
    rng = random.Random(11)
    outcomes = []
    for _ in range(60):
        write(files.folder / "base.yaml", mutate_text(rng, rng.choice(EXAMPLES)))
        tree = mutate_tree(rng, yaml.safe_load(rng.choice(EXAMPLES)))
        tree = {"defaults": "base.yaml", **tree} if isinstance(tree, dict) else tree
        path = write(files.folder / "config.yaml", yaml.safe_dump(tree, allow_unicode=True))
        outcomes.append(outcome(path, [f"cluster.num_nodes={rng.choice(['1', 'x', '${policy.backend}'])}"], files.registry))
    located = {name for item in outcomes for name in ("base.yaml:", "config.yaml:") if name in str(item)}
    assert located == {"base.yaml:", "config.yaml:"}, "errors name the file that contains the mistake"


def test_a_folder_a_device_and_a_closed_file_are_user_errors(files):
    sealed = files.write("grpo:")
    cases = [files.folder, Path(os.devnull), sealed]
    for path in cases:
        with pytest.raises(UserError):
            load_config(path, registry=files.registry)
