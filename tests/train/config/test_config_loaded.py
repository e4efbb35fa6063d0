"""A loaded config is complete, has the origin of each value, is immutable, and can be saved and loaded again."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from rl_train.config.loader import load_config

EXAMPLES = [
    path
    for path in sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
    if not any(text in path.read_text() for text in ("${package:", "load_in_4bit:"))  # need packages that not everybody has
]


def test_every_leaf_has_its_origin(files, good):
    files.write("cluster: {num_nodes: 2}", "base.yaml")
    text = f"defaults: base.yaml\n{good}".replace("tokens: 64", "tokens: ${grpo.num_prompts_per_step}")
    source = files.load(text, "policy.precision=bfloat16", "++policy.optimizer.kwargs.eps=1e-6").source
    here = f"{files.folder}/config.yaml"
    assert {key: str(source[key]) for key in source if not str(source[key]).startswith("default of ")} == {
        "grpo.num_prompts_per_step": f"{here}:3:25",
        "policy.backend": f"{here}:5:12",
        "policy.model_name": f"{here}:6:15",
        "policy.precision": "override #1 `policy.precision=bfloat16`",
        "policy.optimizer.kwargs.eps": "override #2 `++policy.optimizer.kwargs.eps=1e-6`",
        "policy.generation.backend": f"{here}:8:14",
        "policy.generation.max_new_tokens": f"{here}:9:21, through ${{grpo.num_prompts_per_step}}",
        "data.train.dataset_name": f"{here}:11:25",
        "cluster.num_nodes": f"{files.folder}/base.yaml:1:22",
    }


def test_a_default_names_the_model_or_component_that_has_it(files, good):
    source = files.load(good).source
    assert str(source["policy.generation.temperature"]) == "default of GenerationConfig"
    assert str(source["policy.hf_cfg.data_parallel"]) == "default of HFConfig"
    assert str(source["policy.optimizer.kwargs.lr"]) == "default of OptimizerConfig"
    assert str(source["loss_fn.name"]) == "default of the algorithm grpo"
    assert str(source["env.arithmetic.name"]) == "default of env.arithmetic"


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_the_resolved_config_loads_as_the_same_run(files, example, monkeypatch):
    monkeypatch.syspath_prepend(example.parent)  # examples may name code next to them
    loaded = load_config(
        example, ["++policy.hf_cfg.config_overrides={rate: 0.1, note: '\\${kept}', cap: .inf}"], registry=files.registry
    )
    again = load_config(files.write(loaded.to_yaml()), registry=files.registry)
    assert again.run == loaded.run
    assert again.resolved == loaded.resolved


def test_there_are_examples():
    assert EXAMPLES


def test_config_sections_can_be_pickled(files, good):
    run = files.load(good).run
    assert pickle.loads(pickle.dumps(run)) == run


def test_a_section_cannot_be_changed(files, good):
    with pytest.raises(ValidationError, match="frozen"):
        files.load(good).run.policy.precision = "bfloat16"


@pytest.mark.slow
def test_loading_imports_none_of_the_heavy_libraries(files, good):
    path = files.write(good)
    code = (
        "import sys\n"
        "from rl_train.config.loader import load_config\n"
        f"load_config({str(path)!r}, ['policy.precision=bfloat16'])\n"
        "print(sorted({'torch', 'ray', 'numpy', 'transformers'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert result.stdout.strip() == "[]"
