"""The one room that knows all the others: from a config to a Run."""
