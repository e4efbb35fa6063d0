"""Classes without their contract are refused before a model loads: `train`, `eval`, `validate --deep` and `doctor --deep`."""

from pathlib import Path

import pytest
import yaml
from tests.command_line import rlcore

from rl_backends_hf.generation import HuggingFaceGeneration
from rl_backends_hf.policy import HuggingFacePolicy
from rl_core.errors import ConfigError
from rl_core.interfaces import GenerationInterface
from rl_train.trainers.trainers import DPOTrainer, GRPOTrainer

MODEL = str(Path(__file__).parents[2] / "examples/addition/model")
MODULES = """
from rl_backends_hf.generation import HuggingFaceGeneration
from rl_backends_hf.policy import HuggingFacePolicy
from rl_core.interfaces import EnvironmentInterface, GenerationInterface, PolicyInterface, WeightTransport
from rl_train.metrics.logger import Logger

class WrongConstructor(HuggingFaceGeneration):
    def __init__(self, config, model): ...

class Scratch(GenerationInterface):
    def __init__(self, *, config, cluster, deadlines): ...
    def generate(self, data, greedy=False): ...
    def prepare_for_generation(self, *args, **kwargs): ...

class Transforms(HuggingFaceGeneration):
    capabilities = ("in_process", "by_reference")

class NoInterface:
    def __init__(self, *, config, cluster=None, deadlines=None): ...

class NotColocatable(PolicyInterface):
    def __init__(self, *, config, cluster=None, deadlines=None): ...
    def get_logprobs(self, data): ...
    def train(self, data, loss_fn, **options): ...

class Positional(HuggingFacePolicy):
    def __init__(self, model_name, /): ...

class Greedy(EnvironmentInterface):
    def __init__(self, config, api_key): ...
    def step(self, message_log_batch, metadata): ...

class Silent(Logger):
    def __init__(self, *, config, folder): ...

class Takes(Logger):
    def __init__(self, cfg): ...
    def log_metrics(self, metrics, step): ...

class Misspelt(WeightTransport):
    name, requires = "misspelt", ("dsk",)
    def push(self, policy, generation): ...

class Raises(HuggingFaceGeneration):
    def __init__(self, *, config, cluster=None, deadlines=None):
        raise KeyError("acme_key")

number = 3
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes a config of the module above, in its folder."""
    (tmp_path / "contract_classes.py").write_text(MODULES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(*, policy="hf", generation="hf", generation_keys=None, env=None, algorithm="grpo", **sections):
        samples = algorithm == "grpo"
        sizes = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2} if samples else {"global_batch_size": 2}
        policy_section = {"backend": policy, "model_name": MODEL, "max_total_sequence_length": 32}
        if generation is not None:
            policy_section["generation"] = {"backend": generation, "max_new_tokens": 4, **(generation_keys or {})}
        content = {
            algorithm: {"max_num_steps": 1, **sizes},
            "policy": policy_section,
            "data": {name: {"dataset_name": "arithmetic", "num_samples": 8} for name in ("train", "validation")},
            "cluster": {"backend": "in_process"},
            "logger": {"log_dir": str(tmp_path / "runs")},
            **({"env": {"arithmetic": env or {}}} if samples else {}),
            **sections,
        }
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
        return path

    return write


OF = "contract_classes."
WRONG = {
    "constructor": (
        {"generation": f"{OF}WrongConstructor"},
        [
            "policy.generation.backend",
            "(config=..., cluster=..., deadlines=...)",
            "takes (config, model)",
            "def __init__(self, *,",
        ],
    ),
    "abstract and refit methods": (
        {"generation": f"{OF}Scratch"},
        [
            "policy.generation.backend",
            "does not define finish_generation, invalidate_kv_cache, prepare_refit_info, weight_",
            "grpo",
            "See docs/write_a_generation_backend.md.",
        ],
    ),
    "an engine that digests the weights that it received, without the canary": (
        {"generation": f"{OF}Transforms", "generation_keys": {"refit_canary": False}},
        ["policy.generation.refit_canary: the engine 'contract_classes.Transforms' requires the canary", "held_weight_digests"],
    ),
    "base class": ({"generation": f"{OF}NoInterface"}, ["not a subclass of rl_core.interfaces.generation.GenerationInterface"]),
    "a policy that sends no weights": (
        {"policy": f"{OF}NotColocatable"},
        [
            "policy.backend",
            "ColocatablePolicyInterface",
            "save_checkpoint, weight_fingerprint, weight_version, which grpo calls",
        ],
    ),
    "constructor of a policy": ({"policy": f"{OF}Positional"}, ["policy.backend", "takes (model_name, /)"]),
    "constructor of an environment": (
        {"env": {"env_cls": f"{OF}Greedy"}},
        ["env.arithmetic.env_cls", "takes (config, api_key)"],
    ),
    "a logger": ({"logger": {"loggers": {f"{OF}Silent": {}}}}, ["does not define log_metrics", "See docs/write_a_logger.md."]),
    "constructor of a logger": (
        {"logger": {"loggers": {f"{OF}Takes": {}}}},
        ["takes (cfg)", "Write `def __init__(self, *, config, folder)`. See docs/write_a_logger.md."],
    ),
    "no class": ({"generation": f"{OF}number"}, ["3 is not a class"]),
}


