"""Compare GRPO in rlcore with TRL's GRPOTrainer: same model, prompts, groups, lengths, dtype and threads, in one run.

The sides alternate: in each round, every side runs once in its own processes. It reports the tokens in its backward passes,
wall-clock and CPU seconds of its steps after the first (which is a warm-up), and the peak memory of its whole process tree
(proportional set size, so shared pages count once). A ratio compares two sides of one round; the table has medians over the
rounds, with the smallest and the largest. TRL generates with its own Transformers generation, without gradient checkpointing,
which would slow it down; `trl-batching` is TRL with Transformers' continuous batching.

    python benchmarks/grpo_vs_trl.py --model path/to/model --dtype bfloat16 --output benchmarks/results/grpo_vs_trl.md
    python benchmarks/grpo_vs_trl.py --model path/to/model --dtype bfloat16 --prompt-tokens 512 --sides trl ours

With `--pictures`, each prompt also has a picture, and the vision tower is frozen (`make_picture_model.py`).

The sides sample different completions, of different lengths. With `--full-length` no token ends a completion, so both sides
train on the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn

PROMPTS_PER_STEP, SEED, LEARNING_RATE = 2, 0, 1e-6


STORY = "Tom writes down what he did in the week, because he wants to remember it. On the market he met a friend. "
"""Text before a question that makes its prompt longer."""


PICTURES = " with a picture, a frozen vision tower"


class Mark(NamedTuple):
    """The end of a step."""

    wall_s: float
    cpu_s: float
    """CPU seconds of the process and its children so far."""


def mark():
    """The time now, and the CPU seconds of this process tree so far."""
    wall, used = time.perf_counter(), 0.0
    root = psutil.Process()
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        used += times.user + times.system
    return Mark(wall, used)


class StepMarks(threading.Thread):
    """A mark for each line of a file that is written once per step."""

    def __init__(self, folder, pattern):
        super().__init__(daemon=True)
        self.folder, self.pattern, self.marks, self.stopped = folder, pattern, [], threading.Event()

    def run(self):
        while not self.stopped.wait(0.05):
            for path in self.folder.glob(self.pattern):
                while len(self.marks) < path.read_bytes().count(b"\n"):
                    self.marks.append(mark())


def questions(count, tokenizer, prompt_tokens):
    """Questions whose chat prompts have at least `prompt_tokens` tokens (0 adds nothing)."""
    story = ""
    while (
        len(tokenizer.apply_chat_template([{"role": "user", "content": story + plain_questions(1)[0]}])["input_ids"])
        < prompt_tokens
    ):
        story += STORY
    return [story + question for question in plain_questions(count)]


def plain_questions(count):
    return [
        f"Tom has {7 * i % 83 + 12} apples and buys {11 * i % 67 + 15} more at the market. He gives {i % 9 + 2} of them to his "
        "sister. How many apples does Tom have left? Think step by step, then give the number."
        for i in range(count)
    ]


def picture(number, side):
    """A picture of random pixels."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8))


def vowel_reward(completions, **_):
    """The share of vowels, which differs between the samples of a prompt, so every row has a gradient."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [sum(map(text.lower().count, "aeiou")) / max(1, len(text)) for text in texts]


def without_end_tokens(model, folder):
    """A copy of a model's folder whose end token is one that hardly ever occurs: the last of the vocabulary."""
    from transformers import AutoTokenizer

    shutil.copytree(model, folder, dirs_exist_ok=True)
    last = json.loads((folder / "config.json").read_text())["vocab_size"] - 1
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), "eos_token_id": last}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(last)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run_trl(arguments):
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    texts = questions(PROMPTS_PER_STEP * (arguments.steps + 1), tokenizer, arguments.prompt_tokens)
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    auto, reader = AutoModelForCausalLM, tokenizer
    if arguments.pictures:
        rows = [{**row, "image": picture(number, arguments.pictures)} for number, row in enumerate(rows)]
        auto, reader = AutoModelForImageTextToText, AutoProcessor.from_pretrained(arguments.model)
    model = auto.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
    if arguments.pictures:
        model.model.vision_model.requires_grad_(False)
    tokens, marks = [], []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            marks.append(mark())

    class Counting(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            outputs = super()._generate_and_score_completions(inputs)
            tokens.append((int(outputs["completion_mask"].sum()), int(outputs["prompt_mask"].sum())))
            return outputs

    trainer = Counting(
        model=model,
        processing_class=reader,
        reward_funcs=vowel_reward,
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            max_steps=arguments.steps + 1,
            per_device_train_batch_size=PROMPTS_PER_STEP * arguments.group,
            num_generations=arguments.group,
            max_completion_length=arguments.completion_tokens,
            temperature=1.0,
            beta=0.0,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            use_transformers_continuous_batching=arguments.side == "trl-batching",
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            optim="adamw_torch",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            shuffle_dataset=False,
            seed=SEED,
            disable_tqdm=True,
        ),
        callbacks=[Clock()],
    )
    trainer.train()
    report(arguments, marks, [count for count, _ in tokens], prompt_tokens=[count for _, count in tokens])


