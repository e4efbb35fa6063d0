"""`rlcore convert`: writes a checkpoint in another format. The policy backend implements the formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint (step folder) of a run, a run folder for its newest one, or a folder in Hugging Face format.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="Folder to write; must be new or empty.", show_default=False)
    ],
    to: Annotated[str, typer.Option("--to", help="Output format: hf, or one that the policy backend adds.")] = "hf",
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge LoRA adapters into the base model and write a full model.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="Path of the initial model of the run, if it has moved.")] = None,
    trust_checkpoint: Annotated[
        bool,
        typer.Option(
            "--trust-checkpoint", help="Allow code that the checkpoint's config refers to: backends by import path, model code."
        ),
    ] = False,
) -> None:
    """Convert a checkpoint of a run, by default to Hugging Face format.

    `--to hf` writes a folder that Transformers, vLLM and other libraries load by its path. If the run trained LoRA adapters, it
    writes the adapter in peft's format, or a full model with `--merge`.

    Example:
        rlcore convert runs/sums sums-model
        rlcore convert runs/sums/checkpoints/step_000120 sums-model
        rlcore convert runs/sums/checkpoints/step_000120 --to hf --merge sums-model
    """
    from rl_train.run_folders.checkpoint_paths import newest_step
    from rl_train.run_folders.convert import convert as run

    source = newest_step(checkpoint)
    if source != checkpoint:
        print(f"Newest checkpoint of {checkpoint}: {source}")
    done = run(source, output, to=to, merge=merge, model=model, trust=trust_checkpoint)
    how = "copied" if done.backend is None else f"by the policy backend {done.backend}"
    print(f"Wrote {done.output}: {len(done.files)} files, {done.num_bytes / 2**20:.1f} MiB, {how}")
    for name in done.files:
        print(f"  {name}")
    if done.left_out:
        print(f"Left out, because only weights, config, tokenizer and templates are written: {', '.join(done.left_out)}")
    if done.needed_code:
        print(
            f"The model needs {', '.join(done.needed_code)}, which a config names in `auto_map`. Read the code; if you trust "
            "it, copy it too."
        )
