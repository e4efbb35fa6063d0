"""Conformance of policies: scores, optimizer steps, checkpoints and sent weights, compared with a reference trained alike."""
