"""Reads a YAML file, resolves it against the installed components and checks it; errors name line, key and remedy."""
