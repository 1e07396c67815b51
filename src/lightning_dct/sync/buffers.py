"""Gives all ranks the same buffers, uncompressed, as DistributedDataParallel does; and a rank its
own back afterwards.

every rank     sends a checksum of each buffer; buffers that are equal on all ranks are not sent
if it differs  running statistics of normalisation layers take the mean, other buffers the first rank's values
"""

import zlib
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from lightning_dct.activations.module import plain_name
from lightning_dct.agreement import gather_objects
from lightning_dct.checksums import checksums_of
from lightning_dct.exchange.collectives import Link, all_reduce_mean, broadcast_from_first, extremes
from lightning_dct.kernels.bits import as_bytes
from lightning_dct.sync.shared_weights import are_same_bits


def buffers_of(module: Module, ignored: Collection[str] = ()) -> dict[str, Tensor]:
    """The buffers that exchanges give to all ranks, by name."""
    found = {
        plain_name(name): one
        for name, one in module.named_buffers()
        if name not in ignored and not is_lazy(one)
    }
    return {name: one for name, one in found.items() if one.numel() and one.layout == torch.strided}


def statistics_of(module: Module) -> set[str]:
    """The names of the running statistics of normalisation layers."""
    layers = [(name, one) for name, one in module.named_modules() if isinstance(one, _NormBase)]
    return {
        plain_name(f"{name}.{kind}".lstrip("."))
        for name, _ in layers
        for kind in ("running_mean", "running_var")
    }


class Buffers:
    """The buffers of one rank, such as the running statistics of a BatchNorm, a table of positions,
    an average.

    Args:
        named: Gives the buffers by name.
        statistics: Gives the names of those that are averaged, which are floating-point.
        link: The ranks; None if nothing is exchanged over one.
    """

    def __init__(
        self,
        named: Callable[[], Mapping[str, Tensor]] = dict,
        statistics: Callable[[], Collection[str]] = tuple,
        link: Link | None = None,
    ) -> None:
        self.named = named
        self.statistics = statistics
        self._link = link
        # The checksum of the names, shapes and dtypes that all ranks have, and how many there are.
        self._layout: int | None = None
        self._count = 0
        # Since an evaluation: this rank's own, and those that were shown instead.
        self._own: dict[str, Tensor] = {}
        self._shown: dict[str, Tensor] = {}

    def exchange(self, before: Callable[[int], None] | None = None, averages: bool = True) -> None:
        """Give every rank the same buffers; a collective call.

        Without ``averages`` all come from the first rank.

        If there are any, ``before`` is called first, with their number.

        Raises:
            ValueError: The ranks have different buffers, or of different sizes; on every rank.
        """
        link = self._link
        if link is None or link.size == 1:
            return
        buffers = self.named()
        if not buffers and self._layout is not None and not self._count:
            return  # there are none on any rank
        if buffers and before is not None:
            before(len(buffers))
        sent_before = link.traffic.totals.bytes_sent
        differ = self._differing(buffers, link)
        statistics = set(differ).intersection(self.statistics() if averages else ())
        _average([buffers[name] for name in differ if name in statistics], link)
        _take_first([buffers[name] for name in differ if name not in statistics], link)
        link.traffic.add(bytes_of_buffers=link.traffic.totals.bytes_sent - sent_before)

    def _differing(self, buffers: Mapping[str, Tensor], link: Link) -> list[str]:
        """The names of buffers whose bits differ between ranks; the same names on every rank."""
        described = {name: f"{list(one.shape)} {one.dtype}" for name, one in buffers.items()}
        layout = zlib.crc32(repr(described).encode())
        device = _device_of(buffers.values())
        if self._layout is None:
            self._agree(described, layout, link)
        sums = checksums_of(buffers).values()
        while buffers or self._count:
            mine = [layout, *sums] if layout == self._layout else [layout] + self._count * [0]
            least, most = extremes(torch.tensor(mine, device=device), link)
            if least[0] == most[0] == self._layout:
                pairs = zip(buffers, least[1:], most[1:], strict=True)
                return [name for name, smallest, largest in pairs if smallest != largest]
            self._agree(described, layout, link)  # they are new on some rank, as all ranks see
        return []

    def _agree(self, described: Mapping[str, str], layout: int, link: Link) -> None:
        """Refuse buffers whose names, sizes or dtypes differ between ranks."""
        for rank, theirs in enumerate(everyone := gather_objects(described, link.group)):
            first = everyone[0]
            for name in first | theirs:
                if (one := first.get(name, "missing")) != (other := theirs.get(name, "missing")):
                    raise ValueError(
                        f"The buffer {name!r} is {one} on the first rank and {other} on rank {rank}"
                        " of its group. Exchanges give all ranks the same buffers, as under `ddp`."
                        " Give it one size on all ranks, or keep it as a plain attribute, or set"
                        " `broadcast_buffers=False`; with `Updates`, `average_buffers=False`."
                    )
            if list(theirs) != list(first):
                raise ValueError(
                    "The ranks have their buffers in different orders. Register them in the same"
                    " order."
                )
        self._layout = layout
        self._count = len(described)

    def own(self) -> dict[str, Tensor]:
        """This rank's own buffers, also while an evaluation sees others; or what was written over
        those.
        """
        return {
            name: self._own[name] if self._is_shown(name, one) else one
            for name, one in self.named().items()
        }

    def show(self, exchange: Callable[[], None]) -> None:
        """Show an evaluation what ``exchange`` makes of this rank's own buffers, until
        :meth:`give_back`.
        """
        self.continue_training()
        self._own = {name: buffer.clone() for name, buffer in self.named().items()}
        exchange()
        self._shown = {name: buffer.clone() for name, buffer in self.named().items()}

    def give_back(self) -> None:
        """Continue with this rank's own buffers, or with values written over those shown and not
        taken back.
        """
        for name, buffer in self.named().items() if self._own else ():
            if self._is_shown(name, buffer):
                buffer.copy_(self._own.pop(name))

    def continue_training(self) -> None:
        """Give back what was shown. From now on buffers change."""
        self.give_back()
        self._own = {}
        self._shown = {}

    def _is_shown(self, name: str, buffer: Tensor) -> bool:
        return name in self._own and are_same_bits(buffer, self._shown.get(name, buffer))


