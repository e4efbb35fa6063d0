"""Step folders that are whole or absent, and all that a resume needs."""
