"""A checkout of the repository, a folder or a commit, and the commands that run in it with an interpreter.

The libraries are those of its interpreter, by default that of this process: the `src` folders of each checkout come first on
the path, with metadata made from its own `pyproject.toml` files, so that each finds its own plugins.
"""

import json
import os
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
HIDDEN = "checkout"
"""What paths of a checkout are called in outputs."""


class Checkout:
    """The sources in `folder`, called `label` in messages; `scratch` is its own empty folder."""

    def __init__(self, label, folder, scratch, python=sys.executable):
        self.label, self.folder, self.scratch, self.interpreter = label, folder, scratch, python
        self.metadata = scratch / "metadata"
        projects = sorted(folder.glob("*/pyproject.toml"))
        if not projects:
            raise SystemExit(f"{folder} is no checkout: it has no folder with a pyproject.toml and src.")
        for project in projects:
            write_metadata(tomllib.loads(project.read_text())["project"], self.metadata)
        self.path = [self.metadata, *(project.parent / "src" for project in projects)]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, self.path)),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "RLCORE_STRICT_PLUGINS": "1",
            "COLUMNS": "120",
        }
        self.server, self.is_ready = None, False

    def start(self):
        """The process whose forks run the commands."""
        with (self.scratch / "server.log").open("w") as log:
            self.server = subprocess.Popen(
                [self.interpreter, HERE / "fork_server.py", self.folder / "examples" / "grpo_addition.yaml"],
                env=self.environment,
                cwd=self.scratch,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
            )

    def rlcore(self, argv, folder, output, errors, timeout=300):
        """Exit code of a command; None if it did not end in time."""
        if not self.is_ready:
            self.is_ready = bool(self.answer())
        request = {"argv": argv, "folder": str(folder), "output": str(output), "errors": str(errors), "timeout": timeout}
        self.server.stdin.write(json.dumps(request) + "\n")
        return json.loads(self.answer())

    def answer(self):
        if not (line := self.server.stdout.readline()):
            raise SystemExit(f"The process of {self.label} exited:\n{(self.scratch / 'server.log').read_text()[-2000:]}")
        return line

    def python(self, *arguments, **environment):
        """Run Python with the sources of the checkout, in its folder."""
        environment = {**self.environment, **environment}
        return subprocess.run(
            [self.interpreter, *map(str, arguments)],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def without_paths(self, text):
        """A text in which paths do not depend on the checkout."""
        for path in (*self.path, self.scratch, self.folder):
            text = text.replace(f"{path}/", f"{HIDDEN}/").replace(f'{path}"', f'{HIDDEN}"')
        return text

    def stop(self):
        if self.server is not None:
            self.server.stdin.close()
            self.server.wait()


def write_metadata(project, folder):
    """What an installation of the distribution would write, as far as plugins and their requirements are found by it."""
    name, extras = project["name"], project.get("optional-dependencies", {})
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {project['version']}"]
    lines += [f"Summary: {project['description']}"] if "description" in project else []
    lines += [f"Requires-Dist: {requirement}" for requirement in project.get("dependencies", [])]
    for extra, requirements in extras.items():
        lines += [f"Provides-Extra: {extra}", *(f"Requires-Dist: {with_extra(each, extra)}" for each in requirements)]
    points = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    info = folder / f"{name.replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in each.items()) for group, each in points.items())
    )


def with_extra(requirement, extra):
    plain, _, marker = requirement.partition(";")
    return f"{plain}; ({marker.strip()}) and extra == '{extra}'" if marker else f"{plain}; extra == '{extra}'"


@contextmanager
def checkouts(names, scratch, interpreters=(sys.executable, sys.executable)):
    """The checkouts by their names, folders or commits of this repository. Commits are unpacked below `scratch`."""
    opened = []
    try:
        for label, name, python in zip(("OLD", "NEW"), names, interpreters, strict=True):
            own = scratch / label.lower()
            own.mkdir()
            folder = Path(name).resolve() if Path(name).is_dir() else unpacked(name, own / "sources")
            opened.append(Checkout(label, folder, own, python))
        yield opened
    finally:
        for checkout in opened:
            checkout.stop()


def unpacked(commit, folder):
    """The files of a commit of this repository. Git is left as it is: no worktree that must be removed again."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, capture_output=True, check=False)
    if archive.returncode:
        raise SystemExit(f"{commit} is neither a folder nor a commit: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder
