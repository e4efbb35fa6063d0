"""Generated arithmetic: questions from a seed, and the environment that checks the number."""
