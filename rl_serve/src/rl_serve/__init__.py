"""An OpenAI-compatible HTTP server over any generation backend."""
