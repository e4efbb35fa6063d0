"""`rlcore watch`: serves a live page of a run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from rl_train.run_folders.run_names import RUNS, completed_runs, existing_run_path, newest_run


def watch(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            help="A run folder, or its name in runs; by default the newest in runs.",
            show_default=False,
            autocompletion=completed_runs,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")] = 0,
) -> None:
    """Show a live page of a run in a browser: progress, curves, rollouts, log.

    The page is served to this machine only, and changes nothing. Without RUN, it shows the run that started last, also if that
    run starts later. Ctrl-C ends the command.

    Example:
        rlcore watch
        rlcore watch grpo_addition --port 8000
    """
    from rlcore_cli.report.run_folder import read_run_folder
    from rlcore_cli.watch.live_page import LivePage
    from rlcore_cli.watch.server import WatchServer

    if run is not None:
        run = existing_run_path(run)
        read_run_folder(run)
    waiting = f"There is no run in {RUNS.resolve()} yet. This page shows the first one that starts."
    page = LivePage((lambda: newest_run(RUNS)) if run is None else (lambda: run), waiting=waiting)
    with WatchServer(page, port=port) as server, suppress(KeyboardInterrupt):
        print(f"{run or newest_run(RUNS) or RUNS}: {server.url} (Ctrl-C ends)", flush=True)
        server.serve_forever()
