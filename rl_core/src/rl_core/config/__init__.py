"""The config sections that plugins extend, and their validation."""
