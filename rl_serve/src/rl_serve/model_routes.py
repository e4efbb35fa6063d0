"""`GET /v1/models` and `GET /v1/models/{model}`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI

from rl_serve.errors import model_not_found


def add_model_routes(
    app: FastAPI,
    models: Callable[[], Awaitable[Mapping[str, Mapping[str, Any]]]],
    *,
    responses: dict[int | str, dict[str, Any]],
) -> None:
    """Serve a list of models, and each of them by its id, which may contain slashes.

    Args:
        app: The application.
        models: Name to further fields of each model.
        responses: The errors of `models`, for the OpenAPI document; a missing model adds status 404.
    """

    async def entries() -> dict[str, dict[str, Any]]:
        entry = {"object": "model", "created": 0, "owned_by": "rlcore"}
        return {name: {"id": name, **entry, **fields} for name, fields in (await models()).items()}

    async def list_models() -> dict[str, Any]:
        """The served models."""
        return {"object": "list", "data": list((await entries()).values())}

    async def retrieve(model: str) -> dict[str, Any]:
        """The model with this id."""
        found = await entries()
        if model not in found:
            raise model_not_found(model, found)
        return found[model]

    app.get("/v1/models", responses=responses)(list_models)
    app.get("/v1/models/{model:path}", responses={404: {"description": "There is no such model."}, **responses})(retrieve)
