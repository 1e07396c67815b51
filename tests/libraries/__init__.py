"""Trainings of libraries that bring LightningModules of their own; ``make test-libraries``."""
