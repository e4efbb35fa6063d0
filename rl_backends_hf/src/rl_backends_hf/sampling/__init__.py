"""The engine: decodes rows together, with a KV cache."""
