"""The cases: what is run once with each checkout, in a new folder, and how the two results are compared."""

import array
import json
import re
import shutil
import struct
from dataclasses import dataclass, field

from differences import MEASURED

STEPS = 10
NOTHING, JSON, TEXT = "nothing", "json", "text"
"""What is compared of the output of a command."""
RUN = ("train", "run.yaml", "--resume", "never")
EXACT, SETS = "exact", "sets"
"""How rollouts are compared: line by line, or as sets of rows with the columns of `Case.columns`."""
PROMPTS = ("task", "index", "ordinal", "prompt", "expected_answer")
"""Columns of a rollout that do not depend on which weights sampled it."""
TEXTS = ("message", "not_checked", "warnings")
"""Keys of `validate --json` that are texts of errors."""
COUNTS = ("step", "rollout/rows", "num_optimizer_steps")
"""Metrics for which the same holds."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of `rlcore`, and what is compared of its output."""

    argv: tuple[str, ...]
    output: str = NOTHING
    file: str | None = None
    """File in the folder that has the output; by default it is printed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Commands that share a folder.

    Attributes:
        name: For `--only` and `--allow`.
        commands: Run one after the other; the exit code of each is compared.
        files: Written to the folder before the first command, by their names.
        rollouts: How `metrics.jsonl` and `rollouts/*.jsonl` of the runs in the folder are compared: `exact` or `sets`.
        columns: With `sets`: the columns of rollouts that are compared.
        metrics: With `sets`: the metrics that are compared.
        ignored: Keys that are not compared.
    """

    name: str
    commands: tuple[Command, ...]
    files: dict[str, str] = field(default_factory=dict)
    rollouts: str = EXACT
    columns: tuple[str, ...] = PROMPTS
    metrics: tuple[str, ...] = COUNTS
    ignored: re.Pattern[str] = MEASURED


REWARDS = """
def correct(completion, expected_answer):
    return float(completion.strip() == expected_answer)

def digits(completion, expected_answer):
    return float(len(completion.strip()) == len(expected_answer))
"""
TURNS = """
import torch
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn

class TwoTurns(EnvironmentInterface):
    min_turns = 2

    def step(self, message_log_batch, metadata):
        answers = [[m["content"] for m in log if m["role"] == "assistant"] for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "1+2="} for _ in answers],
            metadata=metadata,
            next_stop_strings=[None] * len(answers),
            rewards=torch.tensor([sum(text.count("1") for text in texts) / 4 for texts in answers]),
            terminateds=torch.tensor([len(texts) == 2 for texts in answers]),
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {"accuracy": float((batch["rewards"] > 0.5).float().mean())}

class Sessions(TwoTurns):
    def __init__(self, cfg):
        self.seen = {}

    def reset(self, metadata):
        self.seen[metadata["session_id"]] = 0

    def step(self, message_log_batch, metadata):
        for state in metadata:
            self.seen[state["session_id"]] += 1
        result = super().step(message_log_batch, metadata)
        return result._replace(rewards=result.rewards + torch.tensor([self.seen[s["session_id"]] / 8 for s in metadata]))

    def close(self, session):
        del self.seen[session]
"""
AGENT = """
import urllib.request, json

def ask(base_url, api_key, model, content):
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": content}]}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(base_url.rstrip("/") + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return (json.load(response)["choices"][0]["message"]["content"] or "").strip()

def add(base_url, api_key, model, messages, metadata):
    question = messages[-1]["content"]
    left, right = question.removesuffix("=").split("+")
    first, second = (ask(base_url, api_key, model, each) for each in (question, f"{right}+{left}="))
    return float(first == metadata["expected_answer"]) + 0.5 * (first == second)
"""


def merged(base, changes):
    """A config with changes; None removes a key."""
    out = dict(base)
    for key, value in changes.items():
        inner = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
        out = {name: each for name, each in out.items() if name != key} | ({} if value is None else {key: inner})
    return out


def write_inputs(checkout, folder):
    """What all cases read, from one checkout: models, pairs, and the example configs next to them."""
    shutil.copytree(checkout.folder / "examples", folder / "examples")
    scaled_model(folder / "examples/addition/model", folder / "teacher", 1.05)


