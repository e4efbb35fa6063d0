"""Converts configs of other frameworks and reports what happened to each key."""
