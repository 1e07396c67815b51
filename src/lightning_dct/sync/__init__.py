"""When ranks exchange: the clock of rounds, the weights that each rank has and those that all
share, and gradients.
"""
