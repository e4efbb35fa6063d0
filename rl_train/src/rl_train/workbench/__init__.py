"""Tries environments without a model: `rlcore check env`, `rlcore env play` and `rlcore env rescore`."""
