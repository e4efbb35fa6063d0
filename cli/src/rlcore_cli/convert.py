"""`rlcore convert`: a checkpoint as files that others load. What a format is, the policy backend knows, not this room."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A step folder of a run, or a folder of Transformers.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="The folder to write; a new or an empty one.", show_default=False)
    ],
    to: Annotated[str, typer.Option("--to", help="hf, or a format that the policy backend adds.")] = "hf",
    merge: Annotated[
        bool, typer.Option("--merge", help="Fold adapters into the model that they belong to, for a model of its own.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Where the model is that the run began from, if it has moved since.")
    ] = None,
    trust_checkpoint: Annotated[
        bool,
        typer.Option(
            "--trust-checkpoint", help="Run code that the checkpoint's config names: a backend by its path, a model's own code."
        ),
    ] = False,
) -> None:
    """Write a checkpoint as a folder that others load.

    `--to hf` gives what Transformers, vLLM and others load by its path. Where the run trained adapters (LoRA), it gives the
    adapter in peft's format, and with `--merge` a whole model.

    Example:
        rlcore convert runs/sums/checkpoints/step_000120 sums-model
        rlcore convert runs/sums/checkpoints/step_000120 --to hf --merge sums-model
    """
    import os

    # Before torch is loaded, as in `rlcore train`.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from rl_core.assembly.convert import convert as run

    done = run(checkpoint, output, to=to, merge=merge, model=model, trust=trust_checkpoint)
    how = "copied" if done.backend is None else f"by the policy backend {done.backend}"
    print(f"{done.output} written: {len(done.files)} files, {done.num_bytes / 2**20:.1f} MiB, {how}")
    for name in done.files:
        print(f"  {name}")
