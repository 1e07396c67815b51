"""When ranks exchange: the clocks of optimizers, the weights that each rank has and those that all
share, and gradients.
"""
