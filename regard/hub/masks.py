"""What transformers lets a query see, as rules of ours.

A model asks its mask function once a pass, and hands the answer to every layer. Ours answers with the rule itself
where it is one (causal, padding, both, over any kind of cache): nothing of the size queries × keys is made. What is no
such rule stays the matrix that it is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Num
from torch import Tensor
from torch.utils._pytree import tree_map

from regard.shapes import Mask, Rows


class Seen(Tensor):
    """An answer to the model: it looks like truth values [B,1,T,S], and is them as soon as anyone computes with it.

    `rule` says the same as a `Mask`, or is None where no rule does; `local` is the width of a window or chunk, where
    the model asked for one; `made(name)` is what the mask function of that name would have answered.
    """

    rule: Mask | None
    local: int | None
    asked: dict[str, Any]
    answers: dict[str, Any]

    @staticmethod
    def of(rule: Mask | None, matrix: Tensor | None, asked: dict[str, Any]) -> Seen:
        B, T, S = (int(asked[n]) for n in ("batch_size", "q_length", "kv_length"))
        if matrix is None:
            matrix = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=asked.get("device", "cpu")).expand(B, 1, T, S)
        made: Seen = matrix.as_subclass(Seen)
        made.rule, made.asked, made.answers = rule, asked, {"matrix": matrix} if rule is None else {}
        local = asked.get("local_size")
        made.local = None if local is None else int(local)
        return made

    def made(self, name: str) -> Any:
        """The mask that layers which keep their own attention are given."""
        if name not in self.answers:
            from transformers.masking_utils import AttentionMaskInterface

            interface: Any = AttentionMaskInterface
            answer = interface()
            self.answers[name] = answer[name](**self.asked) if name in answer else None
        return self.answers[name]

    def matrix(self) -> Bool[Tensor, "B 1 T S"]:
        """The truth values themselves."""
        if "matrix" not in self.answers:
            self.answers["matrix"] = _matrix(self.asked)
        found: Tensor = self.answers["matrix"]
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OUTWARD:
                return func(*args, **(kwargs or {}))
            plain = partial(tree_map, lambda x: x.matrix() if isinstance(x, Seen) else x)
            return func(*plain(args), **plain(kwargs or {}))


_OUTWARD = {
    *(getattr(Tensor, n).__get__ for n in ("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda")),
    *(getattr(Tensor, n) for n in ("size", "dim", "is_floating_point", "is_complex", "as_subclass", "__hash__")),
}  # what can be asked of it without computing with it


def answered(**asked: Any) -> Seen:
    """The mask function that belongs to regard's attention."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    kind = asked.get("mask_function", causal_mask_function)
    if kind is causal_mask_function or kind is bidirectional_mask_function:
        return Seen.of(_rule(asked, kind is causal_mask_function), None, asked)
    matrix = _matrix(asked)
    return Seen.of(recognised(matrix), matrix, asked)


def truth_values(**asked: Any) -> Tensor:
    """The mask function of a listener: the rule shows in the truth values."""
    return _matrix(asked)


def _matrix(asked: dict[str, Any]) -> Tensor:
    from transformers.masking_utils import sdpa_mask

    found = sdpa_mask(**asked | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    assert found is not None  # without skipping there always is one
    return found


def _rule(asked: dict[str, Any], causal: bool) -> Mask:
    """Causal or not, and padding: from what the model asked, without a matrix."""
    T, S, first = int(asked["q_length"]), int(asked["kv_length"]), int(asked.get("kv_offset", 0))
    start = int(asked.get("q_offset", 0)) - first  # column of the first query
    visible = asked.get("attention_mask")
    if visible is not None:
        visible = torch.nn.functional.pad(visible.bool(), (0, max(0, first + S - visible.shape[1])))
        visible = visible[:, first : first + S]
        if bool(visible[:, : start + T].all() if causal else visible.all()):
            visible = None
    if not causal:
        return Mask(visible=visible)
    if start + T == S:  # the queries are the last keys
        return Mask(causal=True, visible=visible)
    # A static cache has room behind the queries, which nobody may see.
    device = asked.get("device", "cpu")
    written = (torch.arange(S, device=device) < start + T).expand(int(asked["batch_size"]), S)
    visible = written if visible is None else visible & written
    limit = visible.long().cumsum(1)[:, start : start + T]
    return Mask(causal=True, visible=visible, rows=Rows(limit - visible[:, start : start + T].long(), limit))


def recognised(mask: Num[Tensor, "#B #H #T S"], cross: bool = False) -> Mask | None:
    """The rule behind a matrix of truth values, or of numbers to add that only hide; None where there is none."""
    seen = truth(mask)
    if seen is None or seen.shape[1] != 1:
        return None
    seen = seen[:, 0]
    visible, limit = seen.any(1), seen.sum(-1)
    before = visible.long().cumsum(1)
    place = before - visible.long()
    if not torch.equal(seen, visible[:, None] & (place[:, None] < limit[..., None])):
        return None
    T, S = seen.shape[1:]
    shown = None if bool(visible.all()) else visible
    if not cross and T <= S and torch.equal(limit, before[:, S - T :]):
        return Mask(causal=True, visible=shown)
    if bool((limit == before[:, -1:]).all()):
        return Mask(visible=shown)
    return Mask(causal=True, visible=shown, rows=Rows((limit - 1).clamp(min=0), limit))


def truth(mask: Num[Tensor, "*any"]) -> Bool[Tensor, "*any"] | None:
    """True may be seen; None where numbers do more than hide."""
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return ~hidden if bool((hidden | (mask == 0)).all()) else None


def added(mask: Num[Tensor, "*any"], dtype: torch.dtype) -> Num[Tensor, "*any"]:
    """Numbers to add to the scores: −∞ where nothing may be seen."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, float("-inf")).to(dtype)
