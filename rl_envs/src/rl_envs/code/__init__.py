"""The environment `code`: programs are run in a sandbox and scored by tests."""
