"""Environments of rlcore and the data they are asked about."""
