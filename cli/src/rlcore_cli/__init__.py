"""The rlcore command."""
