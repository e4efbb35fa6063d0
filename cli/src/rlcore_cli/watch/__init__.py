"""`rlcore watch`."""
