"""The Python trainers."""
