"""Trainings on whose ranks gradients differ more than by noise, and the loop that trains them."""
