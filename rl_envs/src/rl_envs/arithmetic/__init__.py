"""Generated arithmetic problems and the environment that checks the answers."""
