"""Writing the expressions by which an ejected file builds a layer's memory, decays and write strengths."""

from __future__ import annotations

from regard.errors import OptionError
from regard.mechanisms import Recurrence
from regard.mechanisms.delta import Delta
from regard.mechanisms.gated import Gated
from regard.mechanisms.gated_delta import GatedDelta
from regard.mechanisms.retention import Retention
from regard.nn import Attention
from regard.nn.gates import Constant, Decay, Gates, LogSigmoid, StepDecay

_FIXED = {  # the decay a of mechanisms in which it does not depend on tokens
    "retention": "fixed_decay",
    "delta": "lambda v: v.new_zeros(1, 1, 1, 1)",
    "constant": "lambda v: fixed_decay(v).to(torch.promote_types(v.dtype, torch.float32))",
}


def write_memory(mechanism: Recurrence, attention: Attention) -> str:
    """Returns the expression that builds the plain version of a mechanism with a memory."""
    if type(mechanism) not in (Retention, Gated, Delta, GatedDelta):
        raise OptionError(
            f"the mechanism '{mechanism.name}' has no plain version that regard could write: it is your own; copy "
            "its class into the file by hand"
        )
    compare = "compare_decayed"
    if mechanism.channels:
        compare = "compare_channels"
    decay = _FIXED.get(mechanism.name)
    if attention.gates is not None and type(attention.gates.decay) is Constant:
        decay = _FIXED["constant"]
    scale = mechanism.score_scale(attention.size.K)
    return f"Memory({compare}, erases={mechanism.erases}, scale={scale!r}, decay={decay})"


def write_gates(attention: Attention, width: int) -> str:
    """Returns the expression that builds the module for a layer's decays and write strengths; "None" without one."""
    gates = attention.gates
    if gates is None or gates.project is None:
        return "None"
    return f"Gates({width}, {gates.heads}, {gates.sizes}, {_write_decay(gates)}, most={gates.range})"


def _write_decay(gates: Gates) -> str:
    """Returns the expression that builds the plain version of a learned decay; "None" if none is learned."""
    decay = gates.decay
    if decay is None or type(decay) is Constant:
        return "None"
    if type(decay) is StepDecay:
        return f"StepDecay({gates.heads}, {decay.least}, {decay.most})"
    if type(decay) in (Decay, LogSigmoid):
        return f"{type(decay).__name__}({gates.heads}, {gates.width})"
    raise OptionError(
        f"the decay '{type(decay).__name__}' has no plain version that regard could write: it is your own; copy its "
        "class into the file by hand"
    )
