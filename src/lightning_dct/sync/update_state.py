"""The state of updates between two exchanges: both sets of weights, clocks and updates in flight;
saved and loaded.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_dct.checksums import checksum_of
from lightning_dct.compress.bucket_plan import local_of
from lightning_dct.config import DCTConfig
from lightning_dct.exchange.base import Exchange, Transfer
from lightning_dct.sync.buffers import Buffers
from lightning_dct.sync.coherence import Coherence, TensorCoherence
from lightning_dct.sync.optimizer_clock import InFlight, KnownOptimizers, OptimizerClock
from lightning_dct.sync.optimizer_state import Deviation
from lightning_dct.sync.shared_weights import SharedWeights, as_real
from lightning_dct.sync.synchronizer import Synchronizer
from lightning_dct.sync.update_flow import UpdateFlow
from lightning_dct.sync.views import Views

COUNTED_STEPS = "counted steps"
CLIPS = "clips by norm"


class UpdateState(Synchronizer):
    """The state of :class:`~lightning_dct.sync.updates.UpdateSynchronizer` between two exchanges.

    Args, beside those of :class:`Synchronizer`:
        buffers: This rank's buffers, which are exchanged uncompressed.
        optimizers: Gives the optimizers that are known from the start, in the same order on every
            rank.
        parameters: Gives all parameters of the model, including those that do not take part.
        weights: The shared weights.

    Attributes:
        flow: Sends a bucket and applies what arrives.
        views: Whose weights and buffers are in the model.
        known: The optimizers whose steps are exchanged.
        clips_by_norm: Whether gradients are clipped by the norm of their mean, for which coherence
            is measured.
    """

    def __init__(
        self,
        config: DCTConfig,
        parameter_names: Mapping[Tensor, str],
        exchange: Exchange,
        buffers: Buffers,
        optimizers: Callable[[], Sequence[Optimizer]],
        parameters: Callable[[], Collection[Tensor]],
        weights: SharedWeights | None = None,
    ) -> None:
        super().__init__(config, parameter_names, exchange, of_updates=True)
        self.weights = weights or SharedWeights()
        self.flow = UpdateFlow(self.plans, self.weights, exchange, self.feedback)
        self.buffers = buffers
        self.views = Views(self.weights, buffers)
        self.known = KnownOptimizers(optimizers)
        self._parameters = parameters
        # Parameters that take part, or are known not to.
        self._classified = self._excluded()
        self._clocks: dict[int, OptimizerClock] = {}
        self._to_refresh: set[str] = set()
        # A single rank has only its own weights.
        self._alone = exchange.everyone.size == 1
        self._counted = 0
        self.clips_by_norm = False

    @property
    def sparse(self) -> set[Tensor]:
        """Parameters whose gradients have turned out to be sparse; known from their first step
        on.
        """
        parameters = self.weights.parameters
        by_gradient = {
            parameters[name] for clock in self._clocks.values() for name in clock.by_gradient
        }
        by_update = {parameter for clock in self._clocks.values() for parameter in clock.sparse}
        return by_gradient | by_update

    @property
    def is_in_flight(self) -> bool:
        """Whether updates have been sent and not applied yet."""
        return any(clock.in_flight for clock in self._clocks.values())

    def norms(self) -> dict[str, float]:
        """Euclidean norm of this rank's residual of each parameter, of its own updates and of
        sums.
        """
        own = self.weights.norms()
        of_sums = self.feedback.norms()
        return {
            name: math.hypot(own.get(name, 0.0), of_sums.get(name, 0.0)) for name in own | of_sums
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain numbers, dicts and CPU tensors.

        Waits for updates in flight, but keeps them.
        """
        for clock in self._clocks.values():
            self.flow.finish(clock.in_flight)
        state = super().state_dict()
        clocks, in_flight = self._save_clocks()
        # Weight averaging swaps weights in temporarily. Save what is there after it swaps them
        # back.
        settled = {name: self.weights.settled(name) for name in self.weights.parameters}
        own = {
            name: self.weights.with_held(name, own) for name, (own, _) in settled.items()
        } | self.buffers.own()
        held = {f"own of {name}": settled[name][0].cpu().clone() for name in self.weights.held}
        held |= {
            f"residual of {name}": residual.cpu().clone()
            for name, residual in self.weights.held.items()
        }
        return {
            **state,
            "residuals": {},
            "weights": {
                name: weights.detach().to("cpu", copy=True) for name, weights in own.items()
            },
            "shared": {name: checksum_of(shared) for name, (_, shared) in settled.items()},
            "exchange_clocks": {**clocks, COUNTED_STEPS: self._counted},
            "in_flight": in_flight,
            **({"own_decay": own_decay} if (own_decay := self._own_decay()) else {}),
            "coherence": self._save_coherence(),
            "deviations": self._save_deviations(),
            "held_back": held,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; the model has the shared weights of the checkpoint.

        If a parameter's shared weights were edited in the file, or a hook has written into them,
        they become this rank's own weights too. Otherwise the next exchanges would undo the edit.

        Raises:
            ValueError: A saved tensor has another size than the parameter of its name.
        """
        self.given_density = (
            None  # what was set after the save: settings follow the run's before the next step
        )
        super().load_state_dict(state)
        self.views.give_back_buffers()
        parameters = self._parameters_by_name()
        buffers = self.buffers.named()
        edited = []
        saved = state.get("weights", {})
        gone = saved.keys() - parameters.keys() - buffers.keys()
        new = {
            name for name, parameter in parameters.items() if parameter.requires_grad
        } - saved.keys()
        if gone and new:  # a state for other pipeline stages has more names, and lacks none
            rank_zero_warn(
                f"The checkpoint has states of {sorted(gone)!s:.300}, which this model does not"
                f" train, and none of {sorted(new)!s:.300}. These start from the model's weights."
                " Unsent changes of those are lost."
            )
        for name, weights in saved.items():
            if name in parameters and self._alone:
                own = local_of(parameters[name]).data
                edited += [name] if _is_edited(name, own, state) else []
                own.copy_(own if name in edited else weights)
            elif name in parameters:
                self.weights.adopt(name, parameters[name])
                shared = self.weights.shared(name)
                edited += [name] if _is_edited(name, shared, state) else []
                held = state.get("held_back", {})
                if f"own of {name}" in held and name not in edited:
                    self.weights.hold_saved(
                        name, held[f"own of {name}"], held[f"residual of {name}"]
                    )
                else:
                    self.weights.set_own(name, shared if name in edited else weights)
            elif name in buffers:
                buffers[name].copy_(weights)
        # Parameters that took no part yet when the state was saved, as before the trials of a
        # search for a rate.
        for name in self.weights.parameters.keys() - saved.keys():
            self.weights.set_own(name, self.weights.shared(name))
        # Residuals of sums, from another exchange or another number of ranks.
        residuals = self.residuals.state_dict()
        self.residuals.load_state_dict({})
        for name, left in residuals.items():
            if name in self.weights.parameters or (self._alone and name in parameters):
                own = as_real(
                    local_of(parameters[name]).data if self._alone else self.weights.own(name)
                )
                own.add_(left.view(own.shape).to(own.device))
        clocks = dict(state.get("exchange_clocks", {}))
        self._counted = clocks.pop(COUNTED_STEPS, 0)
        self._load_clocks(clocks, state.get("in_flight", {}))
        for number, factors in state.get("own_decay", {}).items():
            self._clocks.setdefault(number, OptimizerClock()).own_decay.factors = dict(factors)
        self._load_coherence(state.get("coherence", {}))
        self._load_deviations(state.get("deviations", {}))
        self.unclocked = self.synchronisations - sum(clock.steps for clock in self._clocks.values())
        for item in (item for clock in self._clocks.values() for item in clock.in_flight):
            if item.names[0] in edited:  # saved ones have one parameter each
                # It is subtracted when the mean has arrived.
                self.weights.add_own(item.names, item.own, 1.0)  # type: ignore[arg-type]
        if edited:
            rank_zero_warn(
                f"The model's weights of {', '.join(map(repr, edited))[:300]} differ from the"
                " weights that were saved with this state. If you have not edited them, load the"
                " model's state first. Every rank continues from the model's weights. Unsent"
                " changes of these parameters are lost."
            )
        self._classified = self._excluded()
        self.views.follow()

    def shared_state(self) -> dict[str, Any]:
        """The base class's, with clocks, shared weights, and the means in flight that will change
        them.
        """
        clocks, in_flight = self._save_clocks()
        means = {name: mean for name, mean in in_flight.items() if name.startswith("mean of ")}
        shared = {
            f"shared weights of {name}": self.weights.shared(name)
            for name in self.weights.parameters
        }
        coherence = {f"coherence of {key}": known for key, known in self._save_coherence().items()}
        return {
            **super().shared_state(),
            **clocks,
            COUNTED_STEPS: self._counted,
            **means,
            **shared,
            **coherence,
        }

    def _own_decay(self) -> dict[int, dict[str, float]]:
        """What this rank's weights have decayed by since the last exchange, by optimizer and
        parameter.
        """
        found = {number: dict(clock.own_decay.factors) for number, clock in self._clocks.items()}
        return {number: factors for number, factors in found.items() if factors}

    def _save_clocks(self) -> tuple[dict[str, int], dict[str, Tensor]]:
        """The clocks as numbers, and the completed updates in flight as CPU tensors by
        parameter.
        """
        clocks = {f"refresh {name}": 1 for name in self._to_refresh}
        if self.clips_by_norm:
            clocks[CLIPS] = 1
        in_flight: dict[str, Tensor] = {}
        for number, clock in self._clocks.items():
            clocks[f"steps of {number}"] = clock.steps
            clocks[f"unaveraged of {number}"] = clock.since_buffers
            for name in clock.by_gradient:
                clocks[f"gradient in {number} {name}"] = 1
            for name in clock.decay.left_out | clock.decay.known:
                clocks[f"undecayed in {number} {name}"] = int(name in clock.decay.left_out)
            for item in clock.in_flight:
                sizes = [self.weights.sizes[name] for name in item.names]
                means, owns = (both.split(sizes) for both in self.flow.read(item))
                for name, mean, own in zip(item.names, means, owns, strict=True):
                    clocks[f"due in {number} {name}"] = item.due
                    in_flight |= {
                        f"mean of {name}": mean.cpu().clone(),
                        f"own of {name}": own.cpu().clone(),
                    }
        return clocks, in_flight

    def _load_clocks(self, clocks: Mapping[str, int], in_flight: Mapping[str, Tensor]) -> None:
        """Continue with what :meth:`_save_clocks` has saved."""
        parameters = self._parameters_by_name()
        loaded: defaultdict[int, OptimizerClock] = defaultdict(OptimizerClock)
        self._to_refresh = set()
        for key, value in clocks.items():
            what, _, of = key.partition(" ")
            if what == "refresh":
                self._to_refresh.add(of)
                continue
            if key == CLIPS:
                self.clips_by_norm = True
                continue
            _, number, *names = of.split(" ", 2)
            own = loaded[int(number)]
            if what == "steps":
                own.steps = value
            elif what == "unaveraged":
                own.since_buffers = value
            elif what == "gradient":
                own.by_gradient += names
            elif what in ("agreement", "cosine", "measured"):
                # of elastic ranks, and of an earlier version, which measured one number for all
                # tensors
                pass
            elif what == "undecayed":
                (own.decay.left_out if value else own.decay.known).update(names)
            elif (name := names[0]) in parameters and f"mean of {name}" in in_flight:
                device = parameters[name].device
                mean, sent = (in_flight[f"{part} of {name}"].to(device) for part in ("mean", "own"))
                own.in_flight.append(
                    InFlight([name], mean.numel(), value, Transfer.arrived(mean), sent)
                )
        self._clocks = dict(loaded)

    def _save_coherence(self) -> dict[str, Tensor]:
        """What is known of how far gradients agree, as flat tensors by number of an optimizer, part
        and parameter.
        """
        saved = {}
        for number, clock in self._clocks.items():
            for name, known in clock.coherence.tensors.items():
                shape = torch.tensor(
                    [self.exchange.everyone.size, *known.shape], dtype=torch.float64
                )
                saved[f"{number} known {name}"] = torch.cat(
                    [shape, *map(torch.flatten, known.parts)]
                )
            for name, (step, weight, result) in clock.coherence.measured.items():
                found = torch.tensor([step, weight], dtype=torch.float64)
                saved[f"{number} measured {name}"] = torch.cat([found, result.flatten()])
        return saved

    def _load_coherence(self, saved: Mapping[str, Tensor]) -> None:
        """Continue with it; among another number of ranks it is measured anew."""
        parameters = self._parameters_by_name()
        ranks = self.exchange.everyone.size
        found: defaultdict[int, dict[str, TensorCoherence]] = defaultdict(dict)
        measured: defaultdict[int, dict[str, tuple[int, float, Tensor]]] = defaultdict(dict)
        for key, values in saved.items():
            its_number, part, name = key.split(" ", 2)
            number = int(its_number)
            if name not in parameters:
                continue
            if part == "measured":
                step, weight = values[:2].tolist()
                measured[number][name] = int(step), weight, values[2:].view(2, -1)
                continue
            of_ranks, rows, columns = map(int, values[:3].tolist())
            if of_ranks == ranks:
                known = found[number][name] = TensorCoherence((rows, columns))
                sizes = [own.numel() for own in known.parts]
                for own, its_values in zip(known.parts, values[3:].split(sizes), strict=True):
                    own.copy_(its_values.view(own.shape))
        for number, tensors in found.items():  # of optimizers whose clocks were saved, too
            coherence = Coherence()
            coherence.load(tensors, ranks)
            coherence.measured = {
                name: one for name, one in measured[number].items() if name in tensors
            }
            self._clocks[number].coherence = coherence

    def _save_deviations(self) -> dict[str, Tensor]:
        """How this rank's squares of gradients deviate, as flat tensors by number of an optimizer
        and state.
        """
        saved = {}
        ranks = self.exchange.everyone.size
        for number, clock in self._clocks.items():
            for name, (left, drift, persistence) in clock.squares.deviations.items():
                numbers = torch.tensor([ranks, persistence], dtype=torch.float64)
                saved[f"{number} {name}"] = torch.cat(
                    [numbers, left.double().cpu(), drift.double().cpu()]
                )
        return saved

    def _load_deviations(self, saved: Mapping[str, Tensor]) -> None:
        """Continue with it; among another number of ranks deviations are others."""
        for key, values in saved.items():
            number, name = key.split(" ", 1)
            ranks, persistence = values[:2].tolist()
            if ranks == self.exchange.everyone.size and int(number) in self._clocks:
                left, drift = values[2:].float().chunk(2)
                self._clocks[int(number)].squares.deviations[name] = Deviation(
                    left, drift, persistence
                )

    def _excluded(self) -> set[Tensor]:
        return set(self._parameters()) - self.parameter_names.keys()

    def _parameters_by_name(self) -> dict[str, Tensor]:
        return {name: parameter for parameter, name in self.parameter_names.items()}


def _is_edited(name: str, shared: Tensor, state: Mapping[str, Any]) -> bool:
    """Whether a parameter's shared weights differ from those saved with a state, in its dtype."""
    known = state.get("shared", {})
    return (
        name in known
        and state["weights"][name].dtype == shared.dtype
        and checksum_of(shared) != known[name]
    )