class VowelEnvironment(EnvironmentInterface):
    """The reward of `vowel_reward` as an rlcore environment."""

    def step(self, message_log_batch, metadata):
        import torch

        rewards = torch.tensor(vowel_reward([log[-1]["content"] for log in message_log_batch]))
        rows = len(rewards)
        silence = [{"role": "environment", "content": ""}] * rows
        return EnvironmentReturn(silence, metadata, [None] * rows, rewards, torch.ones(rows))


def run_ours(arguments):
    import torch
    from transformers import AutoTokenizer

    from rl_train.launch.train import train

    torch.set_num_threads(arguments.threads)
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    folder = Path(tempfile.mkdtemp())
    texts = questions(
        PROMPTS_PER_STEP * (arguments.steps + 1), AutoTokenizer.from_pretrained(arguments.model), arguments.prompt_tokens
    )
    rows, room = [{"question": text} for text in texts], 512 if arguments.pictures else 192
    for number, row in enumerate(rows if arguments.pictures else []):
        picture(number, arguments.pictures).save(folder / f"{number}.png")
        row["images"] = [f"{number}.png"]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "grpo": {
            "num_prompts_per_step": PROMPTS_PER_STEP,
            "num_generations_per_prompt": arguments.group,
            "max_num_steps": arguments.steps + 1,
            "seed": SEED,
        },
        "policy": {
            "backend": "hf",
            "model_name": str(Path(arguments.model).resolve()),
            "precision": arguments.dtype,
            "max_total_sequence_length": room + arguments.completion_tokens + arguments.prompt_tokens,
            "train_micro_batch_size": PROMPTS_PER_STEP * arguments.group,
            "hf_cfg": {"freeze": ["vision_model"] if arguments.pictures else []},
            "optimizer": {"kwargs": {"lr": LEARNING_RATE}},
            "generation": {"backend": "hf", "max_new_tokens": arguments.completion_tokens},
        },
        "data": {
            "train": {"dataset_name": "jsonl", "path": str(folder / "questions.jsonl"), "output_key": None},
            "shuffle": False,
        },
        "env": {"vowels": {"env_cls": "grpo_vs_trl.VowelEnvironment"}},
        "cluster": {"backend": "ray" if arguments.side == "ours-ray" else "in_process"},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(folder / "runs")},
    }
    path = folder / "benchmark.yaml"
    path.write_text(json.dumps(config))
    steps = StepMarks(folder / "runs", "*/metrics.jsonl")
    steps.start()
    finished = train(path, console=False)
    lines = [json.loads(line) for line in (finished.folder / "metrics.jsonl").read_text().splitlines()]
    while len(steps.marks) < len(lines):
        time.sleep(0.05)
    steps.stopped.set()
    # Only tokens in the backward pass count.
    trained = [int(line["tokens/trained"] - line["tokens/skipped"]) for line in lines]
    phases = {
        name: sum(line[f"time/{name}_s"] for line in lines[1:]) / (len(lines) - 1)
        for name in ("refit", "rollout", "score", "train")
    }
    prompt_tokens = [int(line["tokens/all"] - line["tokens/trained"]) for line in lines]
    report(arguments, steps.marks, trained, prompt_tokens=prompt_tokens, phases=phases)


def report(arguments, marks, tokens, *, prompt_tokens, phases=None):
    seconds, cpu = marks[-1].wall_s - marks[0].wall_s, marks[-1].cpu_s - marks[0].cpu_s
    trained, rows = sum(tokens[1 : len(marks)]), PROMPTS_PER_STEP * arguments.group
    print(
        "REPORT"
        + json.dumps(
            {
                "trained_tokens": trained,
                "mean_completion": trained / ((len(marks) - 1) * rows),
                "mean_prompt": sum(prompt_tokens) / (len(prompt_tokens) * rows),
                "seconds_per_step": seconds / (len(marks) - 1),
                "tokens_per_s": trained / seconds,
                "tokens_per_cpu_s": trained / cpu,
                "phases": phases or {},
            }
        ),
        flush=True,
    )


