"""Runs each case with both checkouts, old and new back to back, and prints one line per case."""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import recorded_configs
from checkouts import checkouts
from differences import ABSENT, Difference, compare_rows, compare_sets, compare_texts, compare_values, shortened, unexpected
from golden_cases import EXACT, NOTHING, TEXT, all_cases, write_inputs

USER_ERROR = 2
RECORDED = ("validate", "import")
"""Cases with the configs that tests load or import."""
SHOWN = 12


def main(arguments=None):
    """The exit code: 1 if anything differs that `--allow` does not name, or if a case ran in neither checkout."""
    options = parser().parse_args(arguments)
    scratch = Path(options.keep or tempfile.mkdtemp(prefix="rlcore-compare-")).resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    if any(scratch.iterdir()):
        raise SystemExit(f"{scratch} is not empty.")
    try:
        with checkouts((options.old, options.new), scratch, options.python) as both:
            return compared(both, scratch, options)
    finally:
        if options.keep is None:
            shutil.rmtree(scratch)


def parser():
    parser = argparse.ArgumentParser(prog="compare", description=sys.modules["__main__"].__doc__)
    parser.add_argument("old", metavar="OLD", help="folder or commit")
    parser.add_argument("new", metavar="NEW", help="folder or commit")
    parser.add_argument("--only", metavar="CASES", help="names of cases, separated by commas; * stands for any text")
    parser.add_argument(
        "--allow", metavar="CASE:KEY", nargs="+", default=[], help="differences to expect, such as 'grpo:reward/*'"
    )
    parser.add_argument(
        "--python",
        metavar=("OLD", "NEW"),
        nargs=2,
        type=os.path.abspath,
        default=[sys.executable] * 2,
        help="their interpreters, each with its libraries",
    )
    parser.add_argument("--keep", metavar="FOLDER", help="an empty folder in which outputs and logs are kept")
    return parser


def compared(both, scratch, options):
    inputs = scratch / "inputs"
    inputs.mkdir()
    write_inputs(both[1], inputs)
    cases = {case.name: partial(outcome, case, both, scratch) for case in all_cases(inputs)}
    cases |= {kind: partial(outcome_of_recorded, kind, both, scratch) for kind in RECORDED}
    chosen = selected(cases, options.only)
    for checkout in both:
        checkout.start()
    failed = 0
    for name in chosen:
        started = time.monotonic()
        ok, line = cases[name](options.allow)
        failed += not ok
        print(f"{name:20} {line}  ({time.monotonic() - started:.1f} s)", flush=True)
    print(f"{len(chosen)} cases, {failed} differ")
    return int(failed > 0)