class PresentBuffers(Buffers):
    """The buffers of a rank that sends them with its updates to those that are present.

    Attributes:
        agreed: By name, as of the last exchange; empty before the first.
    """

    def __init__(
        self, named: Callable[[], Mapping[str, Tensor]], statistics: Callable[[], Collection[str]]
    ) -> None:
        super().__init__(named, statistics)
        self.agreed: dict[str, Tensor] = {}

    def exchange(self, before: Callable[[int], None] | None = None, averages: bool = True) -> None:
        """Take the buffers of the last exchange.

        This is no collective call, because some ranks may not be present.
        """
        for name, buffer in self.named().items():
            if name in self.agreed:
                buffer.copy_(self.agreed[name])

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.named().values())

    def changed(self) -> int:
        """A bit for each buffer that has changed since the last exchange; if there are many,
        several share a bit.
        """
        found = enumerate(self.named().items())
        bits = {
            number % _BITS
            for number, (name, one) in found
            if name not in self.agreed or not are_same_bits(one, self.agreed[name])
        }
        return sum(1 << bit for bit in bits)

    def to_bytes(self, changed: int) -> Tensor:
        """The buffers with a bit, one after the other: shape ``[bytes]``, uint8."""
        parts = [as_bytes(buffer.detach().cpu()) for _, buffer in self._with_bits(changed)]
        return torch.cat([torch.empty(0, dtype=torch.uint8), *parts])

    def take(self, rows: Tensor, changed: int) -> Tensor:
        """Take what ranks have sent, shape ``[ranks, bytes]``, and return the bytes behind the
        buffers.
        """
        start = 0
        statistics = self.statistics()
        for name, buffer in self._with_bits(changed):
            stop = start + buffer.nbytes
            each = (
                rows[:, start:stop].clone(memory_format=torch.contiguous_format).view(buffer.dtype)
            )
            start = stop
            one = each.to(torch.float64).mean(0).to(buffer.dtype) if name in statistics else each[0]
            self.agreed[name] = one.view(buffer.shape).clone()
            buffer.copy_(self.agreed[name])
        return rows[:, start:].clone(memory_format=torch.contiguous_format)

    def _with_bits(self, changed: int) -> list[tuple[str, Tensor]]:
        return [
            item
            for number, item in enumerate(self.named().items())
            if changed >> (number % _BITS) & 1
        ]


# Bits of an int64 without its sign.
_BITS = 62


def _average(buffers: list[Tensor], link: Link) -> None:
    # A mean in half precision may be infinite. A mean in fp32 would change equal values where
    # dividing by the number of ranks rounds.
    least = torch.float32 if link.size & (link.size - 1) == 0 else torch.float64
    for dtype in dict.fromkeys(torch.promote_types(buffer.dtype, least) for buffer in buffers):
        some = [buffer for buffer in buffers if torch.promote_types(buffer.dtype, least) == dtype]
        together = torch.cat([buffer.reshape(-1).to(_device_of(buffers), dtype) for buffer in some])
        all_reduce_mean(together, link).wait()
        for buffer, mean in zip(
            some, together.split([buffer.numel() for buffer in some]), strict=True
        ):
            buffer.copy_(mean.view(buffer.shape))


def _take_first(buffers: list[Tensor], link: Link) -> None:
    if buffers:
        together = torch.cat([as_bytes(buffer).to(_device_of(buffers)) for buffer in buffers])
        broadcast_from_first(together, link)
        for buffer, part in zip(
            buffers, together.split([buffer.nbytes for buffer in buffers]), strict=True
        ):
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _device_of(buffers: Collection[Tensor]) -> torch.device:
    return next((buffer.device for buffer in buffers if not buffer.is_cpu), torch.device("cpu"))
