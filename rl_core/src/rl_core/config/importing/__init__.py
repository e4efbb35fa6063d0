"""Configs of other frameworks into ours, and a list of what became of every key of theirs."""
