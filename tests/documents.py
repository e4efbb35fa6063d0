"""The pages of README, docs and examples, and the commands and configs that they show."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("*/README.md")),
    *sorted((ROOT / "examples").rglob("*.yaml")),
]
NEMO_RL = """
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4, max_num_steps: 5}
policy: {model_name: some/model, generation: {backend: vllm, max_new_tokens: 16}}
data: {train: {dataset_name: ResponseDataset, data_path: train.jsonl}}
env: {math: {num_workers: 1}}
"""


def commands(page):
    """The words of each `rlcore ...` line in the command blocks of a page, without comments."""
    text = re.sub(r"\\\n#? *", " ", page.read_text())
    lines = re.findall(r"^(?:#? {4,5}|\$ )?(rlcore [a-z][\w-]* ?.*)$", text, flags=re.MULTILINE)
    return [shlex.split(line, comments=True)[1:] for line in lines if "[OPTIONS]" not in line]


SHOWN = [(page.relative_to(ROOT).as_posix(), words) for page in PAGES for words in commands(page)]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


MODULES = {
    "my_agents/adder.py": blocks("docs/agents.md", "python")[0],
    "my_package/my_environment.py": "\n".join(blocks("docs/environments.md", "python")),
    "my_samplers.py": blocks("docs/curricula.md", "python")[0],
    "my_callbacks.py": blocks("docs/callbacks.md", "python")[0],
    "my_rewards.py": blocks("docs/rewards.md", "python")[0] + "\n\ncorrect = exact = short\n",
    "my_tools.py": "\n".join(blocks("docs/tools.md", "python")),
}
"""Modules that configs and commands name, with the code of their pages."""


def write_modules(folder):
    for name, code in MODULES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
