"""Old import paths of the Python trainers."""
