"""One readable page per algorithm, and the pure functions that they lean on."""
