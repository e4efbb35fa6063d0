"""The run folder's own record: metrics.jsonl, one object a step, and rollouts as JSON lines; the source of truth."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.interfaces.logger import Logger

METRICS = "metrics.jsonl"
"""In the run folder: one object a step."""
TOKEN_TEXTS = "token_texts.jsonl"
"""In the folder of rollouts: one object a token id, `id` and `text`; a part of a character reads as U+FFFD."""


class JsonlLogger(Logger):
    """Appends to files under a run folder; every line is on disk before the next step begins.

    Args:
        folder: the run folder.
        resume_from: drop what was written of later steps, which a resumed run is about to repeat; None keeps all.
        token_text: the text of a token id; each id that was sampled is written once, for who reads the rollouts.
    """

    def __init__(self, folder: Path, *, resume_from: int | None = None, token_text: Callable[[int], str] | None = None) -> None:
        self._folder = folder
        self._metrics = folder / METRICS
        self._rollouts = folder / "rollouts"
        self._rollouts.mkdir(parents=True, exist_ok=True)
        self._token_text = token_text
        self._token_texts = self._rollouts / TOKEN_TEXTS
        self._known_tokens = {row["id"] for row in read_jsonl(self._token_texts)} if self._token_texts.exists() else set()
        if resume_from is not None:
            self._forget_after(resume_from)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line; a number that JSON has no word for is written as null."""
        clean = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        _append(self._metrics, [{"step": step, **clean}])

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write rollouts/step_NNNNNN.jsonl, and the texts of tokens that are new to rollouts/token_texts.jsonl."""
        path = self._rollouts / f"step_{step:06d}.jsonl"
        path.unlink(missing_ok=True)
        _append(path, rows)
        if self._token_text is not None:
            new = sorted({token for row in rows for token in row.get("tokens", ())} - self._known_tokens)
            _append(self._token_texts, [{"id": token, "text": self._token_text(token)} for token in new])
            self._known_tokens.update(new)

    def _forget_after(self, step: int) -> None:
        for path in self._rollouts.glob("step_*.jsonl"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()
        if not self._metrics.exists():
            return
        kept = [line for line in read_jsonl(self._metrics) if line["step"] <= step]
        partial = self._metrics.with_suffix(".tmp")
        partial.unlink(missing_ok=True)
        _append(partial, kept)
        os.replace(partial, self._metrics)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that a kill cut short is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def _append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
