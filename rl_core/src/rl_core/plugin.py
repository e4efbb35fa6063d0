"""Makes rl-core itself a plugin, so that `rlcore doctor core` checks its requirements and a run records its version.

It registers no components.
"""
