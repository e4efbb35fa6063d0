"""A resume compares what the config refers to: reward functions, frozen models, templates and data, by content."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rl_core.errors import CheckpointError
from rl_train.checkpoints.manifest import write_manifest
from rl_train.evaluation.evaluate import plan_evaluation
from rl_train.launch.train import train
from rl_train.run_folders.convert import convert

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"
REWARD = """
from own_reward_parts import digits


def score(completion, expected_answer):
    return float(digits(completion) == expected_answer)
"""
CONFIG = {
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 1},
    "policy": {
        "backend": "hf",
        "model_name": "model",
        "max_total_sequence_length": 24,
        "hf_cfg": {"lora": {"rank": 2, "target_modules": ["q_proj"]}},
        "tokenizer": {"chat_template": "template.jinja"},
        "generation": {"backend": "hf", "max_new_tokens": 4},
    },
    "data": {"train": {"dataset_name": "jsonl", "path": "train.jsonl"}},
    "env": {"sums": {"reward_fn": "own_reward.score"}},
    "cluster": {"backend": "in_process"},
    "checkpointing": {"save_period": 1},
    "logger": {"run_name": "run"},
}


def write_project(folder):
    shutil.copytree(MODEL, folder / "model")
    shutil.copy(MODEL / "chat_template.jinja", folder / "template.jinja")
    rows = [{"question": f"{n}+1=", "expected_answer": str(n + 1), "task_name": "sums"} for n in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own_reward.py").write_text(REWARD)
    (folder / "own_reward_parts.py").write_text("def digits(text):\n    return text.strip()\n")
    (folder / "run.yaml").write_text(json.dumps(CONFIG))


def forget_modules():
    """As in a new process."""
    for module in ("own_reward", "own_reward_parts"):
        sys.modules.pop(module, None)


def run_in(folder, *overrides, **options):
    forget_modules()
    return train(folder / "run.yaml", [f"logger.log_dir={folder / 'runs'}", *overrides], console=False, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("finished") / "project"
    folder.mkdir()
    write_project(folder)
    run_in(folder)
    return folder


@pytest.fixture
def project(finished, tmp_path):
    """A copy of the project with its run, in another folder: all paths differ."""
    return Path(shutil.copytree(finished, tmp_path / "moved"))


def change_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {name: weights[name] * 1.5}, folder / "model.safetensors", metadata={"format": "pt"})


def change_text(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


CHANGES = {
    "the function": (
        lambda folder: change_text(folder / "own_reward.py", "return float", "return -float"),
        "env.sums.reward_fn: score in own_reward.py changed",
    ),
    "a module that it imports": (
        lambda folder: change_text(folder / "own_reward_parts.py", "strip", "lstrip"),
        "env.sums.reward_fn: digits in own_reward_parts.py changed",
    ),
    "the base of the adapters": (
        lambda folder: change_tensor(folder / "model"),
        "policy.model_name: tensor model.layers.0.mlp.up_proj.weight changed",
    ),
    "the template": (
        lambda folder: (folder / "template.jinja").write_text("{{ messages[0]['content'] }}" * 2),
        "policy.tokenizer.chat_template: the file changed",
    ),
}


def test_a_moved_project_with_the_same_content_resumes(project):
    change_text(project / "own_reward.py", "\n\n\ndef", "  # the number\n\n\ndef")
    shutil.move(project / "train.jsonl", project / "rows.jsonl")
    again = run_in(project, f"data.train.path={project / 'rows.jsonl'}", "grpo.max_num_steps=2")
    assert (again.folder, again.resumed_from) == (project / "runs" / "run", 1)


@pytest.mark.parametrize("what", CHANGES)
def test_a_resume_with_other_inputs_is_refused_and_names_them(project, what):
    change, says = CHANGES[what]
    change(project)
    with pytest.raises(CheckpointError) as refused:
        run_in(project, "grpo.max_num_steps=2")
    assert f"\n  {says}\nContinue with the new config by --allow-config-change" in str(refused.value)


def test_changed_inputs_can_be_allowed_and_are_reported(project, own_messages):
    change_text(project / "own_reward.py", "return float", "return -float")
    assert run_in(project, "grpo.max_num_steps=2", allow_config_change=True).resumed_from == 1
    said = "\n".join(own_messages())
    assert (
        "resumed with a changed config, which applies from step 2 on:\n  env.sums.reward_fn: score in own_reward.py changed"
        in said
    )
    assert run_in(project, "grpo.max_num_steps=3").resumed_from == 2, "the checkpoint has the new function"


def test_other_rows_are_refused_even_if_config_changes_are_allowed(project):
    change_text(project / "train.jsonl", "5+1=", "5+2=")
    with pytest.raises(CheckpointError) as refused:
        run_in(project, "grpo.max_num_steps=2", allow_config_change=True)
    assert "data.train.path: the rows changed" in str(refused.value)
    assert "A resume cannot change data.train.path: the order of the data cannot continue with other rows" in str(refused.value)
    assert "--allow-config-change" not in str(refused.value)


def test_a_checkpoint_without_recorded_inputs_resumes(project):
    checkpoint = project / "runs" / "run" / "checkpoints" / "step_000001"
    state = json.loads((checkpoint / "state.json").read_text())
    del state["inputs"]
    state["config"]["policy"]["model_name"] = str(project / "model")
    state["config"]["policy"]["tokenizer"]["chat_template"] = str(project / "template.jinja")
    state["config"]["data"]["train"]["path"] = str(project / "train.jsonl")
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_manifest(checkpoint, step=1, metrics={})
    change_text(project / "own_reward.py", "return float", "return -float")
    assert run_in(project, "grpo.max_num_steps=2").resumed_from == 1


def test_an_evaluation_warns_of_another_reward_function_and_of_another_base(project, own_messages):
    change_text(project / "own_reward.py", "return float", "return -float")
    change_tensor(project / "model")
    forget_modules()
    plan = plan_evaluation(
        project / "run.yaml", [f"data.val_data_path={project / 'train.jsonl'}"], checkpoint=project / "runs" / "run"
    )
    assert plan.changed_code == {"env.sums.reward_fn": "score in own_reward.py changed"}
    [warning] = [text for text in own_messages() if "adapters" in text]
    assert (
        f"were trained on other weights than {project / 'model'} has now: tensor model.layers.0.mlp.up_proj.weight" in warning
    )


def test_adapters_are_merged_only_into_the_weights_that_they_were_trained_on(project, tmp_path):
    checkpoint = project / "runs" / "run" / "checkpoints" / "step_000001"
    convert(checkpoint, tmp_path / "same", to="hf", merge=True, model=str(project / "model"))
    (project / "model" / "tokenizer_config.json").unlink()
    convert(checkpoint, tmp_path / "same-weights", to="hf", merge=True, model=str(project / "model"))
    change_tensor(project / "model")
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.mlp\.up_proj\.weight changed.*--allow-config-change"):
        convert(checkpoint, tmp_path / "other", to="hf", merge=True, model=str(project / "model"))
    assert not (tmp_path / "other").exists()
    convert(checkpoint, tmp_path / "other", to="hf", merge=True, model=str(project / "model"), allow_config_change=True)


def test_adapters_trained_on_a_model_of_the_hub_are_not_merged_into_a_folder_with_other_weights(project, tmp_path):
    checkpoint = project / "runs" / "run" / "checkpoints" / "step_000001"
    state = json.loads((checkpoint / "state.json").read_text())
    state["inputs"]["policy.model_name"] = {"the commit of the hub": "a" * 40}
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_manifest(checkpoint, step=1, metrics={})
    convert(checkpoint, tmp_path / "same", to="hf", merge=True, model=str(project / "model"))
    change_tensor(project / "model")
    with pytest.raises(
        CheckpointError, match=r"other weights than \S+ has now: their digest is xxh3:\w+ instead of xxh3:\w+\."
    ):
        convert(checkpoint, tmp_path / "other", to="hf", merge=True, model=str(project / "model"))
