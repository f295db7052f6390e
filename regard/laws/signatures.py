"""What the signature and the attributes of somebody's attention say about how it is called."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

CAUSAL_NAMES = ("causal", "is_causal")
# Masks of keys, and whether True means hidden there by custom.
KEY_MASKS = {"visible": False, "key_padding_mask": True, "padding_mask": True, "src_key_padding_mask": True}
KEY_MASKS |= dict.fromkeys(
    (
        *("key_mask", "keys_mask", "k_mask", "mask_k", "kv_mask", "key_pad_mask", "pad_mask", "padding_masks"),
        *("src_padding_mask", "src_pad_mask", "valid_mask", "keep_mask", "token_mask", "tokens_mask", "input_mask"),
        *("context_mask", "memory_key_padding_mask", "encoder_attention_mask", "encoder_mask", "x_mask", "seq_mask"),
        *("sequence_mask", "valid", "is_pad"),
    ),
    False,
)
ANY_MASKS = ("mask", "attention_mask", "attn_mask", "src_mask")
# Names that no other kind of mask has: one that hides nothing is wrong, whatever is said of it.
CERTAIN_MASKS = ("visible", "key_padding_mask", "padding_mask", "src_key_padding_mask", *ANY_MASKS)
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
# Numbers of visible keys, which say less than a mask: None is passed for them if they must be given.
LENGTHS = (
    *(
        "valid_lens",
        "valid_len",
        "valid_length",
        "valid_lengths",
        "lengths",
        "lens",
        "seq_lens",
        "seq_lengths",
        "seqlens",
    ),
    *("sequence_lengths", "key_lens", "key_lengths", "k_lens", "kv_lens", "src_len", "src_lens", "src_lengths"),
    *("input_lengths", "memory_lengths", "context_lens", "x_lens", "x_lengths"),
)
FILLED = (*HEAD_COUNTS, *SCALES, *KEY_WIDTHS, *DROPOUTS, *MODULES, *LENGTHS, "training")
# Where sequences begin that are packed one after another [total,H,K], and how long the longest is.
_STARTS = re.compile(r"cu_?(?:seq_?)?lens?(?:gths?)?(?:_(?P<side>q|k|kv|v))?", re.IGNORECASE)
_LONGEST = re.compile(r"max_?(?:seq_?)?len(?:gth)?s?(?:_(?P<side>q|k|kv|v))?", re.IGNORECASE)
LARGEST_WINDOW = 512  # tokens, of what is compared within its window
# A state that a call takes and returns, and the flags that ask for it.
STATES = ("past", "layer_past", "past_kv", "past_key_value", "past_key_values", "kv_cache", "cache", "state")
STATE_FLAGS = ("use_cache", "return_state", "return_cache", "output_final_state")
# A state of two tensors, in lower case, and methods that take one token more.
STATE_PAIRS = (
    *(("prev_k", "prev_v"), ("past_k", "past_v"), ("k_past", "v_past"), ("past_key", "past_value")),
    *(("k_cache", "v_cache"), ("cache_k", "cache_v"), ("key_cache", "value_cache"), ("s", "z")),
)
STEPS = (
    *("step", "forward_step", "decode_step", "step_forward", "incremental", "forward_incremental", "decode"),
    *("recurrent_step", "forward_recurrent", "recurrent_forward"),
)
_WIDTH_NAMES = (
    *("embed_dim", "d_model", "hidden_size", "n_embd", "width", "dim", "emb_dim", "embed_size", "d_in"),
    *("channels", "in_channels", "num_channels", "n_channels"),
)
_LENGTH_NAMES = (
    *("block_size", "context_length", "max_seq_len", "max_length", "max_len", "length", "T", "seq_len", "seq_length"),
    *("max_seq_length", "sequence_length", "max_position_embeddings", "n_positions", "n_ctx", "num_tokens"),
)
# Builtins have no signature to read: these are the names of torch.nn.functional.scaled_dot_product_attention.
_BUILTIN_PARAMETERS = ("query", "key", "value", "attn_mask", "is_causal")
# Names of queries, keys and values: q, keys, xv, value_states.
_ROLE = re.compile(
    r"(?:x_?|input_)?(?:(?P<q>queries|query|q)|(?P<k>keys|key|k)|(?P<v>values|value|v))(?:_(?:states|layer|tensor|in))?",
    re.IGNORECASE,
)
# Tokens before the batch, as it is said in docstrings (Time x Batch x Channel) and in code (T, B, C = x.shape).
_TOKENS_FIRST = re.compile(
    r"(?i:time\s*[x×]\s*batch|(?:sequence|seq|time)[ _-]?first)"
    r"|[\[(](?:T|L|S|s|sq|seq_len|tgt_len|src_len),\s*(?:B|N|b|bsz|batch\w*),"
    r"|\b(?:T|L|S|seq_len|seqlen|tgt_len|src_len)\s*,\s*(?:B|N|b|bs|bsz|batch\w*)\s*,\s*\w+\s*=\s*\w+\.(?:shape|size)"
)
# Heads before tokens, as a docstring says of q, k and v: [B, H, T, D], (batch, heads, seq_len, dim).
_HEADS_FIRST = re.compile(
    r"[\[(]\s*(?:B|N|b|bs|bsz|batch\w*),\s*(?:\w*heads?|H|h|nh|G),\s*(?:T|L|S|N|n|t|s|seq\w*|\w*_len|len\w*|tokens),"
)
_HEADS_LAST = re.compile(
    r"[\[(]\s*(?:B|N|b|bs|bsz|batch\w*),\s*(?:T|L|S|N|n|t|s|seq\w*|\w*_len|len\w*|tokens),\s*(?:\w*heads?|H|h|nh|G),"
)
# The same in code: B, T, H, D = q.shape.
_SIZES_HEADS_LAST = re.compile(
    r"\b(?:B|b|bs|bsz|batch\w*)\s*,\s*(?:T|L|S|t|l|s|seq\w*|\w*_len|seqlen\w*)\s*,\s*(?:\w*heads?|H|h|nh)\s*,\s*\w+\s*=\s*"
    r"(?:q|query|queries|xq)\.(?:shape|size\(\))"
)


def parameter_names(f: Callable[..., Any]) -> list[str]:
    """Returns the names of all parameters."""
    try:
        signature = inspect.signature(callable_of(f))
    except ValueError:  # a builtin
        return list(_BUILTIN_PARAMETERS)
    return list(signature.parameters)


def required_names(f: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        signature = inspect.signature(callable_of(f))
    except ValueError:
        return list(_BUILTIN_PARAMETERS[:3])
    return [n for n, p in signature.parameters.items() if p.kind in kinds and p.default is p.empty]


def takes_none(f: Callable[..., Any], name: str) -> bool:
    """Tells whether a parameter has a default that is None or a number; a boolean default makes it a switch."""
    try:
        parameter = inspect.signature(callable_of(f)).parameters.get(name)
    except ValueError:
        return False
    if parameter is None or isinstance(parameter.default, bool):
        return False
    return parameter.default is None or isinstance(parameter.default, int | float)


def data_names(f: Callable[..., Any]) -> list[str]:
    """Returns the names of the tensors that must be given: q, k and v, or tokens, or tokens and their context.

    Queries, keys and values come in this order, whatever the order of their declaration.
    """
    known = {*CAUSAL_NAMES, *KEY_MASKS, *ANY_MASKS, *FILLED, *STATES, *STATE_FLAGS, *state_pair(f)}
    required = required_names(f)
    # A name that comes first is that of tokens: h may be hidden vectors, or the number of heads.
    packing = packing_names(f)
    names = [name for n, name in enumerate(required) if name not in known or (n == 0 and name in HEAD_COUNTS)]
    names = [name for name in names if name not in packing]
    roles = {}
    for name in names:
        found = _ROLE.fullmatch(name)
        if found is not None and found.lastgroup is not None:
            roles[found.lastgroup] = name
    if len(names) == 3 and len(roles) == 3:
        return [roles[role] for role in "qkv"]
    return names


def packing_names(f: Callable[..., Any]) -> dict[str, tuple[str, str]]:
    """Returns the parameters that say how sequences are packed, each with what it says and of which side.

    What it says is "starts" or "longest", the side is "q" or "k". There are none where none says where sequences begin.
    """
    found = {}
    for name in parameter_names(f):
        for says, form in (("starts", _STARTS), ("longest", _LONGEST)):
            match = form.fullmatch(name)
            if match is not None:
                found[name] = (says, (match["side"] or "q")[0].replace("v", "k"))
    if all(says != "starts" for says, _ in found.values()):
        return {}
    return found


def wants_names(f: Callable[..., Any]) -> bool:
    """Returns whether some tensors must be given by their names."""
    try:
        parameters = inspect.signature(callable_of(f)).parameters
    except ValueError:
        return False
    return any(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in data_names(f))


def says_tokens_first(f: Any) -> bool:
    """Returns whether docstrings or code of somebody's attention say that tokens come before the batch, [T,B,…]."""
    kinds = [f]
    if not inspect.isfunction(f):
        kinds = [kind for kind in type(f).__mro__ if kind.__module__.partition(".")[0] not in ("torch", "builtins")]
    try:
        return any(_TOKENS_FIRST.search(inspect.getsource(kind)) for kind in kinds)
    except (OSError, TypeError):  # typed into a console: there is no source to read
        return False


