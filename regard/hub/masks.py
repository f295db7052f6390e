"""The masks of transformers' models as masks of regard.

A model calls its mask function once per forward pass for each kind of layer (full, sliding), and passes the result to
these layers. `lazy_mask`, for models with replacements, returns a `LazyMask`; `boolean_mask`, for recording, returns
booleans. Many masks have a structured form, a `Mask` of regard: those that are causal, those that hide
padding, and all others that `recognise_structure` describes. For transformers' plain causal and bidirectional mask
functions, the structured form is made without computing a [T,S] matrix. Every other mask is first computed as a matrix,
in which `recognise_structure` then looks for a structured form.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Num
from torch import Tensor
from torch.utils._pytree import tree_map

from regard.shapes import Mask, Rows


class LazyMask(Tensor):
    """A boolean mask [B,1,T,S], True where a query may see a key.

    The matrix of a plain causal or bidirectional mask is not computed until a value is read.
    `structured` is the same mask as a `Mask` of regard, or None if it has no structured form. `window` is the size of a
    sliding window or chunk, if the model has one. `arguments` are those of the model's call of its mask function.
    """

    structured: Mask | None
    window: int | None
    arguments: dict[str, Any]
    computed: dict[str, Any]  # masks by the name of their implementation, and the boolean matrix under "matrix"

    @staticmethod
    def create(structured: Mask | None, matrix: Tensor | None, arguments: dict[str, Any]) -> LazyMask:
        """Returns a mask, which is given as its structured form, as its matrix [B,1,T,S], or as both.

        `structured` is None if the mask has no structured form. `matrix` may be None if `structured` is given.
        """
        if matrix is None:
            B, T, S = (int(arguments[n]) for n in ("batch_size", "q_length", "kv_length"))
            # A single expanded value has the right shape and takes no memory.
            value = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=arguments.get("device", "cpu"))
            matrix = value.expand(B, 1, T, S)
        mask: LazyMask = matrix.as_subclass(LazyMask)
        mask.structured = structured
        mask.arguments = arguments
        mask.computed = {}
        # A given matrix is read again only if there is no structured form. Else `matrix()` computes it anew when it is
        # first read, which is rare.
        if structured is None:
            mask.computed["matrix"] = matrix
        mask.window = arguments.get("local_size")
        return mask

    def for_implementation(self, name: str) -> Any:
        """Returns the mask that transformers makes for the attention implementation `name`.

        Layers without a replacement get this mask. It is None if transformers has no mask function of that name, or if
        its mask function returns None.
        """
        if name not in self.computed:
            from transformers.masking_utils import AttentionMaskInterface

            interface: Any = AttentionMaskInterface
            functions = interface()
            self.computed[name] = None  # as transformers itself does for a name without a mask function
            if name in functions:
                self.computed[name] = functions[name](**self.arguments)
        return self.computed[name]

    def matrix(self) -> Bool[Tensor, "B 1 T S"]:
        """Returns the mask as an ordinary boolean tensor."""
        if "matrix" not in self.computed:
            self.computed["matrix"] = boolean_mask(**self.arguments)
        matrix: Tensor = self.computed["matrix"]
        return matrix

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replaces the mask by its matrix in every operation that reads its values."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in _READS_NO_VALUES:
                return func(*args, **(kwargs or {}))
            to_matrix = partial(tree_map, lambda x: x.matrix() if isinstance(x, LazyMask) else x)
            return func(*to_matrix(args), **to_matrix(kwargs or {}))


# Operations that do not read the values of a mask. Torch passes the reading of an attribute, such as `mask.shape`, to
# `__torch_function__` as a call of the attribute's getter, `Tensor.shape.__get__`.
_READS_NO_VALUES = {
    *(getattr(Tensor, n).__get__ for n in ("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda")),
    *(getattr(Tensor, n) for n in ("size", "dim", "is_floating_point", "is_complex", "as_subclass", "__hash__")),
}


def lazy_mask(**arguments: Any) -> Tensor:
    """Returns the mask of a forward pass, for models with replaced attention; an ordinary tensor in a compiled pass."""
    if torch.compiler.is_compiling():  # its guards and a LazyMask do not agree on what the strides are
        return boolean_mask(**arguments)
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    kind = arguments.get("mask_function", causal_mask_function)
    if kind is causal_mask_function or kind is bidirectional_mask_function:
        structured = _structured_mask_from_arguments(arguments, causal=kind is causal_mask_function)
        return LazyMask.create(structured, None, arguments)
    matrix = boolean_mask(**arguments)
    return LazyMask.create(recognise_structure(matrix), matrix, arguments)


def boolean_mask(**arguments: Any) -> Bool[Tensor, "B 1 T S"]:
    """Returns the mask of a forward pass as a boolean tensor, True where a query may see a key."""
    from transformers.masking_utils import sdpa_mask

    mask = sdpa_mask(**arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    assert mask is not None  # sdpa_mask returns None only where skipping is allowed
    return mask


def _structured_mask_from_arguments(arguments: dict[str, Any], causal: bool) -> Mask:
    """Returns the structured form of a causal or bidirectional mask with padding, without computing the matrix."""
    T = int(arguments["q_length"])
    S = int(arguments["kv_length"])
    first_key = int(arguments.get("kv_offset", 0))
    start = int(arguments.get("q_offset", 0)) - first_key  # the column of the first query
    visible = arguments.get("attention_mask")
    if visible is not None:
        visible = torch.nn.functional.pad(visible.bool(), (0, max(0, first_key + S - visible.shape[1])))
        visible = visible[:, first_key : first_key + S]
        # A causal query sees no key after the last query, so padding there has no effect.
        reachable = visible[:, : start + T] if causal else visible
        if bool(reachable.all()):
            visible = None
    if not causal:
        return Mask(visible=visible)
    if start + T == S:  # the queries are the last keys
        return Mask(causal=True, visible=visible)
    # A static cache has unused slots after the queries, which no query may see.
    device = arguments.get("device", "cpu")
    written = (torch.arange(S, device=device) < start + T).expand(int(arguments["batch_size"]), S)
    visible = written if visible is None else visible & written
    # For each query, Rows holds how many visible keys are before it, and how many visible keys it may attend to.
    limit = visible.long().cumsum(1)[:, start : start + T]
    return Mask(causal=True, visible=visible, rows=Rows(limit - visible[:, start : start + T].long(), limit))


def recognise_structure(mask: Num[Tensor, "#B #H #T S"], cross: bool = False) -> Mask | None:
    """Returns the structured form of a mask matrix, boolean or additive; None if it has no structured form.

    Call a key visible if some query may attend to it. A mask has a structured form if it is one matrix for all heads
    (its dim 1 is 1), has a boolean form (see `as_boolean`), and is of one of three kinds: (a) each query t attends to
    exactly the first n_t visible keys, for any numbers n_t; (b) T = S, and it is causal within packed documents, with
    nothing seen across them; (c) it is causal within a sliding window that all queries share, packed or not. In
    self-attention the queries are taken to be the last T keys, and a mask of kind (a) that
    is then causal becomes `Mask(causal=True)` without `rows`. With `cross` the queries are not keys, and a mask of kind
    (a) never becomes that.
    """
    if not torch.compiler.is_compiling():
        return find_structure(mask, cross)
    # It reads the mask's values. A function that is not compiled breaks the graph once; inlined, each read would.
    from regard.hub.cache import find_structure_uncompiled  # imports transformers

    found: Mask | None = find_structure_uncompiled(mask, cross)
    return found


def find_structure(mask: Num[Tensor, "#B #H #T S"], cross: bool) -> Mask | None:
    """Returns what `recognise_structure` returns; it must run outside of a compiled graph."""
    allowed = as_boolean(mask)
    if allowed is None or allowed.shape[1] != 1:
        return None
    allowed = allowed[:, 0]
    visible = allowed.any(1)  # [B,S]: keys that some query may attend to
    limit = allowed.sum(-1)  # [B,T]: the number of keys that each query may attend to
    count = visible.long().cumsum(1)  # [B,S]: the number of visible keys up to and including each key
    index = count - visible.long()  # [B,S]: the number of visible keys before each key
    if not torch.equal(allowed, visible[:, None] & (index[:, None] < limit[..., None])):
        found = _recognise_documents(allowed)
        if found is None and not cross:
            found = _recognise_window(allowed, visible)
        return found
    T, S = allowed.shape[1:]
    # The simplest form that fits: causal with the queries at the end, then no limit, then a limit for each query.
    padding = None if bool(visible.all()) else visible
    if not cross and T <= S and torch.equal(limit, count[:, S - T :]):
        return Mask(causal=True, visible=padding)
    if bool((limit == count[:, -1:]).all()):
        return Mask(visible=padding)
    return Mask(causal=True, visible=padding, rows=Rows((limit - 1).clamp(min=0), limit))


def _recognise_documents(allowed: Bool[Tensor, "B T S"]) -> Mask | None:
    """Returns the form of a mask that is causal within packed documents, possibly padded; None if it is not."""
    B, T, S = allowed.shape
    if T != S:
        return None
    # Every query of a document sees the document's first key; it serves as the document's number.
    mask = Mask(causal=True, documents=allowed.int().argmax(-1))
    visible = allowed.diagonal(dim1=1, dim2=2)
    if not bool(visible.all()):
        mask = mask.but(visible=visible)
    found = mask.allowed(T, S, allowed.device)
    if found is None or not torch.equal(found[:, 0].expand(B, T, S), allowed):
        return None
    return mask


def _recognise_window(allowed: Bool[Tensor, "B T S"], visible: Bool[Tensor, "B S"]) -> Mask | None:
    """Returns the form of a causal mask with a sliding window, possibly padded and packed; None if it is not.

    Positions count visible keys, and transformers' windows count all: they agree unless padding lies between tokens.
    Rows of queries that are padding themselves may differ, as nobody reads their outputs.
    """
    T, S = allowed.shape[1:]
    if T > S:
        return None
    mask = Mask(causal=True, window=max(1, int(allowed.sum(-1).max())))
    if not bool(visible.all()):
        mask = mask.but(visible=visible)
    if _shows_tokens(mask, allowed, visible):
        return mask
    if T != S:
        return None
    # A document begins where a token does not see the one before it.
    begins = torch.nn.functional.pad(~allowed.diagonal(-1, 1, 2), (1, 0))
    mask = mask.but(documents=begins.long().cumsum(1))
    if _shows_tokens(mask, allowed, visible):
        return mask
    return None


def _shows_tokens(mask: Mask, allowed: Bool[Tensor, "B T S"], visible: Bool[Tensor, "B S"]) -> bool:
    """Tells whether a mask shows each query that is no padding exactly the keys that it may see."""
    T, S = allowed.shape[1:]
    found = mask.allowed(T, S, allowed.device)
    if found is None:
        return False
    tokens = visible[:, S - T :, None]
    return torch.equal(found[:, 0].expand_as(allowed) & tokens, allowed & tokens)


def as_boolean(mask: Num[Tensor, "*any"]) -> Bool[Tensor, "*any"] | None:
    """Returns a mask as booleans, True where a query may see a key.

    Returns None for an additive mask with a value that neither is 0 nor hides a key.
    """
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= _hidden_threshold(mask.dtype)
    if not bool((hidden | (mask == 0)).all()):
        return None
    return ~hidden


def as_additive(mask: Num[Tensor, "*any"], dtype: torch.dtype) -> Num[Tensor, "*any"]:
    """Returns a mask as a bias that is added to the scores, −∞ where a query may not see a key."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))
    return mask.masked_fill(mask <= _hidden_threshold(mask.dtype), float("-inf")).to(dtype)


@contextmanager
def watching_for_documents() -> Iterator[list[bool]]:
    """Yields a list that gets an entry when transformers finds packed documents in the positions of a call."""
    from transformers import masking_utils

    found: list[bool] = []
    original = masking_utils.find_packed_sequence_indices

    def watch(position_ids: Tensor) -> Tensor | None:
        indices = original(position_ids)
        if indices is not None:
            found.append(True)
        return indices

    masking_utils.find_packed_sequence_indices = watch
    try:
        yield found
    finally:
        masking_utils.find_packed_sequence_indices = original


def _hidden_threshold(dtype: torch.dtype) -> float:
    """Returns half the lowest number of the dtype: an additive mask hides a key where its value is at or below this.

    Models use the lowest number itself, or −∞.
    """
    return torch.finfo(dtype).min / 2
