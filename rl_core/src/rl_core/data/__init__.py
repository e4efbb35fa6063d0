"""Rows, messages, packing and the order in which data is seen; knows no model and no cluster."""
