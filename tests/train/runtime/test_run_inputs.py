"""What a run's config refers to: teachers, reward models, prompt files, tools, mixed data and plugin code by its path."""

import json
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from rl_core.data.model_digests import path_digests
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.preparation import Preparation, inputs_of
from rl_train.checkpoints.inputs import input_changes
from rl_train.config.loader import load_config

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"
TOOLS = Path(__file__).parents[3] / "examples" / "tools" / "model"


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def find(config):
        (tmp_path / "run.yaml").write_text(json.dumps(config))
        registry = Registry(discover())
        loaded = load_config(tmp_path / "run.yaml", registry=registry, stages=())
        return inputs_of(loaded, Preparation(loaded.run, registry))

    return find


def model(**keys):
    return {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 32, **keys}


def test_all_models_files_rows_and_code_of_a_config_take_part(inputs, tmp_path):
    (tmp_path / "inputs_of_run.py").write_text("class Optimizer:\n    pass\n")
    (tmp_path / "prompt.yaml").write_text("user: '{question}'\n")
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": f"{name}=", "expected_answer": "1"}) + "\n")
    engine = {"backend": "hf", "max_new_tokens": 4, "model_name": str(MODEL)}
    found = inputs(
        {
            "distillation": {},
            "policy": model(generation=engine, optimizer={"name": "inputs_of_run.Optimizer"}),
            "teacher": model(tokenizer={"name": str(MODEL)}),
            "data": {
                "mix": {name: {"dataset_name": "jsonl", "path": f"{name}.jsonl"} for name in ("a", "b")},
                "prompt": {"prompt_config": "prompt.yaml"},
            },
            "env": {"reward_model": {"model_name": str(MODEL)}},
        }
    )
    models = {"policy.model_name", "policy.generation.model_name", "teacher.model_name", "teacher.tokenizer.name"}
    models |= {"env.reward_model.model_name"}
    assert {key for key, content in found.items() if "config.json" in content} == models
    assert {key for key, content in found.items() if "the rows" in content} == {"data.mix.a.path", "data.mix.b.path"}
    assert sorted(found.keys() - models) == [
        "data.mix.a.path",
        "data.mix.b.path",
        "data.prompt.prompt_config",
        "policy.optimizer.name",
    ]


def test_the_tools_that_a_model_is_shown_take_part_with_their_descriptions(inputs, tmp_path):
    module = tmp_path / "tools_of_run.py"
    module.write_text('def double(number: int) -> int:\n    """Twice a number."""\n    return 2 * number\n')
    config = {
        "grpo": {},
        "policy": {**model(generation={"backend": "hf"}), "model_name": str(TOOLS)},
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 4}},
        "env": {"tools": {"tools": ["calculator", "tools_of_run.double"]}},
    }
    before = inputs(config)
    module.write_text(module.read_text().replace("Twice", "Two times"))
    sys.modules.pop("tools_of_run")
    # The description is a docstring, which is compared only here.
    assert input_changes(before, inputs(config)) == {"env.tools": "tool double changed"}
    assert "double in tools_of_run.py" in before["env.tools.tools"]


def test_a_model_of_the_hub_is_compared_by_its_commit(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert path_digests("acme/tiny") == {}
    assert path_digests("{{ a long template with the @ of a revision }}" * 10) == {}
    repository = tmp_path / "hub" / "models--acme--tiny"
    for commit in ("a" * 40, "b" * 40):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        assert path_digests("acme/tiny") == {"the commit of the hub": commit}
    assert path_digests(f"acme/tiny@{'a' * 40}") == {"the commit of the hub": "a" * 40}
