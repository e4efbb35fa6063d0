"""`rlcore convert`: writes a checkpoint in another format. The policy backend implements the formats."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rl_core.errors import UserError
from rl_train.files import format_size
from rl_train.run_folders.run_names import completed_runs, existing_run_path


def convert(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint (step folder) of a run; a run folder, or its name in runs, for its newest one; or a folder in "
            "Hugging Face format.",
            show_default=False,
            autocompletion=completed_runs,
        ),
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="Folder to write; must be new or empty.", show_default=False)
    ],
    to: Annotated[
        str, typer.Option("--to", help="Output format: hf, the name of the policy backend for its own, or one that it adds.")
    ] = "hf",
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge LoRA adapters into the base model and write a full model.")
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the LoRA adapter; an error if the checkpoint has none.")
    ] = False,
    best: Annotated[bool, typer.Option("--best", help="Use the best checkpoint of a run folder, not the newest.")] = False,
    model: Annotated[str | None, typer.Option(help="Path of the initial model of the run, if it has moved.")] = None,
    allow_config_change: Annotated[
        bool,
        typer.Option("--allow-config-change", help="With --merge: merge although the base weights are not those of the run."),
    ] = False,
    push_to: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="OWNER/NAME",
            help="Write a model card from the run and upload OUTPUT to the Hugging Face Hub, as a private repository.",
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: a new repository is public.")] = False,
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

    `--push` adds a model card (settings, results and versions of the run; nothing private) and uploads the
    folder with `huggingface_hub`. Not run against the hub itself.

    Example:
        rlcore convert sums sums-model
        rlcore convert runs/sums/checkpoints/step_000120 sums-model
        rlcore convert runs/sums/checkpoints/step_000120 --to hf --merge sums-model
        rlcore convert runs/sums/checkpoints/step_000120 --to hf --adapter sums-adapter
        rlcore convert runs/sums sums-model --best --push acme/sums-model
    """
    from rl_train.run_folders.checkpoint_paths import step_folder
    from rl_train.run_folders.convert import convert as run

    checkpoint = existing_run_path(checkpoint)
    source = step_folder(checkpoint, best=best)
    if push_to is not None:
        _check_push(push_to, source)
    elif public:
        raise UserError("--public is an option of an upload. Add --push OWNER/NAME.")
    if source != checkpoint:
        print(f"{'Best' if best else 'Newest'} checkpoint of {checkpoint}: {source}")
    done = run(
        source,
        output,
        to=to,
        merge=merge,
        adapter=adapter,
        model=model,
        trust=trust_checkpoint,
        allow_config_change=allow_config_change,
    )
    how = "copied" if done.backend is None else f"by the policy backend {done.backend}"
    print(f"Wrote {done.output}: {len(done.files)} files, {format_size(done.num_bytes)}, {how}")
    for name in done.files:
        print(f"  {name}")
    if done.left_out:
        print(f"Left out, because only weights, config, tokenizer and templates are written: {', '.join(done.left_out)}")
    if done.needed_code:
        print(
            f"The model needs {', '.join(done.needed_code)}, which a config names in `auto_map`. Read the code; if you trust "
            "it, copy it too."
        )
    if done.tokenizer is not None:
        print(
            f"The tokenizer is the code {done.tokenizer}, which Transformers cannot load: install it where the model is used. "
            "For AutoTokenizer, publish a tokenizer.json with the same tokens. In Python: rl_core.data.load_tokenizer("
            f"{done.tokenizer!r}, model_name={str(output)!r})"
        )
    if to == "hf" and "config.json" in done.files:
        code = "" if done.tokenizer is None else f" policy.tokenizer.name={shlex.quote(done.tokenizer)}"
        commands = (f"  rlcore {command} {shlex.quote(str(output))} --backend hf{code}" for command in ("chat", "serve"))
        print("Next:", *commands, sep="\n")
    if push_to is not None:
        _push(done.output, push_to, source, public=public)


def _check_push(name: str, step: Path) -> None:
    from rlcore_cli.publishing import check_repository_name

    check_repository_name(name)
    if step.parent.name != "checkpoints":
        raise UserError(f"--push writes a model card from the run, and {step} is not a checkpoint in a run folder.")


def _push(folder: Path, name: str, step: Path, *, public: bool) -> None:
    from rlcore_cli.publishing import FILE, model_card, push
    from rlcore_cli.report.run_folder import read_run_folder

    run = read_run_folder(step.parent.parent)
    (folder / FILE).write_text(model_card(run, int(step.name.removeprefix("step_")), name), encoding="utf-8")
    print(f"Wrote {folder / FILE}; uploading to {name} ...", flush=True)
    print(f"Uploaded: {push(folder, name, public=public)}")
