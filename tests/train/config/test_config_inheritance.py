"""`defaults:` merges files depth first, and rejects cycles and unreadable files."""

from rl_core.config.diagnostics import Problems
from rl_core.plugins.import_path import MODULE_FOLDERS
from rl_core.plugins.manager import discover
from rl_train.config.loader import load_config
from rl_train.config.sources import LARGEST_FILE, read_sources
from rl_train.run_folders.run_folder import write_origins


def merged(files, text):
    problems = Problems()
    root = read_sources(files.write(text), problems=problems)
    assert problems.found == []
    return root.plain()


def test_a_file_wins_over_what_it_inherits_and_mappings_merge(files):
    files.write("policy: {precision: float32, optimizer: {kwargs: {lr: 1}}}\ncluster: {num_nodes: 2}", "base.yaml")
    text = "defaults: base.yaml\npolicy: {optimizer: {kwargs: {weight_decay: 2}}}\ncluster: {num_nodes: 3}"
    assert merged(files, text) == {
        "policy": {"precision": "float32", "optimizer": {"kwargs": {"lr": 1, "weight_decay": 2}}},
        "cluster": {"num_nodes": 3},
    }


def test_parents_are_merged_in_order_and_depth_first(files):
    files.write("a: root\nb: root\nc: root\nd: root", "root.yaml")
    files.write("defaults: root.yaml\nb: left\nc: left", "left.yaml")
    files.write("c: right", "right.yaml")
    assert merged(files, "defaults: [left.yaml, right.yaml]\nd: own") == {"a": "root", "b": "left", "c": "right", "d": "own"}


def test_a_parent_path_is_relative_to_the_file_that_names_it(files):
    files.write("defaults: ../shared/base.yaml", "configs/middle.yaml")
    files.write("a: 1", "shared/base.yaml")
    assert merged(files, "defaults: configs/middle.yaml") == {"a": 1}


def test_a_parent_shared_by_two_files_is_not_a_cycle(files):
    files.write("a: 1", "root.yaml")
    files.write("defaults: root.yaml\nb: 2", "left.yaml")
    files.write("defaults: root.yaml\nc: 3", "right.yaml")
    assert merged(files, "defaults: [left.yaml, right.yaml]") == {"a": 1, "b": 2, "c": 3}


def test_a_list_replaces_the_inherited_one(files):
    files.write("a: [1, 2]", "base.yaml")
    assert merged(files, "defaults: base.yaml\na: [3]") == {"a": [3]}


def test_a_section_can_replace_the_inherited_one(files):
    files.write("p: {q: {a: 1, b: 2}, r: 3}", "base.yaml")
    assert merged(files, "defaults: base.yaml\np:\n  q: {_override_: true, c: 3}") == {"p": {"q": {"c": 3}, "r": 3}}


def test_an_empty_section_keeps_inherited_values_and_null_removes_them(files):
    files.write("grpo: {a: 1}\nenv: {b: 2}", "base.yaml")
    assert merged(files, "defaults: base.yaml\ngrpo:\nenv: null") == {"grpo": {"a": 1}, "env": None}


def test_null_removes_an_inherited_task_set_or_logger(files, good):
    own = "env: {math: null}\nlogger: {loggers: {wandb: null}}\ndata: {validation_sets: {hard: null}}\n"
    more = "  math: {}\nlogger: {loggers: {wandb: {}}}\n"
    files.write(good.replace("data:", "data:\n  validation_sets: {hard: {dataset_name: arithmetic}}") + more, "base.yaml")
    inherited = files.load("defaults: base.yaml\n").run
    assert [*inherited.env] == ["arithmetic", "math"]
    assert "wandb" in inherited.logger.loggers
    overrides = ("env.math=null", "logger.loggers.wandb=null", "data.validation_sets.hard=null")
    for run in (files.load(f"defaults: base.yaml\n{own}").run, files.load("defaults: base.yaml\n", *overrides).run):
        assert [*run.env] == ["arithmetic"]
        assert "wandb" not in run.logger.loggers
        assert not run.data.validation_sets
    assert [*files.load("defaults: base.yaml\nenv:\n  math:\n").run.env] == ["arithmetic", "math"], "empty: its defaults"
    assert [*files.load(good + "  math: null\n").run.env] == ["arithmetic", "math"], "nothing is inherited"


