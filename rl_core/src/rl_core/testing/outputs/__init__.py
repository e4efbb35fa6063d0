"""Checks of what components return. A run makes them in every step, and the conformance kit in its tests."""