def selected(names, only):
    patterns = only.split(",") if only else ["*"]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SystemExit(f"There is no case {pattern!r}. Cases: {', '.join(names)}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


class Result:
    """What one checkout made of a case: `folder` with its files, and exit code, output and errors of each command."""

    def __init__(self, case, checkout, scratch):
        self.checkout = checkout
        work = scratch / "work"  # the same path for both, because outputs contain it
        work.mkdir()
        for name, text in case.files.items():
            (work / name).write_text(text)
        streams = checkout.scratch / "outputs" / case.name
        streams.mkdir(parents=True)
        self.codes, self.outputs, self.errors = [], [], []
        for number, command in enumerate(case.commands, 1):
            output, errors = (streams / f"{number}.{kind}" for kind in ("out", "err"))
            self.codes.append(checkout.rlcore(command.argv, work, output, errors))
            written = output if command.file is None else work / command.file
            self.outputs.append(written.read_text() if written.exists() else "")
            self.errors.append(errors.read_text())
        self.folder = checkout.scratch / "results" / case.name
        self.folder.parent.mkdir(exist_ok=True)
        work.rename(self.folder)

    def failure(self, case):
        """The exit code and the last line of errors of the first run that failed; None if none did."""
        for command, code, errors in zip(case.commands, self.codes, self.errors, strict=True):
            if command.output == NOTHING and code != 0:
                lines = [line for line in errors.splitlines() if line.startswith("error: ")] or errors.splitlines()
                return code, shortened(lines[-1] if lines else "no message")
        return None

    def files(self):
        """Names of the files of metrics and rollouts, below the folder."""
        found = [*self.folder.glob("runs/*/metrics.jsonl"), *self.folder.glob("runs/*/rollouts/step_*.jsonl")]
        return sorted(str(path.relative_to(self.folder)) for path in found)


def outcome(case, both, scratch, allowed):
    """Whether a case is as expected, and its line."""
    old, new = (Result(case, checkout, scratch) for checkout in both)
    failures = old.failure(case), new.failure(case)
    if failures[0] and failures[1]:
        return False, f"runs in neither: {failures[1][1]}"
    if failures[0] and failures[0][0] == USER_ERROR:
        return True, f"only in NEW: {failures[0][1]}"
    if failures[0] or failures[1]:
        code, line = failures[0] or failures[1]
        return False, f"differs: fails in {'OLD' if failures[0] else 'NEW'} with exit code {code}: {line}"
    differences = list(differences_of(case, old, new))
    left = unexpected(case.name, differences, allowed)
    return not left, summary(left, len(differences) - len(left))


def summary(differences, allowed):
    """The first difference, and the names of all keys that differ."""
    more = f", {allowed} allowed differences" if allowed else ""
    if not differences:
        return f"equal{more}"
    keys = list(dict.fromkeys(each.key for each in differences))
    names = f"; {len(differences)} differences in {len(keys)} keys: {', '.join(keys[:SHOWN])}" if len(differences) > 1 else ""
    return f"differs: {differences[0]}{names}{', ...' if len(keys) > SHOWN else ''}{more}"


def differences_of(case, old, new):
    for number, command in enumerate(case.commands):
        if command.output != NOTHING:
            yield from differences_of_command(case, command, old, new, number)
    files = old.files(), new.files()
    for name in sorted({*files[0], *files[1]}):
        if name not in files[0] or name not in files[1]:
            yield Difference(name, "file", *(ABSENT if name not in each else "present" for each in files))
            continue
        left, right = ((result.folder / name).read_text() for result in (old, new))
        if case.rollouts == EXACT:
            yield from compare_rows(name, left, right, ignored=case.ignored)
        else:
            columns = case.metrics if name.endswith("metrics.jsonl") else case.columns
            yield from compare_sets(name, left, right, ignored=case.ignored, columns=columns)


def differences_of_command(case, command, old, new, number):
    place = f"rlcore {' '.join(command.argv)}"
    codes = [result.codes[number] for result in (old, new)]
    if codes[0] != codes[1]:
        yield Difference(place, "exit code", *map(str, codes))
        return
    outputs = [result.checkout.without_paths(result.outputs[number]) for result in (old, new)]
    if command.output == TEXT:
        yield from compare_texts(place, *outputs)
    elif any(outputs):
        yield from compare_values(place, *(json.loads(text) if text else ABSENT for text in outputs), ignored=case.ignored)


def outcome_of_recorded(kind, both, scratch, allowed):
    """Whether all configs that tests load have errors in the same places, or are imported in the same way, and the line."""
    rows = [row for row in recorded_configs.recorded(both[1], scratch / "recorded") if row["kind"] == kind]
    differences = []
    with ThreadPoolExecutor(2) as pool:
        for row in rows:
            argv, folder = recorded_configs.command_of(row, scratch / "recorded")
            results = list(pool.map(partial(printed_by, argv=argv, folder=folder), both))
            compare = compare_findings if kind == "validate" else compare_values
            differences += compare(row["test"], *results)
    left = unexpected(kind, differences, allowed)
    return not left, f"{summary(left, len(differences) - len(left))}; {len(rows)} configs"


def printed_by(checkout, argv, folder):
    """The JSON that a command prints; if it prints none, its exit code."""
    output, errors = (checkout.scratch / name for name in ("recorded.out", "recorded.err"))
    code = checkout.rlcore(argv, folder, output, errors)
    try:
        return json.loads(checkout.without_paths(output.read_text()))
    except json.JSONDecodeError:
        return {"exit code": code}


def compare_findings(test, old, new):
    """The errors of `validate --json` that only one checkout finds, by file, line and key; never their texts."""
    left, right = (set(findings_of(each)) for each in (old, new))
    for place, key in sorted(left ^ right):
        texts = ("error", ABSENT) if (place, key) in left else (ABSENT, "error")
        yield Difference(f"{test}: {place}", key, *texts)


def findings_of(result):
    if "exit code" in result:
        yield "", f"exit code {result['exit code']}"
    for error in result.get("errors", []):
        place = error["location"] if error["file"] is None else f"{Path(error['file']).name}:{error['line']}"
        yield place or "", error["key"]
