"""Each section has the model of its component, and each error is one line: location, key, allowed values, what was found."""

import re

import pytest

from rl_backends_hf.config import HFGenerationConfig, HFPolicyConfig
from rl_envs.config import ArithmeticDatasetConfig, ArithmeticEnvironmentConfig, MathEnvironmentConfig
from rl_train.algorithms.losses.config import ClippedPGLossConfig, NLLLossConfig
from rl_train.algorithms.policy_configs import GRPOConfig
from rl_train.config.schema import OpenEnvironmentConfig, OpenPolicyConfig

SFT = """\
sft:
policy: {backend: hf, model_name: some/model}
data: {train: {dataset_name: arithmetic, with_response: true}}
"""


def test_every_section_is_an_instance_of_the_model_of_its_component(files, good):
    run = files.load(good).run
    assert run.algorithm_name == "grpo"
    assert type(run.algorithm) is GRPOConfig
    assert type(run.loss_fn) is ClippedPGLossConfig
    assert type(run.policy) is HFPolicyConfig
    assert type(run.policy.generation) is HFGenerationConfig
    assert type(run.data.train) is ArithmeticDatasetConfig
    assert type(run.env["arithmetic"]) is ArithmeticEnvironmentConfig


def test_the_components_are_given_by_the_key_of_their_section(files, good):
    components = files.load(good).components
    assert {key: component.name for key, component in components.items()} == {
        "grpo": "grpo",
        "loss_fn": "clipped_pg",
        "policy": "hf",
        "policy.generation": "hf",
        "data.train": "arithmetic",
        "env.arithmetic": "arithmetic",
    }


def test_an_empty_section_takes_its_defaults_and_its_loss(files):
    run = files.load(SFT).run
    assert (run.algorithm_name, run.loss_fn.name, type(run.loss_fn)) == ("sft", "nll", NLLLossConfig)


def test_the_loss_that_is_named_wins_over_that_of_the_algorithm(files):
    run = files.load(SFT + "loss_fn: {name: clipped_pg, ratio_clip_max: 0.3}\n").run
    assert (run.loss_fn.name, run.loss_fn.ratio_clip_max) == ("clipped_pg", 0.3)


def test_a_task_may_have_any_name_if_it_says_which_environment_it_is(files, good):
    run = files.load(good + "  sums: {name: math, timeout_s: 1.5}\n").run
    assert type(run.env["sums"]) is MathEnvironmentConfig
    assert run.env["sums"].timeout_s == 1.5


@pytest.mark.parametrize("functions", ["reward_fn: os.path.join", "reward_fns: {a: os.path.join}"])
def test_reward_functions_of_a_task_with_another_environment_are_a_conflict(files, good, functions):
    key = functions.partition(":")[0]
    assert files.errors(good + f"  mine: {{name: math, {functions}}}\n") == [
        f"config.yaml:13:22: env.mine.{key}: the environment 'math' of this task (env.mine.name) takes no reward functions: "
        f"remove `name` to score with the functions only, or remove `{key}` to score with 'math'."
    ]


def test_a_task_may_name_the_environment_of_reward_functions(files, good):
    run = files.load(good + "  mine: {name: function, reward_fn: os.path.join}\n").run
    assert run.env["mine"].functions == {"join": "os.path.join"}


def test_an_environment_given_by_its_path_keeps_all_its_keys(files, good):
    run = files.load(good + "  weather: {env_cls: rl_envs.guess.GuessNumberEnvironment, num_workers: 8, station: 3}\n").run
    assert type(run.env["weather"]) is OpenEnvironmentConfig
    assert run.env["weather"].model_dump(exclude_unset=True) == {
        "env_cls": "rl_envs.guess.GuessNumberEnvironment",
        "num_workers": 8,
        "station": 3,
    }


def test_a_backend_given_by_its_path_keeps_all_its_keys(files, good):
    run = files.load(
        good.replace("  backend: hf\n  model", "  backend: rl_backends_hf.policy.HuggingFacePolicy\n  own_cfg: {a: 1}\n  model")
    ).run
    assert type(run.policy) is OpenPolicyConfig
    assert run.policy.own_cfg == {"a": 1}


def test_a_data_path_is_short_for_the_jsonl_dataset(files, good):
    rows = files.write('{"question": "1+1", "expected_answer": "2"}\n', "rows.jsonl")
    text = good.replace("  train: {dataset_name: arithmetic}", "  train_data_path: rows.jsonl\n  val_data_path: rows.jsonl")
    loaded = files.load(text)
    assert loaded.run.data.train.dataset_name == loaded.run.data.validation.dataset_name == "jsonl"
    assert loaded.run.data.train.path == rows
    assert str(loaded.source["data.train.path"]) == f"{files.folder}/config.yaml:10:20"


