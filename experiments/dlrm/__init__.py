"""A deep learning recommendation model and its click logs."""
