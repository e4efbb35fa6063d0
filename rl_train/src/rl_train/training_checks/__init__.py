"""Checks around every optimizer step: that engine and policy agree, and that the policy did what it reports."""