def says_heads_first(f: Any) -> bool:
    """Returns whether a docstring says that heads come before tokens, [B,H,T,…], and none that they come after."""
    words = inspect.getdoc(f) or ""
    return bool(_HEADS_FIRST.search(words)) and not _HEADS_LAST.search(words)


def says_heads_last(f: Any) -> bool:
    """Returns whether a docstring, or code that takes q's sizes apart, says that heads come after tokens, [B,T,H,…]."""
    words = inspect.getdoc(f) or ""
    if _HEADS_FIRST.search(words) or _HEADS_LAST.search(words):
        return not _HEADS_FIRST.search(words)
    try:
        return bool(_SIZES_HEADS_LAST.search(inspect.getsource(callable_of(f))))
    except (OSError, TypeError):  # typed into a console: there is no source to read
        return False


def attends_twice(f: Any) -> bool:
    """Returns whether a module has two attentions, as a decoder's layer: over its tokens, and over a context."""
    return isinstance(f, nn.Module) and len(list(_attentions(f))) > 1


def _attentions(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost parts of a module that are attention by the names of their classes."""
    for part in module.children():
        name = type(part).__name__.lower()
        if "attention" in name or "attn" in name:
            yield part
        else:
            yield from _attentions(part)


def state_pair(f: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the two parameters that take the keys and values, or the sums, of a state; none where there are none."""
    known = {name.lower(): name for name in parameter_names(f)}
    return next(((known[k], known[v]) for k, v in STATE_PAIRS if k in known and v in known), ())


def find_width(f: Any) -> int | None:
    """Returns the width of a module's tokens: an attribute by one of its usual names, that of its first layer, or the
    first size among its parameters' with which it runs, the commonest tried first."""
    if not isinstance(f, nn.Module):
        return None
    found = [_read_number(f, name) for name in _WIDTH_NAMES]
    for layer in f.modules():
        if isinstance(layer, nn.Linear):
            found.append(layer.in_features)
        elif isinstance(layer, nn.Conv1d | nn.Conv2d):
            found.append(layer.in_channels)
        elif isinstance(layer, nn.GroupNorm):
            found.append(layer.num_channels)
        elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
            found.append(layer.normalized_shape[-1])
    given = next((n for n in found if n is not None), None)
    if given is not None:
        return given
    sizes = Counter(n for parameter in f.parameters() for n in parameter.shape if n > 1)
    return next((n for n, _ in sizes.most_common() if _runs_at_width(f, n)), None)


def _runs_at_width(f: nn.Module, width: int) -> bool:
    """Returns whether a module runs on tokens of a width, given for each argument that it requires."""
    tokens = [torch.zeros(2, 3, width) for _ in required_names(f)]
    try:
        with torch.no_grad():
            f(*tokens)
    except Exception:
        return False
    return True


def find_length(f: Any) -> int | None:
    """Returns the most tokens that a module takes, where an attribute by one of the usual names says so."""
    if not isinstance(f, nn.Module):
        return None
    return next((n for n in (_read_number(f, name) for name in _LENGTH_NAMES) if n is not None), None)


def find_heads(f: Any) -> int | None:
    """Returns the number of query heads of a module, where an attribute by one of the usual names says so."""
    names = (*HEAD_COUNTS, "num_attention_heads", "n_local_heads", "nh", "heads_num", "number_of_heads")
    return next((n for n in (_read_number(f, name) for name in names) if n is not None), None)


def find_softcap(f: Any) -> float | None:
    """Returns the softcap that somebody's attention has where none is given: a parameter's default, or an attribute."""
    return _find_declared(f, (*ADJUSTMENTS["softcap"], "attn_logit_softcap"))


def find_window(f: Any) -> int | None:
    """Returns the window that somebody's attention has where none is given: a parameter's default, or an attribute."""
    found = _find_declared(f, ("window", "window_size", "sliding_window"))
    if found is None or found > LARGEST_WINDOW:
        return None
    return int(found)


def _find_declared(f: Any, names: tuple[str, ...]) -> float | None:
    """Returns the first positive number by one of some names, of a parameter's default or an attribute."""
    said: list[Any] = []
    try:
        parameters = inspect.signature(callable_of(f)).parameters
        said = [parameters[name].default for name in names if name in parameters]
    except (ValueError, TypeError):  # a builtin, or nothing to call
        pass
    if isinstance(f, nn.Module):
        said += [getattr(f, name, None) for name in names]
    return next((float(x) for x in said if isinstance(x, int | float) and not isinstance(x, bool) and x > 0), None)


def _read_number(module: nn.Module, name: str) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def callable_of(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what is called: a module's `forward`, or the function itself."""
    if isinstance(f, nn.Module):
        return f.forward
    return f
