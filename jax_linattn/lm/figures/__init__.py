"""Figures, a file a topic: from what a user names (a run, a text, maps) to numbers, and from numbers to a figure."""
