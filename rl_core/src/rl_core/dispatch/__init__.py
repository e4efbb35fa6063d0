"""Policies, generation and environments spread over the ranks of a worker group; written once for all backends."""
