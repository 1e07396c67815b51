"""A Sequential whose children can take keyword arguments in addition to the previous child's
result.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class NetworkCall(NamedTuple):
    """The arguments of a network, with any nesting."""

    input: Any  # of the first child
    context: dict[str, Any]  # keywords, without gradients


class SplitSequential(nn.Sequential):
    """A ``torch.nn.Sequential`` that passes keyword arguments to the children that name them.

    Each child gets the previous child's result, as in any Sequential, and the keywords that its
    ``forward`` names after its first parameter (all of them if it takes ``**keywords``). So
    children can use more of the batch, such as a decoder's tokens::

        class Decoder(nn.Module):
            def forward(self, memory, target_in): ...

        network = SplitSequential(encoder, SplitPoint(density=0.1), decoder)
        logits = network(source, target_in=target_in)

    Under :class:`~lightning_dct.DCTPipelineStrategy` keywords are not sent between stages: every
    rank takes them from its own copy of the batch. So they must follow from the batch alone, and
    have no gradient.

    Raises:
        TypeError: In a call: a required keyword is missing, or no child takes a given one.
    """

    def forward(self, input: Any, **context: Any) -> Any:
        """Run the children one after the other, each with the keywords that it names."""
        check_context(self, context)
        for child in self:
            input = child(input, **context_of(child, context))
        return input


def check_context(network: nn.Sequential, context: Mapping[str, Any]) -> None:
    """Check that children take all given keywords, and that no required one is missing
    (TypeError).
    """
    if context and not isinstance(network, SplitSequential):
        raise TypeError(
            f"The network is called with {', '.join(context)} as keywords, and it is a"
            f" {type(network).__name__}, which takes one input. Make it a"
            " `lightning_dct.SplitSequential`."
        )
    unused = set(context)
    for name, child in network.named_children():
        unused -= set(context_of(child, context))
        for parameter in _keywords(child):
            keyword = parameter.name
            is_required = parameter.default is parameter.empty
            if (
                is_required
                and parameter.kind is not parameter.VAR_KEYWORD
                and keyword not in context
            ):
                given = ", ".join(map(repr, context)) or "none"
                raise TypeError(
                    f"The forward of {name!r} ({type(child).__name__}) takes {keyword!r}, which the"
                    f" call of the network does not give (given by keyword: {given}). Make it a"
                    " `lightning_dct.SplitSequential` and call it as in `self.network(inputs,"
                    f" {keyword}=...)`, or give the parameter a default."
                )
    if unused:
        raise TypeError(
            "No child of the SplitSequential has a forward that names"
            f" {', '.join(map(repr, sorted(unused)))} after its first parameter. Leave the keyword"
            " out of the call, or name it in the forward that needs it."
        )


def context_of(module: nn.Module, context: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call that a module's forward takes."""
    names = {parameter.name for parameter in _keywords(module)}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in _keywords(module))
    return {name: value for name, value in context.items() if takes_all or name in names}


def check_no_gradients(context: Mapping[str, Any]) -> None:
    """Refuse keywords that require a gradient (ValueError)."""
    for name, value in context.items():
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value)):
            raise ValueError(
                f"The network is called with {name!r} as a keyword, a tensor that requires a"
                " gradient. Keywords do not cross between stages under `DCTPipelineStrategy`, and"
                " no gradient comes back for them. Detach it if it needs none; or compute it"
                " inside a piece, or make it part of the activation that crosses."
            )


def _keywords(module: nn.Module) -> list[inspect.Parameter]:
    """The parameters of a module's forward that take keywords, except the first parameter."""
    # torch.compile's wrapper has a forward that names nothing.
    module = getattr(module, "_orig_mod", module)
    if isinstance(module, SplitSequential):
        return [parameter for child in module for parameter in _keywords(child)]
    later = list(inspect.signature(module.forward).parameters.values())[1:]
    return [p for p in later if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.VAR_KEYWORD)]
