"""The wire format: selected entries as one ``uint8`` tensor, and back. Pure functions.

A payload holds, in this order, for ``T`` compressed tensors and at most ``K`` of ``N`` entries
(integers are little-endian, and all sizes follow from the layout, so every rank knows them
beforehand):

==================  =====================================  ====================================================
part                bytes                                  holds
==================  =====================================  ====================================================
header              12                                     see :mod:`lightning_dct.wire.payload`
scales              ``4 T`` (2bit, 1bit)                   one fp32 scale a tensor
positions           about ``K (2 + log2(N / K)) / 8``      see :mod:`lightning_dct.wire.positions`
values              ``4 K`` (fp32) to ``K / 8`` (1bit)     see :mod:`lightning_dct.wire.values`
dense tensors       their own bytes                        tensors too small to compress, in their own dtype
==================  =====================================  ====================================================
"""