class PeakMemory(threading.Thread):
    """Samples the proportional set size of a process tree."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.root, self.peak, self.stopped = psutil.Process(pid), 0, threading.Event()

    def run(self):
        while not self.stopped.wait(0.5):
            total = 0
            try:
                for process in [self.root, *self.root.children(recursive=True)]:
                    try:
                        total += process.memory_full_info().pss
                    except psutil.Error:
                        continue
            except psutil.Error:
                return
            self.peak = max(self.peak, total)


def measure(side, arguments):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(arguments.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, __file__, "--side", side, "--model", arguments.model, "--dtype", arguments.dtype]
    command += ["--threads", str(arguments.threads), "--steps", str(arguments.steps)]
    command += ["--prompt-tokens", str(arguments.prompt_tokens), "--group", str(arguments.group)]
    command += ["--completion-tokens", str(arguments.completion_tokens), "--pictures", str(arguments.pictures)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    memory = PeakMemory(process.pid)
    memory.start()
    out, _ = process.communicate()
    memory.stopped.set()
    if process.returncode != 0:
        raise SystemExit(f"{side} failed:\n{out}")
    found = json.loads(next(line for line in out.splitlines() if line.startswith("REPORT")).removeprefix("REPORT"))
    return {**found, "peak_gib": memory.peak / 2**30}


def measured_rounds(arguments):
    rounds = []
    for number in range(arguments.rounds):
        sides = arguments.sides if number % 2 == 0 else arguments.sides[::-1]
        measured = {side: measure(side, arguments) for side in sides}
        rounds.append({side: measured[side] for side in arguments.sides})
        print(f"round {number + 1}: {json.dumps(rounds[-1])}", file=sys.stderr, flush=True)
    return rounds


def machine():
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def spread(values, digits):
    """Median, and smallest to largest if there are several."""
    text = f"{statistics.median(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(rounds, arguments):
    first = rounds[0]
    prompt = statistics.fmean(found["mean_prompt"] for found in first.values())
    lines = [
        "# GRPO against TRL",
        "",
        f"{Path(arguments.model).name}, {arguments.dtype}, {PROMPTS_PER_STEP} prompts x {arguments.group} samples, prompts of "
        f"{prompt:.0f} tokens{PICTURES if arguments.pictures else ''}, "
        f"{'exactly' if arguments.full_length else 'at most'} {arguments.completion_tokens} new tokens, "
        f"{arguments.threads} threads, {machine()}. Rounds: {len(rounds)}, each with {arguments.steps} steps per side after a "
        "warm-up step. Only tokens in the backward pass count. Median (smallest to largest). "
        "`ours` is rlcore in one process, `ours-ray` over Ray.",
        "",
        "| | tokens/s | against TRL | tokens per CPU second | against TRL | s/step | mean completion | peak memory, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for side in first:

        def values(key, side=side):
            return [found[side][key] for found in rounds]

        def ratios(key, side=side):
            if "trl" not in first:
                return "-"
            return spread([found[side][key] / found["trl"][key] for found in rounds], 2)

        speed = [spread(values("tokens_per_s"), 1), ratios("tokens_per_s")]
        cpu = [spread(values("tokens_per_cpu_s"), 1), ratios("tokens_per_cpu_s")]
        rest = [
            spread(values(key), digits) for key, digits in (("seconds_per_step", 2), ("mean_completion", 1), ("peak_gib", 2))
        ]
        lines.append(f"| {side} | " + " | ".join(speed + cpu + rest) + " |")
    lines += ["", "Seconds per step, by phase (medians):", ""]
    for side, found in first.items():
        phases = [f"{name} {statistics.median(each[side]['phases'][name] for each in rounds):.2f}" for name in found["phases"]]
        if phases:
            lines.append(f"- {side}: " + ", ".join(phases))
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description="GRPO here against TRL's, in one run.")
    parser.add_argument("--model", required=True, help="a folder that Transformers loads")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--steps", type=int, default=6, help="measured steps, after one warm-up step")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side runs; the sides alternate")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="smallest length of a prompt; 0 uses short ones")
    parser.add_argument("--completion-tokens", type=int, default=64, help="largest number of new tokens")
    parser.add_argument("--group", type=int, default=8, help="samples of each of the two prompts")
    parser.add_argument("--full-length", action="store_true", help="no token ends a completion, so all have the full length")
    parser.add_argument("--pictures", type=int, default=0, help="pixels of the side of each prompt's picture; 0 for none")
    parser.add_argument("--sides", nargs="+", default=["trl", "ours", "ours-ray"], help="what to measure")
    parser.add_argument("--side", choices=["trl", "trl-batching", "ours", "ours-ray"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.side in ("trl", "trl-batching"):
        run_trl(arguments)
    elif arguments.side:
        run_ours(arguments)
    else:
        with tempfile.TemporaryDirectory() as folder:
            if arguments.full_length:
                arguments.model = without_end_tokens(arguments.model, Path(folder) / Path(arguments.model).resolve().name)
            rounds = measured_rounds(arguments)
        text = table(rounds, arguments)
        print(text)
        if arguments.output:
            arguments.output.write_text(text)


if __name__ == "__main__":
    main()
