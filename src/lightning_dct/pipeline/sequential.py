"""A Sequential whose later children may be given more than what the previous one returns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten


class NetworkCall(NamedTuple):
    """What a network is called with.

    Attributes:
        input: What its first child is given: tensors, in any nesting.
        context: What else its children are given, by keyword: tensors without gradients, in any nesting.
    """

    input: Any
    context: dict[str, Any]


class SplitSequential(nn.Sequential):
    """A ``torch.nn.Sequential`` that hands keyword arguments to those of its children that name them.

    One activation goes from child to child, as in any Sequential. What further is needed of the batch, such as the
    tokens a decoder reads beside what the encoder returns, is given by keyword, and each child gets those keywords that
    its ``forward`` names after its first parameter (all of them where it takes ``**keywords``)::

        class Decoder(nn.Module):
            def forward(self, memory, target_in): ...

        network = SplitSequential(encoder, SplitPoint(density=0.1), decoder)
        logits = network(source, target_in=target_in)

    Under :class:`~lightning_dct.DCTPipelineStrategy` keywords do not cross between stages: every rank takes them from
    the batch, which it reads as well. So they must follow from the batch alone, and have no gradient.

    Raises:
        TypeError: In a call: a child needs a keyword that is not given, or no child takes one that is.
    """

    def forward(self, input: Any, **context: Any) -> Any:
        """Run the children one after the other.

        Args:
            input: What the first is given.
            **context: What else they are given.
        """
        check_context(self, context)
        for child in self:
            input = child(input, **context_of(child, context))
        return input


def check_context(network: nn.Sequential, context: Mapping[str, Any]) -> None:
    """See that a network's children take the keywords that are given, and are given what they need.

    Raises:
        TypeError: With the child and the keyword.
    """
    if context and not isinstance(network, SplitSequential):
        raise TypeError(
            f"The network is called with {', '.join(context)} as keywords, and it is a {type(network).__name__}, which"
            " takes one input. Make it a `lightning_dct.SplitSequential`."
        )
    unused = set(context)
    for name, child in network.named_children():
        unused -= set(context_of(child, context))
        for keyword, parameter in _keywords(child).items():
            if parameter.default is parameter.empty and keyword not in context:
                given = ", ".join(map(repr, context)) or "none"
                raise TypeError(
                    f"The forward of {name!r} ({type(child).__name__}) takes {keyword!r}, which the call of the network"
                    f" does not give (given by keyword: {given}). Make it a `lightning_dct.SplitSequential` and call it"
                    f" as in `self.network(inputs, {keyword}=...)`, or give the parameter a default."
                )
    if unused:
        raise TypeError(
            f"No child of the SplitSequential has a forward that names {', '.join(map(repr, sorted(unused)))} after"
            " its first parameter. Leave the keyword out of the call, or name it in the forward that needs it."
        )


def context_of(module: nn.Module, context: Mapping[str, Any]) -> dict[str, Any]:
    """Those keywords of a call that a module's forward takes."""
    names = _keywords(module)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in _parameters(module))
    return {name: value for name, value in context.items() if takes_all or name in names}


def check_no_gradients(context: Mapping[str, Any]) -> None:
    """Refuse keywords that a pipeline could not send gradients back for.

    Raises:
        ValueError: With the keyword.
    """
    for name, value in context.items():
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_flatten(value)[0]):
            raise ValueError(
                f"The network is called with {name!r} as a keyword, a tensor that requires a gradient. Keywords do not"
                " cross between stages under `DCTPipelineStrategy`, and no gradient comes back for them. Detach it if"
                " it needs none; or compute it inside a piece, or make it part of the activation that crosses."
            )


def _keywords(module: nn.Module) -> dict[str, inspect.Parameter]:
    """The parameters of a module's forward that can be given by keyword, but for the first, by name."""
    module = _uncompiled(module)
    if isinstance(module, SplitSequential):
        return {name: parameter for child in module for name, parameter in _keywords(child).items()}
    later = _parameters(module)[1:]
    return {p.name: p for p in later if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    module = _uncompiled(module)
    if isinstance(module, SplitSequential):
        return [parameter for child in module for parameter in _parameters(child)]
    return list(inspect.signature(module.forward).parameters.values())


def _uncompiled(module: nn.Module) -> nn.Module:
    """What torch.compile has wrapped: the wrapper's own forward names nothing."""
    return getattr(module, "_orig_mod", module)