@pytest.mark.parametrize("command", [("train",), ("validate", "--deep")], ids=["train", "validate"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_class_without_its_contract_is_refused_with_key_and_remedy(config, wrong, command):
    changes, words = WRONG[wrong]
    name, *options = command
    assert_refused(rlcore(name, config(**changes), *options), words)


def assert_refused(done, words):
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "starting" not in done.stdout + done.stderr  # no model was loaded
    flat = " ".join(done.stderr.split())
    assert [word for word in words if word not in flat] == [], done.stderr
    assert "run.yaml:" in done.stderr


@pytest.mark.parametrize("wrong", [name for name in WRONG if not name.endswith("a logger")])
def test_an_evaluation_refuses_the_same_classes(config, wrong):
    changes, words = WRONG[wrong]
    if wrong == "a policy that sends no weights":
        words = [
            "policy.backend",
            "ColocatablePolicyInterface",
            "weight_version, which an evaluation calls",
        ]
    assert_refused(rlcore("eval", config(**changes)), words)


def test_an_evaluation_checks_neither_training_classes_nor_training_data(config, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "expected_answer": "2"}\n{"question": 3}\n')
    data = {
        "train": {"dataset_name": "jsonl", "path": str(tmp_path / "rows.jsonl")},
        "validation": {"dataset_name": "arithmetic", "num_samples": 2, "split": "validation"},
    }
    changes = {"data": data, "logger": {"loggers": {f"{OF}Silent": {}}}, "loss_fn": {"name": f"{OF}NoInterface"}}
    done = rlcore("eval", config(**changes))
    assert done.returncode == 0, done.stderr
    done = rlcore("validate", config(**changes), "--deep")
    assert all(key in done.stderr for key in ("rows.jsonl", "loss_fn", "logger.loggers")), done.stderr


def test_an_evaluation_reports_all_problems_of_classes_models_and_data_together(config, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "expected_answer": "2"}\n{"question": 3}\n')
    changes = {
        "generation": f"{OF}WrongConstructor",
        "env": {"env_cls": f"{OF}Greedy"},
        "data": {"validation": {"dataset_name": "jsonl", "path": str(tmp_path / "rows.jsonl")}},
    }
    words = ["policy.generation.backend", "env.arithmetic.env_cls", "rows.jsonl"]
    assert_refused(rlcore("eval", config(**changes)), words)


def test_only_the_methods_that_the_algorithm_calls_are_required(config):
    data = {"train": {"dataset_name": "arithmetic", "num_samples": 8, "with_response": True}}
    changes = {"algorithm": "sft", "policy": f"{OF}NotColocatable", "generation": None, "data": data}
    done = rlcore("validate", config(**changes), "--deep")
    assert "does not define save_checkpoint, which sft calls" in done.stderr
    done = rlcore("validate", config(**changes, checkpointing={"enabled": False}), "--deep")
    assert done.returncode == 0, done.stderr


def test_doctor_checks_the_contract_of_a_class_by_its_path(config):
    config()
    done = rlcore("doctor", f"{OF}WrongConstructor", "--deep")
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    assert "takes (config, model)" in done.stdout
    assert rlcore("doctor", "rl_backends_hf.policy.HuggingFacePolicy", "--deep").returncode == 0
    done = rlcore("doctor", f"{OF}Misspelt", "--deep")
    assert "it `requires` 'dsk', but there is no capability 'dsk'. Did you mean 'disk'?" in done.stdout
    assert done.returncode == 1


def test_an_error_in_a_constructor_has_the_line_of_the_class(config):
    done = rlcore("train", config(generation=f"{OF}Raises"))
    assert done.returncode == 2, done.stderr
    line = MODULES.splitlines().index('        raise KeyError("acme_key")') + 1
    assert f"contract_classes.py:{line}" in done.stderr
    assert "Traceback" not in done.stderr


def test_python_trainers_check_the_same_contracts():
    class Refuses(GenerationInterface):
        generate = prepare_for_generation = finish_generation = lambda self, *args, **kwargs: True

    policy = HuggingFacePolicy(MODEL)
    with pytest.raises(ConfigError, match=r"`generation`: .*Refuses.* does not define invalidate_kv_cache, prepare_refit_info"):
        GRPOTrainer(policy, generation=Refuses(), reward_fns=lambda completions, **_: [0.0] * len(completions))
    with pytest.raises(ConfigError, match=r"`policy`: .*HuggingFaceGeneration.* is not a subclass of .*PolicyInterface"):
        DPOTrainer(_with_policy_config(HuggingFaceGeneration(MODEL), policy))


def _with_policy_config(engine, policy):
    engine.config = policy.config
    return engine
