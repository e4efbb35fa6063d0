"""Capabilities: optional features that backends declare and that a config, a transport or an algorithm can require."""

from __future__ import annotations

from enum import StrEnum


class Capability(StrEnum):
    """The capabilities that this project reads, in one place each. Those of a plugin's own have the form `acme:name`."""

    IN_PROCESS = "in_process"
    """Policies and engines: run in the driver's process (`cluster.backend: in_process`)."""
    MULTIPLE_RANKS = "multiple_ranks"
    """Policies: several ranks train one model, exchanging gradients. Without it, a run with two ranks is refused."""
    DYNAMIC_BATCHING = "dynamic_batching"
    """Policies: microbatches with a token budget (`dynamic_batching`)."""
    SEQUENCE_PACKING = "sequence_packing"
    """Policies: rows of a microbatch in one sequence (`sequence_packing`)."""
    SCALAR_HEAD = "scalar_head"
    """Policies: value and reward models (`head: scalar`), by `get_values`."""
    TOPK_LOGPROBS = "topk_logprobs"
    """Policies: the most likely tokens at each position, by `get_topk_logprobs`, and losses with a `candidates_key`."""
    BY_REFERENCE = "by_reference"
    """Policies and engines in one process: the engine computes with the policy's own tensors, by `load_by_reference`."""
    SHARED_MEMORY = "shared_memory"
    """Policies and engines on one node: weights are passed by handles of memory, by `update_weights`."""
    DISK = "disk"
    """Policies and engines: weights are passed as safetensors files, by `update_weights`."""
    COLLECTIVE = "collective"
    """Policies and engines: weights are broadcast in a process group, by `update_weights_from_collective`."""
    TOP_P = "top_p"
    """Engines: sample from the smallest set of tokens with this probability (`top_p`)."""
    TOP_K = "top_k"
    """Engines: sample from this number of most likely tokens (`top_k`)."""
    ASYNC_ROWS = "async_rows"
    """Engines: single rows join and leave while others are sampled, by `poll` or `generate_async`."""
    REFIT_IN_FLIGHT = "refit_in_flight"
    """Engines: rows in progress continue over a refit, with keys and values computed again."""
    HELD_WEIGHT_DIGESTS = "held_weight_digests"
    """Engines: the fingerprint covers the tensors that the engine computes with; otherwise every refit runs the canary."""
    TOP_LOGPROBS = "top_logprobs"
    """Engines: report alternatives at each position (`top_logprobs` of the column `sampling`)."""
    STRUCTURED_OUTPUTS = "structured_outputs"
    """Engines: completions that fit a JSON schema (`json_schema` of the column `sampling`)."""
