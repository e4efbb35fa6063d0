"""Errors of requests, in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

_MAX_MESSAGE = 2000
"""Characters of a message, which may quote the request."""


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        message: what is wrong and what to do.
        param: the parameter that is wrong.
        code: short name of the error, for programs.
        headers: additional headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > _MAX_MESSAGE:
            message = f"{message[:_MAX_MESSAGE]} ..."
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def close_connection(self) -> ApiError:
        """Let the response end the connection, because the rest of the request is not read; returns the error."""
        self.headers = {**(self.headers or {}), "Connection": "close"}
        return self

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's API returns it."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body(), status_code=self.status, headers=dict(self.headers or {}))


def model_not_found(name: str, known: Iterable[str]) -> ApiError:
    """The error of a request for a model that is not among the known ones."""
    listed = ", ".join(map(repr, known))
    return ApiError(404, f"There is no model {name!r}: this server has {listed}.", param="model", code="model_not_found")


def add_error_handlers(app: FastAPI) -> None:
    """Return all errors of an application in the format of OpenAI's API."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid_body(_: Request, error: RequestValidationError) -> JSONResponse:
        problems = []
        params = []
        for problem in error.errors():
            if problem["type"] == "json_invalid":
                where, reason = problem["loc"][-1], problem["ctx"]["error"]
                return ApiError(400, f"Invalid JSON at character {where}: {reason}.", code="invalid_body").response()
            path = _path_of(problem["loc"][1:], error.body, is_missing=problem["type"] == "missing")
            reason = str(problem["msg"]).removeprefix("Value error, ")
            params.append(path)
            problems.append(f"{path}: {reason}" if path else reason)
        return ApiError(400, "; ".join(dict.fromkeys(problems)), param=params[0] or None, code="invalid_body").response()

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    @app.exception_handler(Exception)
    async def failure(_: Request, error: Exception) -> JSONResponse:
        """An unexpected error, which the server logs."""
        return ApiError(500, "The server failed. Its log has the details.").response()


def _path_of(loc: Sequence[str | int], body: Any, *, is_missing: bool) -> str:
    """The path of a location in the body, such as `messages[0].content`.

    Names of union types that Pydantic tried, such as `list[int]`, are left out, because they are not part of the body.
    """
    path = ""
    for number, key in enumerate(loc, start=1):
        if isinstance(body, Mapping) and (key in body or (is_missing and number == len(loc))):
            body = body.get(key)
        elif isinstance(body, list) and isinstance(key, int):
            body = body[key] if key < len(body) else None
        else:
            continue
        path += f"[{key}]" if isinstance(key, int) else f".{key}"
        if body is None:
            break
    return path.removeprefix(".")
