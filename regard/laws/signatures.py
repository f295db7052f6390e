"""What the signature and the attributes of somebody's attention say about how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

CAUSAL_NAMES = ("causal", "is_causal")
# Masks of keys, and whether True means hidden there by custom.
KEY_MASKS = {"visible": False, "key_padding_mask": True, "padding_mask": True, "src_key_padding_mask": True}
ANY_MASKS = ("mask", "attention_mask", "attn_mask", "src_mask")
# What is added to scores [H,T,S], the slopes of ALiBi [H], and the bound of a softcap.
ADJUSTMENTS = {
    "bias": ("bias", "attn_bias", "position_bias", "score_bias"),
    "slopes": ("slopes", "alibi_slopes"),
    "softcap": ("softcap", "logit_cap", "logits_soft_cap", "attn_logit_softcapping"),
}
# Arguments that can be filled in from the sizes of a call.
HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "heads", "nhead", "h", "H")
SCALES = ("scale", "scaling", "softmax_scale", "sm_scale")
KEY_WIDTHS = ("d_k", "dk", "head_dim", "d_head", "head_size")
DROPOUTS = ("dropout", "dropout_p", "dropout_rate", "attn_dropout", "p_drop")
MODULES = ("module", "layer")
FILLED = (*HEAD_COUNTS, *SCALES, *KEY_WIDTHS, *DROPOUTS, *MODULES, "training")
# A state that a call takes and returns, and the flags that ask for it.
STATES = ("past", "layer_past", "past_kv", "past_key_value", "past_key_values", "kv_cache", "cache", "state")
STATE_FLAGS = ("use_cache", "return_state", "return_cache", "output_final_state")
# A state of two tensors, in lower case, and methods that take one token more.
STATE_PAIRS = (
    *(("prev_k", "prev_v"), ("past_k", "past_v"), ("k_past", "v_past"), ("past_key", "past_value")),
    *(("k_cache", "v_cache"), ("cache_k", "cache_v"), ("key_cache", "value_cache"), ("s", "z")),
)
STEPS = ("step", "forward_step", "decode_step", "step_forward", "incremental", "forward_incremental", "decode")
_WIDTH_NAMES = ("embed_dim", "d_model", "hidden_size", "n_embd", "width", "dim", "emb_dim", "embed_size", "d_in")
_LENGTH_NAMES = ("block_size", "context_length", "max_seq_len", "max_length", "max_len", "length", "T")
# Builtins have no signature to read: these are the names of torch.nn.functional.scaled_dot_product_attention.
_BUILTIN_PARAMETERS = ("query", "key", "value", "attn_mask", "is_causal")


def parameter_names(f: Callable[..., Any]) -> list[str]:
    """Returns the names of all parameters."""
    try:
        signature = inspect.signature(_callable_of(f))
    except ValueError:  # a builtin
        return list(_BUILTIN_PARAMETERS)
    return list(signature.parameters)


def required_names(f: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        signature = inspect.signature(_callable_of(f))
    except ValueError:
        return list(_BUILTIN_PARAMETERS[:3])
    return [n for n, p in signature.parameters.items() if p.kind in kinds and p.default is p.empty]


def takes_none(f: Callable[..., Any], name: str) -> bool:
    """Returns whether a parameter may be left out, with a default of None or a number: it is no switch."""
    try:
        parameter = inspect.signature(_callable_of(f)).parameters.get(name)
    except ValueError:
        return False
    if parameter is None or isinstance(parameter.default, bool):
        return False
    return parameter.default is None or isinstance(parameter.default, int | float)


def data_names(f: Callable[..., Any]) -> list[str]:
    """Returns the names of the tensors that must be given: q, k and v, or tokens, or tokens and their context."""
    known = {*CAUSAL_NAMES, *KEY_MASKS, *ANY_MASKS, *FILLED, *STATES, *STATE_FLAGS, *state_pair(f)}
    return [name for name in required_names(f) if name not in known]


def state_pair(f: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the two parameters that take the keys and values, or the sums, of a state; none where there are none."""
    known = {name.lower(): name for name in parameter_names(f)}
    return next(((known[k], known[v]) for k, v in STATE_PAIRS if k in known and v in known), ())


def find_width(f: Any) -> int | None:
    """Returns the width of a module's tokens: an attribute by one of its usual names, or its first Linear's."""
    if not isinstance(f, nn.Module):
        return None
    found = [_read_number(f, name) for name in _WIDTH_NAMES]
    found += [m.in_features for m in f.modules() if isinstance(m, nn.Linear)]
    return next((n for n in found if n is not None), None)


def find_length(f: Any) -> int | None:
    """Returns the most tokens that a module takes, where an attribute by one of the usual names says so."""
    if not isinstance(f, nn.Module):
        return None
    return next((n for n in (_read_number(f, name) for name in _LENGTH_NAMES) if n is not None), None)


def find_heads(f: Any) -> int | None:
    """Returns the number of query heads of a module, where an attribute by one of the usual names says so."""
    names = (*HEAD_COUNTS, "num_attention_heads", "n_local_heads", "nh", "heads_num", "number_of_heads")
    return next((n for n in (_read_number(f, name) for name in names) if n is not None), None)


def _read_number(module: nn.Module, name: str) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _callable_of(f: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(f, nn.Module):
        return f.forward
    return f