def scaled_model(model, folder, factor):
    """Another model: all weights of a model in float32 times a factor."""
    shutil.copytree(model, folder)
    content = (folder / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    kinds = {each["dtype"] for name, each in json.loads(content[8:start]).items() if name != "__metadata__"}
    assert kinds == {"F32"}, kinds
    weights = array.array("f", content[start:])
    (folder / "model.safetensors").write_bytes(content[:start] + array.array("f", (w * factor for w in weights)).tobytes())


def all_cases(inputs):
    """Every case but those with recorded configs."""
    return [*training_cases(inputs), *command_cases(inputs)]


def training_cases(inputs):
    model = str(inputs / "examples/addition/model")
    limits = {"backend": "hf", "model_name": model, "max_total_sequence_length": 16}
    sums = {
        "grpo": {
            "num_prompts_per_step": 8,
            "num_generations_per_prompt": 4,
            "max_num_steps": STEPS,
            "seed": 3,
            "val_period": 5,
            "val_at_start": True,
        },
        "policy": {
            **limits,
            "train_global_batch_size": 16,
            "train_micro_batch_size": 8,
            "optimizer": {"kwargs": {"lr": 2.0e-4, "weight_decay": 0.01}},
            "scheduler": {"name": "linear", "kwargs": {"num_warmup_steps": 2, "num_training_steps": 40}},
            "generation": {"backend": "hf", "max_new_tokens": 5},
        },
        "data": {
            "train": {"dataset_name": "arithmetic", "num_samples": 400, "min_digits": 2},
            "validation": {"dataset_name": "arithmetic", "num_samples": 16, "min_digits": 2, "split": "validation"},
        },
        "env": {"arithmetic": {"num_workers": 1}},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False},
    }

    def case(name, changes, base=sums, commands=(RUN,), files=None, **how):
        text = json.dumps(merged(base, changes), indent=1)
        return Case(
            name=name, commands=tuple(Command(argv=c) for c in commands), files={"run.yaml": text, **(files or {})}, **how
        )

    critic = {**limits, "train_global_batch_size": 16, "optimizer": {"kwargs": {"lr": 5.0e-4}}}
    pairs = inputs / "examples/addition/preferences"
    pair_data = {split: {"dataset_name": "preference", "path": f"{pairs}/{split}.jsonl"} for split in ("train", "validation")}
    short = {"max_num_steps": STEPS, "seed": 3, "val_period": 5}
    offline = {"grpo": None, "env": None, "policy": {"train_global_batch_size": None, "generation": None}}
    tools = str(inputs / "examples/tools/model")
    tool_data = {
        "dataset_name": "arithmetic",
        "task_name": "tools",
        "style": "chat",
        "operations": ["*"],
        "min_digits": 2,
        "max_digits": 2,
    }
    two_turns = {"policy": {"max_total_sequence_length": 40}, "grpo": {"max_rollout_turns": 2}}
    sum_task = {"train": {"task_name": "sums"}, "validation": {"task_name": "sums"}}
    on_ray = {"cluster": {"backend": "ray"}}
    stale = {**on_ray, "rollout": {"max_staleness": 1}, "loss_fn": {"use_importance_sampling_correction": True}}
    half = "grpo.max_num_steps=5"
    return [
        case("grpo", {"loss_fn": {"reference_policy_kl_penalty": 0.01}}),
        case("grpo-loss", {"loss_fn": {"name": "grpo"}}),
        case(
            "dapo",
            {
                "loss_fn": {"name": "dapo"},
                "grpo": {
                    "use_dynamic_sampling": True,
                    "overlong_filtering": True,
                    "reward_shaping": {"enabled": True, "overlong_buffer_length": 1, "overlong_buffer_penalty": 0.5},
                },
            },
        ),
        case(
            "dr-grpo",
            {
                "loss_fn": {"name": "dr_grpo", "constant_length_normalizer": 5},
                "grpo": {"adv_estimator": {"normalize_rewards": False}},
            },
        ),
        case("gspo", {"loss_fn": {"name": "gspo"}}),
        case("cispo", {"loss_fn": {"name": "cispo"}}),
        case("rloo", {"loss_fn": {"disable_ppo_ratio": True}, "grpo": {"adv_estimator": {"name": "rloo"}}}),
        case(
            "reinforce++",
            {
                "loss_fn": {
                    "use_kl_in_reward": True,
                    "reference_policy_kl_penalty": 0.01,
                    "reference_policy_kl_type": "k1",
                },
                "grpo": {"adv_estimator": {"name": "reinforce_plus_plus"}},
            },
        ),
        case("reinforce++baseline", {"grpo": {"adv_estimator": {"name": "reinforce_plus_plus", "minus_baseline": True}}}),
        case(
            "gdpo",
            {
                "env": {
                    "arithmetic": None,
                    "sums": {"reward_fns": {"right": "golden_rewards.correct", "digits": "golden_rewards.digits"}},
                },
                "grpo": {"adv_estimator": {"name": "gdpo", "reward_weights": {"digits": 0.25}}},
                "data": sum_task,
            },
            files={"golden_rewards.py": REWARDS},
        ),
        case(
            "correction",
            {
                "loss_fn": {
                    "use_importance_sampling_correction": True,
                    "truncated_importance_sampling_type": "icepop",
                    "truncated_importance_sampling_ratio_min": 0.5,
                },
                "grpo": {"reward_scaling": {"enabled": True, "target_min": -1.0}, "advantage_clip_low": -2.0},
            },
        ),
        case("dynamic-sampling", {"grpo": {"use_dynamic_sampling": True, "batch_multiplier": 1.5}}),
        case(
            "ppo",
            {
                "grpo": None,
                "ppo": {
                    **sums["grpo"],
                    "num_prompts_per_step": 32,
                    "num_generations_per_prompt": 1,
                    "ppo_epochs": 2,
                    "critic_warmup_steps": 2,
                },
                "value": critic,
            },
        ),
        case(
            "distillation",
            {
                "grpo": None,
                "distillation": {"num_prompts_per_step": 16, "max_num_steps": STEPS, "seed": 3, "val_period": 5},
                "loss_fn": {"divergence": "forward_kl", "topk": 4},
                "policy": {"train_global_batch_size": None},
                "teacher": {**limits, "model_name": str(inputs / "teacher")},
            },
        ),
        case(
            "sft",
            merged(
                offline,
                {
                    "sft": {"global_batch_size": 16, **short},
                    "data": {"train": {"with_response": True}, "validation": {"with_response": True}},
                },
            ),
        ),
        case("dpo", {**offline, "dpo": {"global_batch_size": 16, **short}}, base={**sums, "data": pair_data}),
        case("rm", {**offline, "rm": {"global_batch_size": 16, **short}}, base={**sums, "data": pair_data}),
        case(
            "turns",
            {**two_turns, "env": {"arithmetic": {"env_cls": "golden_turns.TwoTurns"}}},
            files={"golden_turns.py": TURNS},
        ),
        case(
            "sessions",
            {**two_turns, "env": {"arithmetic": {"env_cls": "golden_turns.Sessions"}}},
            files={"golden_turns.py": TURNS},
        ),
        case(
            "tools",
            {
                "grpo": {"num_prompts_per_step": 4, "val_period": 0, "val_at_start": False},
                "policy": {"model_name": tools, "max_total_sequence_length": 192, "generation": {"max_new_tokens": 40}},
                "data": {"train": {**tool_data, "num_samples": 400}, "validation": None},
                "env": {"arithmetic": None, "tools": {"tools": ["calculator"], "max_tool_turns": 2, "call_timeout_s": 60}},
            },
        ),
        case(
            "agents",
            {"env": {"arithmetic": None, "sums": {"agent": "golden_agent:add"}}, "data": sum_task},
            files={"golden_agent.py": AGENT},
            rollouts=SETS,  # which requests share a batch, and so the last bits, depends on their arrival
            columns=(*PROMPTS, "completion", "tokens", "reward", "advantage"),
            metrics=(*COUNTS, "reward/mean", "length/mean", "validation/accuracy"),
        ),
        case("packing", {"policy": {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}}}),
        case(
            "dynamic-batching",
            {"policy": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}}},
        ),
        case("lora", {"policy": {"hf_cfg": {"lora": {"rank": 4, "alpha": 8}}, "optimizer": {"kwargs": {"lr": 2.0e-3}}}}),
        case(
            "stale-exact",
            merged(stale, {"rollout": {"order": "exact"}}),
            ignored=pattern_of(("rollout/in_flight", "rollout/ready")),  # depend on when a step begins to train
        ),
        case("stale", stale, rollouts=SETS, columns=("task",)),  # which prompts end first depends on the machine
        case("two-ranks", {"cluster": {"backend": "ray", "workers_per_node": 2}}),
        case(
            "resume",
            {"checkpointing": {"enabled": True, "save_period": 5}},
            commands=(("train", "run.yaml", half), ("train", "run.yaml")),
        ),
    ]


