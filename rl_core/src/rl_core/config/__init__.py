"""One YAML file into frozen models, and errors that name line, key and remedy."""
