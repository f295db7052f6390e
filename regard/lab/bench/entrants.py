"""The participants of a race: regard's mechanisms, plugins, and other people's libraries (peers)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import cost
from regard.cost.crossing import attention_runner, face_runner
from regard.cost.timing import Run
from regard.devices import free_memory
from regard.errors import RegardError
from regard.lab.bench.config import PASSES, Race
from regard.lab.bench.peers import PEERS, Peer
from regard.laws import Subject
from regard.laws.strangers import HEADS, Stranger
from regard.laws.subjects import MechanismSubject
from regard.mechanisms import Cost, Mechanism, fitted, lookup, mechanisms, on_meta
from regard.registry import accepted_options
from regard.shapes import Size

# A function of q, k and v has no state to decode with.
_PASSES_OF_FUNCTIONS = ("forward", "training")
SPARE = 0.8  # largest share of the free memory that a run may be expected to take


class Entrant(NamedTuple):
    """One participant of a race.

    `like` is the mechanism whose work it does, None if that is unknown. `make` returns a run for a size and a pass, or
    raises an error that says why it cannot; `cost` returns the declared cost of that run. `counted` says whether the
    memory of its tensors can be counted on a CPU.
    """

    name: str
    like: str | None
    peer: bool
    make: Callable[[Size, str], Run]
    cost: Callable[[Size, str], Cost | None]
    passes: Sequence[str] = PASSES
    counted: bool = True


def entrants(
    names: Sequence[str], config: Race, plugins: Sequence[Subject] = (), peers: Sequence[str] = ()
) -> list[Entrant]:
    """Returns the entrants of mechanisms by name (all if none is named), of plugins, and of peers of all these."""
    own = [lookup(name).name for name in names]
    if not own and not plugins:
        own = list(mechanisms())
    apart = {"linear"}  # its features would have to be given
    apart |= {subject.label for subject in plugins if isinstance(subject, MechanismSubject)}  # named, or not, they race
    racing = [_our_entrant(name, config) for name in own if name not in apart]
    racing += [_plugin_entrant(subject, config) for subject in plugins]
    likes = {entrant.like for entrant in racing}
    return racing + [_peer_entrant(peer, config) for peer in PEERS if peer.name in peers and peer.like in likes]


def _our_entrant(name: str, config: Race) -> Entrant:
    """Returns the entrant of one of our mechanisms."""

    def make(size: Size, passing: str) -> Run:
        run = face_runner(_build(name, size, config), size, _face(passing), training=passing == "training")
        if passing == "decode" and torch.device(size.device).type == "cuda":
            return CudaGraphRun(run)
        return run

    return Entrant(name, name, False, make, partial(_declared_cost, name, config))


def _build(name: str, size: Size, config: Race) -> Mechanism:
    """Returns the mechanism on the device, or raises an error where its parameters would not fit there."""
    options = _options(name, config)
    spare = SPARE * free_memory(torch.device(size.device))
    # Built on the meta device first, where parameters have sizes and take no memory.
    learned = sum(x.numel() * x.element_size() for x in on_meta(name, size, **options).parameters())
    if learned > spare:
        raise RegardError(f"what it learns is {format_gib(learned)}; {format_gib(spare)} can be spared")
    with torch.random.fork_rng(), torch.device(size.device):
        torch.manual_seed(config.seed)
        return fitted(name, size, **options)


def _plugin_entrant(subject: Subject, config: Race) -> Entrant:
    """Returns the entrant of a plugin: a mechanism, or a function f(q, k, v, causal=True)."""
    if isinstance(subject, MechanismSubject):
        return _our_entrant(subject.label, config)._replace(peer=True)
    if not isinstance(subject, Stranger) or not _takes_heads(subject):
        raise RegardError(f"{subject.label} takes tokens x [B,T,D]; a race is of functions f(q, k, v, causal=True)")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        named = {}
        if subject.causal_name:
            named[subject.causal_name] = config.causal
        out: Tensor = subject.f(q, k, v, **named)
        return out

    def make(size: Size, passing: str) -> Run:
        return attention_runner(attend, size, passing == "training")

    return Entrant(subject.label, None, True, make, lambda size, passing: None, _PASSES_OF_FUNCTIONS)


def _takes_heads(subject: Stranger) -> bool:
    """Returns whether a function takes q, k, v [B,H,T,K], as the race hands them over."""
    subject.find_out()
    return subject.layout is HEADS


def _peer_entrant(peer: Peer, config: Race) -> Entrant:
    """Returns the entrant of someone else's implementation."""

    def make(size: Size, passing: str) -> Run:
        return attention_runner(peer.make(size, config.features), size, passing == "training")

    declared = partial(_declared_cost, peer.like, config)
    return Entrant(peer.name, peer.like, True, make, declared, _PASSES_OF_FUNCTIONS, counted=not peer.compiled)


def _declared_cost(name: str, config: Race, size: Size, passing: str) -> Cost:
    """Returns what a mechanism declares that one run costs."""
    return cost.of(name, size, _face(passing), training=passing == "training", **_options(name, config))


def _face(passing: str) -> Any:
    """Returns the face of a mechanism that a pass runs."""
    if passing == "decode":
        return "recurrent"
    return "parallel"


def _options(name: str, config: Race) -> dict[str, Any]:
    """Returns the options of a mechanism that the race sets: the number of features, where it has them."""
    return accepted_options(lookup(name), {"features": config.features})


class CudaGraphRun:
    """A run as a CUDA graph, as generating uses it: without the time of Python.

    It keeps the run, whose tensors the graph reads.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.graph = torch.cuda.CUDAGraph()
        # A graph is captured after warming up on a stream of its own: see PyTorch's notes on CUDA graphs.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph):
            run()

    def __call__(self) -> None:
        self.graph.replay()


def format_gib(size: float) -> str:
    """Formats bytes: 1.5 GiB."""
    return f"{size / 2**30:.1f} GiB"