def command_cases(inputs):
    """Output of commands: schema, plans, and everything that can be printed as JSON."""
    examples = sorted(str(path) for path in (inputs / "examples").rglob("*.yaml") if "clusters" not in path.parts)
    run, grpo, one_process = inputs / "examples", str(inputs / "examples/grpo_addition.yaml"), "cluster.backend=in_process"
    quick = (one_process, "grpo.max_num_steps=2", "grpo.num_prompts_per_step=8", "grpo.max_val_samples=32")
    train = ("train", grpo, *quick, "checkpointing.save_period=2")

    def printed(*argv, output=JSON, file=None):
        return Command(argv=argv, output=output, file=file)

    def case(name, *commands, ignored=()):
        return Case(name=name, commands=commands, ignored=pattern_of(ignored))

    return [
        case("schema", printed("schema", output=TEXT)),
        case("examples", *(printed("validate", each, "--json") for each in examples), ignored=TEXTS),
        case(
            "lists",
            printed("list-backends", "--all", "--json"),
            printed("list-plugins", "--all", "--json"),
            printed("prompt", "list", output=TEXT),
            *(printed("explain", key, output=TEXT) for key in ("grpo", "policy", "policy.generation", "data", "env.math")),
            printed("explain", "interface", "policy", "--json"),
            printed("--help", output=TEXT),
            ignored=("import_ms",),
        ),
        case(
            "plan",
            *(printed("plan", each, "--gpu", "80GiB", output=TEXT) for each in (grpo, str(run / "ppo_addition.yaml"))),
            printed("plan", grpo, "--gpu", "h100", "--json"),
            printed("plan", str(run / "dpo_addition.yaml"), "--memory", "24GiB", "--json"),
            printed("plan", grpo, "--memory", "24GiB", "--json"),
            printed("plan", grpo, "--memory", "550MiB", one_process, "--json"),
            ignored=("step",),
        ),
        case(
            "runs",
            Command(argv=(*train, "logger.run_name=one")),
            Command(argv=(*train, "logger.run_name=two", "grpo.seed=5")),
            printed("runs", "runs", "--json"),
            printed("compare", "runs/one", "runs/two", "--json"),
            printed("eval", "runs/one", one_process, "--samples", "2", "--greedy", "--json", "found.json", file="found.json"),
            printed("env", "rescore", "runs/one", "--json"),
            ignored=("bytes_on_disk", "started"),
        ),
        case(
            "checks",
            printed("check", "model", grpo, one_process, "--json"),
            printed("check", "logprobs", grpo, one_process, "--json"),
            printed("check", "env", "sliding_puzzle", "data.size=2", "--json"),
            printed("check", "plugin", "generation:hf", "--json"),
            printed("data", "show", grpo, "--json"),
            printed("data", "show", str(run / "dpo_addition.yaml"), "--json"),
        ),
    ]


def pattern_of(ignored):
    return re.compile("|".join([MEASURED.pattern, *(rf"(^|\.){re.escape(key)}$" for key in ignored)])) if ignored else MEASURED
