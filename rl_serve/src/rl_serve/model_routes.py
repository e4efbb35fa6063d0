"""`GET /v1/models` and `GET /v1/models/{model}`, from one list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI

from rl_serve.errors import model_not_found


def add_model_routes(
    app: FastAPI, list_models: Callable[[], Awaitable[dict[str, Any]]], *, responses: dict[int | str, dict[str, Any]]
) -> None:
    """Serve a list of models, and each of them by its id, which may contain slashes.

    Args:
        app: The application.
        list_models: The body of `GET /v1/models`.
        responses: The errors of `list_models`, for the OpenAPI document; a missing model adds status 404.
    """

    async def retrieve(model: str) -> dict[str, Any]:
        """The model with this id."""
        models = (await list_models())["data"]
        for entry in models:
            if entry["id"] == model:
                return dict(entry)
        raise model_not_found(model, [entry["id"] for entry in models])

    app.get("/v1/models", responses=responses)(list_models)
    app.get("/v1/models/{model:path}", responses={404: {"description": "There is no such model."}, **responses})(retrieve)
