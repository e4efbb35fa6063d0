"""`rlcore compare`: reads run folders and shows where they differ. It changes nothing in them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcore_cli.arguments import AsJson

if TYPE_CHECKING:
    from rlcore_cli.compare.comparison import Comparison


def compare(
    run_folders: Annotated[
        list[Path], typer.Argument(metavar="RUN_FOLDER", help="Two run folders or more.", show_default=False)
    ],
    output: Annotated[Path | None, typer.Option(help="Write a page of HTML there, too.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every metric that all runs have.")] = False,
    as_json: AsJson = False,
) -> None:
    """Lay runs over each other: curves, what differs in their configs, the final and best value of each metric.

    Example:
        rlcore compare runs/grpo_addition runs/grpo_addition-2
        rlcore compare runs/a runs/b runs/c --output compare.html
    """
    from rl_core.errors import UserError
    from rlcore_cli.compare.comparison import compare_runs
    from rlcore_cli.compare.terminal import lines
    from rlcore_cli.report.run_folder import read_run_folder

    if len(run_folders) < 2:
        raise UserError(f"One run ({run_folders[0]}) cannot be compared: name another. `rlcore report` shows one alone.")
    comparison = compare_runs([read_run_folder(folder) for folder in run_folders])
    if output is not None:
        from rlcore_cli.compare.page import render_comparison
        from rlcore_cli.report.page import write_page

        write_page(output, render_comparison(comparison))
    if as_json:
        import json

        print(json.dumps(_plain(comparison), indent=2))
        return
    print("\n".join(lines(comparison, everything=everything)))
    if output is not None:
        print(f"\n{output} ({output.stat().st_size / 2**20:.2f} MiB)")


def _plain(comparison: Comparison) -> dict[str, Any]:
    return {
        "runs": {name: str(run.path) for name, run in zip(comparison.letters, comparison.runs, strict=True)},
        "config": {key: list(values) for key, values in comparison.settings},
        "versions": {key: list(values) for key, values in comparison.versions},
        "metrics": {
            verdict.metric: {
                "better": verdict.direction,
                "compared_at": verdict.step,
                "final": [{"value": value, "step": step} for value, step in verdict.finals],
                "best": None if verdict.bests is None else [{"value": value, "step": step} for value, step in verdict.bests],
            }
            for verdict in comparison.verdicts
        },
    }
