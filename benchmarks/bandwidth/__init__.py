"""Measures how fast memory can be: walks over the arrays of a step that only load and store."""
