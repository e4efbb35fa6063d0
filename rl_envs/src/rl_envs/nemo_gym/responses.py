"""A conversation in the form of OpenAI's Responses API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rl_core.environments import final_text
from rl_core.interfaces.messages import Message


def output_items(turns: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages, calls and results of a rollout, in order; the model's thoughts are left out."""
    items: list[dict[str, Any]] = []
    unanswered: list[str] = []
    for number, turn in enumerate(turns):
        if turn["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": unanswered.pop(0), "output": turn["content"]})
            continue
        if text := final_text(turn["content"]):
            content = [{"type": "output_text", "text": text, "annotations": []}]
            message = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed", "content": content}
            items.append(message)
        unanswered = [call.get("id") or f"call_{number}_{index}" for index, call in enumerate(turn.get("tool_calls") or [])]
        for name, call in zip(unanswered, turn.get("tool_calls") or [], strict=True):
            function = {"name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])}
            items.append({"type": "function_call", "id": name, "call_id": name, "status": "completed", **function})
    return items


def response_of(output: list[dict[str, Any]]) -> dict[str, Any]:
    """A finished response with these items."""
    return {
        "id": "resp_rollout",
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
