"""A pytest plugin that records each config which tests load, valid or not, with the files next to it.

It writes JSON Lines to the file in the variable GOLDEN_CONFIGS. It wraps the functions that read configs, so those of new tests
are recorded as well. `recorded` starts pytest with it, and `command_of` repeats a recorded call as a command.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

TESTS = (
    "train/config/test_*.py",
    "cli/test_*config*.py",
    "cli/test_validate*.py",
    "cli/test_custom*.py",
    "backends_*/test_*config*.py",
)
"""Files of tests, below `tests`, whose configs are recorded."""
FAST = "not (slow or full or ray or vllm or megatron)"
MOST_OF_A_TEST = 60
"""Configs of one test function that are recorded: property tests draw hundreds."""
LARGEST = 64 * 1024
"""Bytes of the largest file that is recorded."""
KINDS = {".yaml", ".yml", ".json", ".jsonl", ".py", ".txt", ".csv", ".jinja"}


class Recorder:
    """Wraps the functions that read configs, before the modules of tests import them."""

    def __init__(self, file):
        self.file, self.test, self.seen, self.counts = file, "", set(), Counter()

    def pytest_runtest_setup(self, item):
        self.test = item.nodeid

    def wrap(self, module, name, kind):
        function = getattr(module, name)

        def recording(source, *arguments, **options):
            self.record(kind, source, arguments[0] if kind == "validate" and arguments else options.get("overrides", ()))
            return function(source, *arguments, **options)

        setattr(module, name, recording)

    def record(self, kind, source, overrides):
        try:
            row = self.row(kind, source, [str(each) for each in overrides])
        except (TypeError, ValueError, OSError):  # models, or files that cannot be read: not for a command line
            return
        function = self.test.partition("[")[0]
        if (key := json.dumps(row, sort_keys=True)) not in self.seen and self.counts[function] < MOST_OF_A_TEST:
            self.seen.add(key)
            self.counts[function] += 1
            with self.file.open("a") as file:
                file.write(json.dumps({"test": self.test, **row}) + "\n")

    def row(self, kind, source, overrides):
        if isinstance(source, Mapping):
            return {"kind": kind, "folder": None, "files": {}, "configs": [json.dumps(source)], "overrides": overrides}
        paths = [Path(source)] if isinstance(source, str | Path) else [Path(each) for each in source]
        files = {}
        for folder in {path.absolute().parent for path in paths}:
            files |= {str(path): path.read_text() for path in recordable(folder)}
        return {
            "kind": kind,
            "folder": os.getcwd(),
            "files": files,
            "configs": [str(path) for path in paths],
            "overrides": overrides,
        }


def recordable(folder):
    """Small text files of a folder of a test, and of those below it."""
    if not folder.is_relative_to(os.environ["GOLDEN_FOLDER"]):
        return
    for path in sorted(folder.rglob("*")):
        if path.suffix in KINDS and path.is_file() and path.stat().st_size < LARGEST:
            yield path


def pytest_configure(config):
    from rl_train.config import loader
    from rlcore_cli.importing import apply

    recorder = Recorder(Path(os.environ["GOLDEN_CONFIGS"]))
    recorder.wrap(loader, "draft_config", "validate")
    recorder.wrap(apply, "import_config", "import")
    config.pluginmanager.register(recorder)


def recorded(checkout, folder):
    """The configs that the tests of a checkout load; pytest's folders stay below `folder`, where configs refer to them."""
    file = folder / "configs.jsonl"
    if not file.exists():
        folder.mkdir()
        environment = {"GOLDEN_CONFIGS": str(file), "GOLDEN_FOLDER": str(folder / "tests")}
        options = ("-p", "recorded_configs", "-p", "no:cacheprovider", f"--basetemp={folder / 'tests'}", "-q", "-m", FAST)
        path = os.pathsep.join([str(Path(__file__).parent), checkout.environment["PYTHONPATH"]])
        files = sorted({str(each) for pattern in TESTS for each in (checkout.folder / "tests").glob(pattern)})
        done = checkout.python("-m", "pytest", *options, *files, **environment, PYTHONPATH=path)
        if not file.exists() or not file.stat().st_size:
            raise SystemExit(f"The tests of {checkout.folder} load no configs:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [json.loads(line) for line in file.read_text().splitlines()]


def command_of(row, folder):
    """The command for a recorded config, and the folder to run it in; its files are as they were when it was loaded."""
    for name, text in row["files"].items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    configs, work = row["configs"], row["folder"]
    if work is None:
        work = folder / "values"
        work.mkdir(exist_ok=True)
        (work / "config.yaml").write_text(configs[0])
        configs = ["config.yaml"]
    if not Path(work).is_dir():
        work = folder
    if row["kind"] == "import":
        return ("import-config", configs[0], "--json"), work
    layers = [word for each in configs[:-1] for word in ("--config", each)]
    return ("validate", *layers, configs[-1], "--json", "--", *row["overrides"]), work
