"""What `lightning_dct.torchrec` uses of TorchRec, in the same shape, where TorchRec is not
installed.
"""
