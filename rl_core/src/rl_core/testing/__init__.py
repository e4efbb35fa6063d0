"""The public conformance kit for plugin authors."""