WRONG_IN_GOOD = {
    ("grpo:", "grop:"): ["config.yaml:1:1: grop: There is no section 'grop'. Did you mean 'grpo'?"],
    ("num_prompts_per_step", "num_promts_per_step"): [
        "config.yaml:2:3: grpo.num_promts_per_step: grpo has no key 'num_promts_per_step'. Did you mean 'num_prompts_per_step'?"
    ],
    ("step: 8", "step: two"): ["config.yaml:2:25: grpo.num_prompts_per_step: must be a whole number, 1 or more; found 'two'."],
    ("step: 8", "step: 0"): ["config.yaml:2:25: grpo.num_prompts_per_step: must be a whole number, 1 or more; found 0."],
    ("step: 8", "step: 1.5"): ["config.yaml:2:25: grpo.num_prompts_per_step: must be a whole number, 1 or more; found 1.5."],
    ("step: 8", "step: true"): ["config.yaml:2:25: grpo.num_prompts_per_step: must be a whole number, 1 or more; found true."],
    ("step: 8", "step: [8]"): [
        "config.yaml:2:25: grpo.num_prompts_per_step: must be a whole number, 1 or more; found a list of 1."
    ],
    ("step: 8", "step: null"): ["config.yaml:2:25: grpo.num_prompts_per_step: must be a whole number, 1 or more; found null."],
    ("grpo:\n  num_prompts_per_step: 8", "grpo: 3"): ["config.yaml:1:7: grpo: must be a section with keys below it; found 3."],
    ("grpo:\n  num_prompts_per_step: 8\n", ""): [
        "config.yaml:1:1: The config has no algorithm section: add one of ... (it may be empty), "
        "or layer it over a packaged config: `--config grpo.yaml` or `--config sft.yaml`."
    ],
    ("grpo:", "sft:\ngrpo:"): [
        "config.yaml:2:1: grpo: A config must have exactly one algorithm section, but this one has sft and grpo: remove all "
        "but one."
    ],
    ("  model_name: some/model\n", ""): [
        "config.yaml:3:1: policy.model_name is required. Name, `NAME@REVISION` or folder of the model, or a GGUF file."
    ],
    ("model_name: some/model", "model_name: 7"): [
        "config.yaml:5:15: policy.model_name: must be text; found 7. YAML does not read '7' as text: quote it if text is meant."
    ],
    ("model_name: some/model", "model_name: no"): [
        "config.yaml:5:15: policy.model_name: must be text; found false. YAML "
        "does not read 'no' as text: quote it if text is meant."
    ],
    ("model_name:", "precision: bf16\n  model_name:"): [
        "config.yaml:5:14: policy.precision: must be 'float32' or 'bfloat16' or null; found 'bf16'. Did you mean 'bfloat16'?"
    ],
    ("model_name:", "max_grad_norm: .nan\n  model_name:"): [
        "config.yaml:5:18: policy.max_grad_norm: must be a number, more than 0.0, or null; found .nan."
    ],
    ("model_name:", "max_grad_norm: .inf\n  model_name:"): [
        "config.yaml:5:18: policy.max_grad_norm: must be a number, more than 0.0, or null; found .inf."
    ],
    ("model_name:", "optimizer: {kwargs: {lr: .nan}}\n  model_name:"): [
        "config.yaml:5:28: policy.optimizer.kwargs.lr: must be a number; found .nan."
    ],
    ("model_name:", "policy.precision: float32\n  model_name:"): [
        "config.yaml:5:3: policy.policy.precision: policy has no key 'policy.precision'. Dotted keys only work in "
        "overrides: in a file, nest the keys."
    ],
    ("model_name:", "temperature: 1\n  model_name:"): [
        "config.yaml:5:3: policy.temperature: policy has no key 'temperature'. Did you mean policy.generation.temperature?"
    ],
    ("model_name:", "vllm_cfg: {}\n  model_name:"): [
        "config.yaml:5:3: policy.vllm_cfg: vllm_cfg is not a section of the backend 'hf' (its own section is hf_cfg); NAME_cfg "
        "is the section of the backend NAME: remove it or change the backend. (If it is inherited, `_override_: true` in its "
        "parent section replaces what is inherited.)"
    ],
    ("model_name:", "hf_cgf: {}\n  model_name:"): [
        "config.yaml:5:3: policy.hf_cgf: policy has no key 'hf_cgf'. Did you mean 'hf_cfg'?"
    ],
    ("model_name:", "hf_cfg: {attn_implementation: spda}\n  model_name:"): [
        "config.yaml:5:33: policy.hf_cfg.attn_implementation: must be 'eager' or 'sdpa' or 'flash_attention_2' or null; found "
        "'spda'. Did you mean 'sdpa'?"
    ],
    ("model_name:", "hf_cfg: {load_in_8bit: true, load_in_4bit: true}\n  model_name:"): [
        "config.yaml:5:3: policy.hf_cfg: load_in_8bit and load_in_4bit cannot be combined: set only one of them."
    ],
    ("model_name:", "hf_cfg: {device_map: 3}\n  model_name:"): [
        "config.yaml:5:24: policy.hf_cfg.device_map: must be text or a mapping or null; found 3. YAML "
        "does not read '3' as text: quote it if text is meant."
    ],
    ("  backend: hf\n  model", "  model"): ["config.yaml:3:1: policy.backend is required. Installed: ...."],
    ("policy:\n  backend: hf", "policy:\n  backend: hff"): [
        "config.yaml:4:12: policy.backend: No policy backend named 'hff'. Installed: .... Did you mean 'hf'?"
    ],
    ("policy:\n  backend: hf", "policy:\n  backend: megatron"): [
        "config.yaml:4:12: policy.backend: Policy backend 'megatron' is not installed: rl-backends-megatron is not published; "
        "in a checkout of the repository, pip install ./rl_backends_megatron."
    ],
    ("policy:\n  backend: hf", "policy:\n  backend: [hf]"): [
        "config.yaml:4:12: policy.backend: must be the name of a policy backend; found a list of 1."
    ],
    ("policy:\n  backend: hf", "policy:\n  backend: no_such_package.mod.Policy"): [
        "config.yaml:4:12: policy.backend: Policy backend 'no_such_package.mod.Policy' cannot be imported: there is no package "
        "'no_such_package'. Install it, or put its folder on PYTHONPATH."
    ],
    ("policy:\n  backend: hf", "policy:\n  backend: strange"): [
        "config.yaml:3:1: policy: The config model acme_models:NoSection of the policy backend 'strange' is not a subclass of "
        "rl_core.config.policy_sections.PolicyConfig. This is a bug in the package that registers it."
    ],
    ("policy:\n  backend: hf", "policy:\n  backend: absent"): [
        "config.yaml:3:1: policy: acme_models:Nothing does not exist: acme_models has no 'Nothing'. Did you mean 'NoSection'?"
    ],
    ("policy:\n  backend: hf", "policy:\n  backend: raising"): [
        "config.yaml:3:1: policy: the model acme_models.Raising failed on it (KeyError: 'acme'). This is a bug in the "
        "distribution that defines this model."
    ],
    ("    backend: hf", "    backend: vllm\n    vllm_cfg: {tensor_parallel_size: 1}"): [
        "config.yaml:7:14: policy.generation.backend: Generation backend 'vllm' is not installed: rl-backends-vllm is not "
        "published; in a checkout of the repository, pip install ./rl_backends_vllm."
    ],
    ("tokens: 64", "tokens: 64\n    stop_strings: [a, no, 3]"): [
        "config.yaml:9:23: policy.generation.stop_strings.1: must be text; found false. YAML "
        "does not read 'no' as text: quote it if text is meant.",
        "config.yaml:9:27: policy.generation.stop_strings.2: must be text; found 3. YAML "
        "does not read '3' as text: quote it if text is meant.",
    ],
    ("dataset_name: arithmetic", "dataset_name: arithmetics"): [
        "config.yaml:10:25: data.train.dataset_name: No dataset named 'arithmetics'. Installed: .... Did you mean 'arithmetic'?"
    ],
    ("dataset_name: arithmetic", "dataset_name: arithmetic, operations: ['+', '%']"): [
        "config.yaml:10:55: data.train.operations.1: must be '+' or '-' or '*'; found '%'."
    ],
    ("dataset_name: arithmetic", "dataset_name: arithmetic, operations: []"): [
        "config.yaml:10:49: data.train.operations: must be a list of '+' or '-' or '*', 1 or more items; found an empty list."
    ],
    ("{dataset_name: arithmetic}", "[arithmetic]"): [
        "config.yaml:10:10: data.train: must be a section with keys below it; found a list of 1."
    ],
    ("data:\n", "logger:\n  loggers: [tensorboard, jsonl]\ndata:\n"): [
        "config.yaml:10:12: logger.loggers: must be a section with keys below it; found a list of 2. "
        "Write {tensorboard: {}, jsonl: {}}."
    ],
    ("data:\n", "data:\n  train_data_path: config.yaml\n"): [
        "config.yaml:9:1: data: train and train_data_path both define the training data: keep one of them.",
    ],
    ("arithmetic: {}", "climate: {}"): [
        "config.yaml:12:3: env.climate: No environment named 'climate'. Installed: .... (A task may have any name: set "
        "`name:` or `env_cls:` to choose its environment, or `reward_fn:`.)"
    ],
    ("arithmetic: {}", "sums: {reward_funcs: [rewards.correct], reward_weights: {}}"): [
        "config.yaml:12:3: env.sums: No environment named 'sums'. Installed: .... (A task may have any name: set "
        "`name:` or `env_cls:` to choose its environment, or `reward_fn:`.) Did you mean 'reward_fns' instead of "
        "'reward_funcs'?"
    ],
    ("arithmetic: {}", "arithmetic: {env_cls: a.B}"): [
        "config.yaml:12:25: env.arithmetic.env_cls: Environment 'a.B' cannot be imported: there is no package 'a'. Install it, "
        "or put its folder on PYTHONPATH.",
    ],
    ("arithmetic: {}", "arithmetic: {name: math, env_cls: rl_envs.math.environment.MathEnvironment}"): [
        "config.yaml:12:3: env.arithmetic: name and env_cls both select the environment: keep one of them."
    ],
    ("arithmetic: {}", "arithmetic: {env_cls: math}"): [
        "config.yaml:12:25: env.arithmetic.env_cls: must be the dotted path of a class, package.module.Class; found "
        "'math'. For a registered environment, use `name`."
    ],
    ("env:", "checkpointing: {keep_top_k: 3}\nenv:"): [
        "config.yaml:11:1: checkpointing: keep_top_k requires metric_name: set it, for example to validation/accuracy."
    ],
    ("env:", "logger: {loggers: {jsonll: {}}}\nenv:"): [
        "config.yaml:11:20: logger.loggers.jsonll: No logger named 'jsonll'. Installed: .... Did you mean 'jsonl'?"
    ],
    ("env:", "swarm: {}\nenv:"): ["config.yaml:11:1: swarm: There is no section 'swarm'. Sections: ...."],
    ("env:", "policy.precision: float32\nenv:"): [
        "config.yaml:11:1: policy.precision: There is no section 'policy.precision'. Dotted keys only work in overrides: "
        "in a file, nest the keys."
    ],
    ("env:", "math: {}\nenv:"): [
        "config.yaml:11:1: math: 'math' is an environment (rl-envs 0.1.0), not an algorithm. Installed: ...."
    ],
}


