"""Import table of NeMo RL: `table` has the keys, the other modules convert values that need more than a new name."""
