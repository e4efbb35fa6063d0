"""`rlcore import-config` lists every key of a NeMo RL config once, with its location, and writes a valid rlcore config."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from nemo_rl_configs import NAMES, leaves, run
from omegaconf import OmegaConf
from typer.testing import CliRunner

from rl_core.errors import ConfigError
from rlcore_cli.importing.apply import describe, import_config
from rlcore_cli.main import app


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_a_nemo_rl_config_is_listed_exactly_once(nemo_rl, name):
    merged = OmegaConf.create()
    chain = [name]
    while (parent := yaml.safe_load((nemo_rl / chain[0]).read_text()).get("defaults")) is not None:
        chain.insert(0, parent[0] if isinstance(parent, list) else parent)
    for file in chain:
        merged = OmegaConf.merge(merged, OmegaConf.load(nemo_rl / file))
    merged.pop("defaults", None)
    expected = leaves(OmegaConf.to_container(merged))
    listed = [line.key for line in import_config(nemo_rl / name).lines if line.location is not None]
    assert sorted(listed) == sorted(expected)


@pytest.mark.parametrize("name", NAMES)
def test_every_line_has_the_source_location_of_its_key(nemo_rl, name):
    for line in import_config(nemo_rl / name).lines:
        if line.location is None:
            assert "(framework default)" in describe(line)
            continue
        written = Path(line.location.file).read_text().splitlines()[line.location.line - 1]
        last = next(part for part in reversed(line.key.split(".")) if not part.isdecimal())
        assert written[line.location.column - 1 :].startswith(last), (line.key, written)


def test_the_command_writes_the_config_lists_all_keys_and_reports_that_it_is_valid(nemo_rl, tmp_path):
    result = run(nemo_rl / "grpo.yaml", "--output", tmp_path / "ours.yaml")
    assert result.exit_code == 0, result.output
    assert "ours.yaml passes `rlcore validate`" in result.stdout
    [line] = [line for line in result.stdout.splitlines() if " grpo.invented_by_a_fork" in line]
    assert re.search(r"grpo\.yaml:16:3  grpo\.invented_by_a_fork = 3: unknown NeMo RL key", line)
    assert CliRunner().invoke(app, ["validate", str(tmp_path / "ours.yaml")]).exit_code == 0


def test_without_an_output_file_the_config_is_written_to_standard_output_and_the_list_to_standard_error(nemo_rl):
    result = run(nemo_rl / "dpo.yaml")
    assert set(yaml.safe_load(result.stdout)) == {"dpo", "loss_fn", "policy", "data", "cluster", "checkpointing", "logger"}
    assert "kept (" in result.stderr


def test_validation_errors_of_the_new_config_are_listed(nemo_rl, tmp_path):
    (tmp_path / "theirs.yaml").write_text(f"defaults: {nemo_rl}/sft.yaml\ndata: {{train: {{dataset_name: squad}}}}\n")
    (tmp_path / "open.yaml").write_text(f"defaults: {nemo_rl}/sft.yaml\ndata: {{train: {{data_path: '???'}}}}\n")
    for name in ("theirs.yaml", "open.yaml"):
        result = run(tmp_path / name, "--json")
        assert result.exit_code == 0
        listed = json.loads(result.stdout)
        assert listed["config"]["data"]["train"]["path"] == "???"
        assert [error.partition(":")[0] for error in listed["errors"]] == ["data.train.path"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "does not exist"),
        ("grpo: [1, 2\n", "theirs.yaml:2"),
        ("- grpo\n- sft\n", "must be a mapping of sections"),
        ("", "but has none"),
        ("trainer: {steps: 3}\n", "but has trainer"),
        ("grpo: {seed: '${nowhere.to.be.found}'}\n", "there is no key 'nowhere.to.be.found'"),
        ("defaults: gone.yaml\ngrpo: {}\n", "gone.yaml"),
    ],
)
def test_a_file_that_is_not_a_nemo_rl_config_is_a_user_error(tmp_path, text, says):
    path = tmp_path / "theirs.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        import_config(path)
    assert says in str(caught.value)
    assert caught.value.exit_code == 2
    assert isinstance(run(path).exception, ConfigError)


def test_an_rlcore_config_is_rejected(tmp_path):
    (tmp_path / "ours.yaml").write_text("grpo: {max_num_steps: 3}\npolicy: {backend: hf, model_name: acme/small}\n")
    with pytest.raises(ConfigError, match=r"is already an rlcore config: it sets policy\.backend"):
        import_config(tmp_path / "ours.yaml")


def test_an_existing_output_file_is_not_overwritten(nemo_rl, tmp_path):
    (tmp_path / "ours.yaml").write_text("precious\n")
    assert isinstance(run(nemo_rl / "sft.yaml", "--output", tmp_path / "ours.yaml").exception, ConfigError)
    assert (tmp_path / "ours.yaml").read_text() == "precious\n"


ODD = st.sampled_from([None, True, False, 0, -1, 3, 0.5, "", "text", "???", [], [1], [{}], [{"a": 1}], {}, {"a": {"b": 1}}])


@pytest.fixture(scope="module")
def known(nemo_rl):
    return [line.key for name in (*NAMES, "hub.yaml") for line in import_config(nemo_rl / name).lines]


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_values_of_any_type_are_listed_without_a_traceback(known, tmp_path, data):
    theirs = {}
    for key in data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=8, unique=True)):
        *way, last = [part for part in key.split(".") if not part.isdecimal()]
        holder = theirs
        for part in way:
            holder = holder.setdefault(part, {}) if isinstance(holder, dict) else {}
        if isinstance(holder, dict):
            holder[last] = data.draw(ODD)
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump(theirs))
    imported = import_config(tmp_path / "odd.yaml")
    assert sorted(line.key for line in imported.lines if line.location is not None) == sorted(leaves(theirs))
    assert (yaml.safe_load(imported.to_yaml()) or {}).keys() == imported.values.keys()
