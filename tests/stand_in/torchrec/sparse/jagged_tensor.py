"""Plain holders of values, lengths and weights."""

import torch


class JaggedTensor:
    def __init__(self, values, weights=None, lengths=None):
        self._values = values
        self._weights = weights
        self._lengths = lengths

    def values(self):
        return self._values

    def weights(self):
        return self._weights

    def lengths(self):
        return self._lengths


class KeyedTensor:
    def __init__(self, keys, length_per_key, values):
        self._keys = keys
        self._length_per_key = length_per_key
        self._values = values

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def to_dict(self):
        return dict(zip(self._keys, self._values.split(self._length_per_key, dim=1), strict=True))


class KeyedJaggedTensor:
    def __init__(
        self,
        keys,
        values,
        weights=None,
        lengths=None,
        offsets=None,
        stride_per_key_per_rank=None,
        inverse_indices=None,
    ):
        self._keys = keys
        self._values = values
        self._weights = weights
        self._lengths = offsets.diff() if lengths is None else lengths
        self._unequal = stride_per_key_per_rank is not None
        each = len(self._lengths) // len(keys)
        self._strides = (
            [sum(of) for of in stride_per_key_per_rank] if self._unequal else [each] * len(keys)
        )
        self._inverse = inverse_indices

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def weights(self):
        if self._weights is None:
            raise ValueError("This KeyedJaggedTensor doesn't have weights.")
        return self._weights

    def lengths(self):
        return self._lengths

    def offsets(self):
        return torch.cat(
            [self._lengths.new_zeros(1), self._lengths.cumsum(0).to(self._lengths.dtype)]
        )

    def stride_per_key(self):
        return self._strides

    def variable_stride_per_key(self):
        return self._unequal

    def inverse_indices_or_none(self):
        return self._inverse

    def offset_per_key(self):
        sizes = [int(part.sum()) for part in self._lengths.split(self._strides)]
        return [sum(sizes[:place]) for place in range(len(sizes) + 1)]