@pytest.mark.parametrize("change", WRONG_IN_GOOD, ids=[" -> ".join(change) for change in WRONG_IN_GOOD])
def test_an_error_is_one_line_with_location_key_allowed_values_and_the_value_found(files, good, change):
    old, new = change
    assert files.errors(good.replace(old, new, 1)) == WRONG_IN_GOOD[change]


def test_all_errors_of_all_sections_are_reported_at_once_in_file_order(files, good):
    text = good
    for old, new in [
        ("step: 8", "step: two"),
        ("backend: hf\n  model_name: some/model", "backend: megatron\n  precision: bf16"),
        ("tokens: 64", "tokens: 1.5\n    temprature: 1"),
        ("name: arithmetic}", "name: arithmetic, sede: 1}"),
        ("arithmetic: {}", "arithmetic: {num_workers: 0}\ncluster: {nodes: 1}"),
    ]:
        text = text.replace(old, new)
    assert [re.match(r"\S+:\d+:\d+: ([\w.]+)", line)[1] for line in files.errors(text)] == [
        "grpo.num_prompts_per_step",
        "policy.model_name",
        "policy.backend",
        "policy.precision",
        "policy.generation.max_new_tokens",
        "policy.generation.temprature",
        "data.train.sede",
        "env.arithmetic.num_workers",
        "cluster.nodes",
    ]


def test_an_empty_file_says_what_a_config_needs(files):
    assert [line.split(": ", 1)[1].split(";")[0] for line in files.errors("")] == [
        "The config has no algorithm section: add one of ... (it may be empty), "
        "or layer it over a packaged config: `--config grpo.yaml` or `--config sft.yaml`.",
        "policy.backend is required. Installed: ....",
        "policy.model_name is required. Name, `NAME@REVISION` or folder of the model, or a GGUF file.",
    ]


@pytest.mark.parametrize(
    ("section", "override", "reason"),
    [
        (
            "checkpointing: {metric_name: reward/mean, keep_top_k: 3}",
            "++checkpointing.metric_name=null",
            "checkpointing: keep_top_k requires metric_name",
        ),
        (
            "cluster: {workers_per_node: 2}",
            "++cluster.backend=in_process",
            "cluster.workers_per_node: 2 is not supported: cluster.backend is in_process",
        ),
    ],
)
def test_an_error_between_two_keys_names_the_override_of_one_of_them(files, good, section, override, reason):
    [error] = files.errors(good.replace("env:", f"{section}\nenv:", 1), "++policy.precision=float32", override)
    assert error.startswith(f"override #2 `{override}`: {reason}"), error
