"""The rule for relative paths: relative to the working directory, else to the file that contains them.

The rule applies to fields annotated as `Annotated[str, INPUT_PATH]` or `Annotated[str, NAME_OR_PATH]`. Outputs of a run (the
run folder, checkpoints) are not marked, and are relative to the working directory. Independent of the sections.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PathRule:
    """Marks a field that may contain a path.

    Attributes:
        must_exist: Whether a path that does not exist is an error; otherwise it is unchanged, as the name of something.
    """

    must_exist: bool


INPUT_PATH = PathRule(must_exist=True)
"""A file or folder that the run reads."""
NAME_OR_PATH = PathRule(must_exist=False)
"""The name of something (a model of a hub, a packaged template), or the path of a file or folder."""
