"""`rlcore new-plugin`: writes the repository of a plugin from the templates in this package."""
