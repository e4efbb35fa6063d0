"""`rlcore init`: from a data file to a config that trains on it."""
