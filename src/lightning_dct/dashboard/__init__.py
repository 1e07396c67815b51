"""A W&B dashboard for runs with ``CompressionMonitor``, kept as code: ``lightning-dct dashboard``.

contents    which keys stand where: plain data, without W&B
building    the same as a workspace of the package wandb-workspaces
pushing     saves it in a W&B project, with errors that name the remedy
"""