def test_an_inheritance_cycle_is_reported_at_the_line_that_closes_it(files):
    files.write("defaults: config.yaml", "base.yaml")
    assert files.errors("a: 1\ndefaults: base.yaml") == [
        "base.yaml:1:11: defaults: These files inherit from each other in a cycle: config.yaml -> base.yaml -> config.yaml. "
        "Remove one of the `defaults`."
    ]


def test_a_file_cannot_inherit_from_itself(files):
    assert "in a cycle: config.yaml -> config.yaml." in files.errors("defaults: config.yaml")[0]


def test_a_missing_parent_is_reported_at_its_line_with_the_nearest_file_name(files):
    files.write("", "base.yaml")
    assert files.errors("grpo:\ndefaults: [bsae.yaml]") == [
        "config.yaml:2:12: defaults: File bsae.yaml does not exist. Did you mean base.yaml?"
    ]


def test_a_parent_must_be_named_by_text(files):
    assert files.errors("defaults: [3, {a: b}]")[:2] == [
        "config.yaml:1:12: defaults: must be a file or a list of files to inherit from; found 3.",
        "config.yaml:1:15: defaults: must be a file or a list of files to inherit from; found a mapping of a.",
    ]


def test_mistakes_in_a_parent_are_reported_in_the_parent(files, good):
    files.write("cluster:\n  num_nodes: 0", "base.yaml")
    assert files.errors(f"defaults: base.yaml\n{good}") == [
        "base.yaml:2:14: cluster.num_nodes: must be a whole number, 1 or more; found 0."
    ]


def test_a_file_can_override_an_invalid_value_of_its_parent(files, good):
    files.write("cluster:\n  num_nodes: 0", "base.yaml")
    assert files.load(f"defaults: base.yaml\n{good}cluster: {{num_nodes: 1}}").run.cluster.num_nodes == 1


def test_unreadable_config_files_are_errors_with_a_reason(files):
    (files.folder / "folder.yaml").mkdir()
    (files.folder / "started").mkdir()
    files.write("", "started/config.yaml")
    cases = {
        "nosuch.yaml": "does not exist.",
        "nosuch/x.yaml": "does not exist either",
        "folder.yaml": "is a folder: give a YAML file in it.",
        "started": f"{files.folder}/started is a folder: give {files.folder}/started/config.yaml.",
        "\0": "is not a valid file name",
        "x" * 300: "cannot be read: File name too long.",
    }
    for name, expected in cases.items():
        problems = Problems()
        read_sources(f"{files.folder}/{name}", problems=problems)
        assert expected in str(problems.found[0]), name


def test_binary_and_very_large_files_are_refused(files):
    assert files.errors(b"a: 1\nb: \xff\xfe") == ["config.yaml:2:4: Invalid UTF-8 (byte 0xFF): save the config as UTF-8."]
    assert files.errors(b"GGUF\x03\x00\x00\x00")[0].startswith("config.yaml:1:5: The character U+0003 is not allowed")
    assert files.errors(b"#" * (LARGEST_FILE + 1)) == [
        "config.yaml is larger than 1024 KiB, so it is probably not a config: give a YAML config file."
    ]


def test_a_root_that_is_not_a_mapping_is_an_error(files):
    assert files.errors("- a\n- b") == [
        "config.yaml:1:1: A config must be a mapping of sections (`policy:`, `data:`, ...), not a list of 2."
    ]


def test_a_byte_order_mark_is_ignored(files, good):
    assert files.load(b"\xef\xbb\xbf" + good.encode()).run.algorithm_name == "grpo"


def test_the_config_of_a_run_folder_finds_the_modules_that_its_run_found(tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    (tmp_path / "run").mkdir()
    path = tmp_path / "project" / "run.yaml"
    path.write_text(
        "grpo: {}\npolicy: {backend: hf, model_name: a, generation: {backend: hf}}\n"
        "data: {train: {dataset_name: arithmetic}}\nenv: {arithmetic: {}}\n"
    )
    monkeypatch.chdir(tmp_path)
    loaded = load_config(path)
    write_origins(tmp_path / "run", loaded, discover())
    path.unlink()
    monkeypatch.chdir("/")
    load_config(tmp_path / "run" / "config.yaml")
    assert str(tmp_path / "project") in MODULE_FOLDERS
    assert str(tmp_path) in MODULE_FOLDERS
    (tmp_path / "run" / "provenance.json").write_text('{"folders": 3}')
    load_config(tmp_path / "run" / "config.yaml")
    assert str(tmp_path / "project") not in MODULE_FOLDERS
