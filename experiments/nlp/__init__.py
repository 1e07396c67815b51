"""A small transformer language model and its text."""
