"""Policies and engines over their workers: the calls that go to all of them, and the rows that these receive."""
