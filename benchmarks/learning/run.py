"""Learning of one environment: held-out success before and after GRPO, over several seeds.

    OMP_NUM_THREADS=1 python benchmarks/learning/run.py sliding_puzzle
    python benchmarks/learning/run.py tools --seeds 0 --work /tmp/trial --no-results --warm-up 20 grpo.max_num_steps=5
    python benchmarks/learning/run.py reasoning_gym --label score env.reasoning_gym.reward=score

A model with random weights is warmed up with SFT on demonstrations, and then trained from each seed. Success is decided by
`tasks.py` from the text of the rollouts, not by the reward. Results: benchmarks/results/learning_<task>.json, a curve in
docs/curves, and the rollouts to review in the work folder. Finished commands are not repeated: delete the work folder to start
again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from intervals import difference, wilson
from tasks import TASKS, Task, is_held_out, problem
from tiny_model import make_tokenizer, write_untrained_model

from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.preparation import Preparation
from rl_train.config.loader import load_config
from rl_train.metrics.jsonl import read_jsonl
from rlcore_cli.main import app

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def rlcore(*arguments: str) -> None:
    """Run an `rlcore` command in this process, which saves the imports of a new one."""
    app([*arguments], standalone_mode=False)


def write_data(task: Task, work: Path) -> list[str]:
    """Write the problems of a task by split, and return the overrides of the config that name the files."""
    if task.problems is None:
        return []
    problems = list(task.problems())
    random.Random(0).shuffle(problems)
    files = {}
    for split in ("train", "validation"):
        files[split] = work / f"{split}.jsonl"
        write_jsonl(files[split], [record for record in problems if is_held_out(record) == (split == "validation")])
    return [f"data.{split}.path={path}" for split, path in files.items()]


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def warm_up(name: str, task: Task, work: Path, data: Sequence[str]) -> Path | None:
    """The folder of the model that training starts from; None is the model of the config."""
    made = work / "warm"
    if (made / "config.json").exists():
        return made
    untrained, conversations = work / "untrained", work / "demonstrations.jsonl"
    records = training_records(HERE / f"{name}.yaml", data)
    if task.demonstrate is None:
        return ROOT / task.model if task.model is not None else None
    draw = random.Random(0)
    tools = {"tools": list(task.tools)} if task.tools else {}
    rows = [
        {"messages": task.demonstrate(records[index % len(records)], draw), **tools}
        for index in range(task.conversations * task.warm_up)
    ]
    write_jsonl(conversations, rows)
    texts = [json.dumps(row) for row in rows[:200] if task.tools]
    texts += [message["content"] or "" for row in rows[:2000] for message in row["messages"]]
    whole = task.whole() if callable(task.whole) else task.whole
    tokenizer = make_tokenizer(texts, vocabulary=task.vocabulary, spelled=task.spelled, whole=whole)
    size = write_untrained_model(untrained, tokenizer, hidden=task.hidden, layers=task.layers)
    print(f"{name}: {size:,} parameters, {len(tokenizer)} tokens", flush=True)
    rlcore(
        "train",
        str(HERE / "warm_up.yaml"),
        f"sft.max_num_steps={task.warm_up}",
        f"sft.global_batch_size={task.conversations}",
        f"policy.optimizer.kwargs.lr={task.learning_rate}",
        f"policy.model_name={untrained}",
        f"data.train.path={conversations}",
        f"logger.log_dir={work}",
        "logger.run_name=warm_up",
    )
    shutil.copytree(next((work / "warm_up").glob("checkpoints/step_*/policy/weights")), made)
    return made


def training_records(config: Path, data: Sequence[str]) -> Any:
    """The records of the training data of a config; none of its problems is held out."""
    registry = Registry(discover())
    read = Preparation(load_config(config, list(data), registry=registry).run, registry).data
    assert read.train is not None
    trained, held_out = ({problem(record) for record in source.records} for source in (read.train, read.validation[""]))
    assert not trained & held_out, f"{len(trained & held_out)} held-out problems are in the training data"
    return read.train.records


def evaluate(task: Task, config: Path, output: Path, *arguments: str) -> list[dict[str, Any]]:
    """Answers to up to 512 held-out problems, sampled and greedy."""
    if not output.exists():
        modes = ("--samples", str(task.samples), "--greedy", "--json", str(output))
        rlcore("eval", str(config), *arguments, "grpo.max_val_samples=512", *modes)
    return read_jsonl(output.with_name(f"{output.stem}.prompts.jsonl"))


def successes(rows: Sequence[Mapping[str, Any]], mode: str, task: Task) -> tuple[list[str], list[bool]]:
    """The problem of each answer of an evaluation, and whether it succeeded."""
    answers = [(row["prompt"], text) for row in rows if row["mode"] == mode for text in row["completions"]]
    return [prompt for prompt, _ in answers], [task.succeeded(prompt, text) for prompt, text in answers]


def compare(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], task: Task) -> dict[str, Any]:
    """Rates with intervals, sampled and greedy, and how often the reward disagrees with the success."""
    found: dict[str, Any] = {}
    for mode in ("sampled", "greedy"):
        problems, old = successes(before, mode, task)
        same, new = successes(after, mode, task)
        assert problems == same
        rewarded = [reward for row in after if row["mode"] == mode for reward in row["rewards"]]
        found[mode] = {
            "before": rate(old),
            "after": rate(new),
            "difference": round(sum(new) / len(new) - sum(old) / len(old), 4),
            "difference_interval": [round(x, 4) for x in difference(problems, old, new)],
            "problems": len(set(problems)),
            "mean_reward_after": round(sum(rewarded) / len(rewarded), 4),
            "full_reward_without_success": sum(r >= 1.0 and not right for r, right in zip(rewarded, new, strict=True)),
            "success_without_full_reward": sum(r < 1.0 and right for r, right in zip(rewarded, new, strict=True)),
        }
    return found


def disagreements(run: Path, task: Task) -> dict[str, int]:
    """How often reward and success differ among all rollouts that a run was trained on."""
    found = {"rollouts": 0, "full_reward_without_success": 0, "success_without_full_reward": 0}
    steps = [path for path in run.glob("rollouts/step_*.jsonl") if path.stem != "step_000000"]  # before training
    for path in steps:
        for row in read_jsonl(path):
            paid, right = row["reward"] >= 1.0, task.succeeded(row["prompt"], row["completion"])
            found["rollouts"] += 1
            found["full_reward_without_success"] += paid and not right
            found["success_without_full_reward"] += right and not paid
    return found


def rate(trials: Sequence[bool]) -> dict[str, Any]:
    """A proportion with its Wilson interval."""
    return {
        "success": round(sum(trials) / len(trials), 4),
        "interval": [round(x, 4) for x in wilson(sum(trials), len(trials))],
        "trials": len(trials),
    }


def write_review(path: Path, runs: Sequence[Path]) -> None:
    """Rollouts to read, of the last step of each run: highest rewards (different problems first), lowest, random."""
    lines = []
    for run in runs:
        rows = read_jsonl(max(run.glob("rollouts/step_*.jsonl")))
        distinct = list({(row["prompt"], row["completion"]): row for row in rows}.values())
        ranked = sorted(distinct, key=lambda row: -row["reward"])
        first_of_each = {id(row) for row in {row["prompt"]: row for row in reversed(ranked)}.values()}
        ranked.sort(key=lambda row: (-row["reward"], id(row) not in first_of_each))
        chosen = {"highest reward": ranked[:10], "lowest reward": ranked[-5:], "at random": random.Random(0).sample(rows, 10)}
        for title, some in chosen.items():
            for row in some:
                talk = "\n".join(f"[{m['role']}] {m['content']} {m.get('tool_calls') or ''}" for m in row["messages"])
                if row["segments"]:
                    talk += f"\n[sampled in all segments] {row['completion']}"
                facts = f"reward {row['reward']} {row['reward_parts']}, scored {row['scored']}, truncated {row['truncated']}"
                lines.append(f"## {run.name}, {title}: {facts}, expected {row['expected_answer']}\n\n{talk}\n")
    path.write_text("\n".join(lines), encoding="utf-8")


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "cpu_seconds": round(sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))),
    }


def main() -> None:
    sys.path.insert(0, str(ROOT))  # for the modules that configs of examples name, as the command does with its folder
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "learning")
    parser.add_argument("--warm-up", type=int, help="number of SFT steps, if not that of the task")
    parser.add_argument("--label", help="name of a variant, which has its own runs and results, but the same warmed-up model")
    parser.add_argument("--no-results", action="store_true", help="write nothing outside the work folder")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the GRPO config")
    chosen = parser.parse_intermixed_args()
    name, task, work = chosen.task, TASKS[chosen.task], chosen.work.resolve() / chosen.task
    if chosen.warm_up is not None:
        task = replace(task, warm_up=chosen.warm_up)
    work.mkdir(parents=True, exist_ok=True)
    config = HERE / f"{name}.yaml"
    data = write_data(task, work)
    model = warm_up(name, task, work, data)
    start = [*([f"policy.model_name={model}"] if model is not None else []), *data, *chosen.overrides]
    before = evaluate(task, config, work / "before.json", *start)
    label = f"-{chosen.label}" if chosen.label else ""
    results: dict[str, Any] = {"task": name, "config": config.name, "overrides": chosen.overrides, **machine(), "seeds": {}}
    for seed in chosen.seeds:
        run = work / f"seed_{seed}{label}"
        after = work / f"after_{seed}{label}.json"
        if not after.exists():
            rlcore("train", str(config), *start, f"grpo.seed={seed}", f"logger.log_dir={work}", f"logger.run_name={run.name}")
        results["seeds"][seed] = compare(before, evaluate(task, config, after, *start, "--checkpoint", str(run)), task)
        results["seeds"][seed]["training"] = disagreements(run, task)
        print(json.dumps({seed: results["seeds"][seed]}, indent=1), flush=True)
    results.update(machine())
    runs = [work / f"seed_{seed}{label}" for seed in chosen.seeds]
    write_review(work / f"review{label}.md", runs)
    if chosen.no_results:
        return
    (ROOT / "benchmarks" / "results" / f"learning_{name}{label}.json").write_text(
        json.dumps(results, indent=1) + "\n", encoding="utf-8"
    )
    drawing = [f"seed {seed}={run}" for seed, run in zip(chosen.seeds, runs, strict=True)]
    curve = ROOT / "docs" / "curves" / f"learning-{name.replace('_', '-')}{label}.svg"
    subprocess.run([sys.executable, ROOT / "docs" / "make_curves.py", curve, task.metric, *drawing], check=True)


if __name__ == "__main__":
    main()
