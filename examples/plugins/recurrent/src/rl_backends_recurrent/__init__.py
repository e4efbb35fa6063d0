"""A recurrent language model as policy and engine of rlcore."""
