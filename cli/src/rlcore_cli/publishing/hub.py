"""Uploads a model folder to the Hugging Face Hub. Not run against the hub itself, only against a server with its protocol."""

from __future__ import annotations

from pathlib import Path

from rl_core.errors import UserError


def check_repository_name(name: str) -> None:
    """Refuses a name that the Hub would refuse, before anything is converted.

    Raises:
        UserError: The name is not `OWNER/NAME`.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push {name}: {error} Give OWNER/NAME.") from error
    if name.count("/") != 1:
        raise UserError(f"--push {name} has no owner. Give OWNER/NAME, such as acme/{name}.")


def push(folder: Path, name: str, *, public: bool) -> str:
    """Upload a folder as one commit, creating the repository if there is none; returns the address of the commit.

    The account is the one of `hf auth login` or `HF_TOKEN`. A repository that exists keeps its visibility.

    Raises:
        UserError: The Hub cannot be reached or refuses; the folder is complete and can be uploaded again.
    """
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi()
    try:
        repository = api.create_repo(name, private=not public, exist_ok=True)
        commit = api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="Upload by rlcore convert")
    except (HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled, httpx.HTTPError, OSError, ValueError) as error:
        cause = str(error).strip().splitlines()[0]
        raise UserError(
            f"{folder} was not uploaded to {name}: {cause}\nThe folder is complete. Check the login (`hf auth whoami`) and the "
            f"network, then upload it with: hf upload {name} {folder}"
        ) from error
    return str(commit.commit_url)
