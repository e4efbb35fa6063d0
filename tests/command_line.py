"""The `rlcore` command in this process: a new interpreter would take up to ten seconds to import the same modules."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

from rlcore_cli.main import main


def rlcore(*arguments):
    """Exit code, standard output and standard error of the command."""
    output, errors = io.StringIO(), io.StringIO()
    command, code, path = ["rlcore", *map(str, arguments)], 0, list(sys.path)
    try:
        with patch.object(sys, "argv", command), patch.dict(os.environ), redirect_stdout(output), redirect_stderr(errors):
            main()
    except SystemExit as left:
        code = left.code or 0
    finally:
        sys.path[:] = path
    return subprocess.CompletedProcess(command, code, output.getvalue(), errors.getvalue())
