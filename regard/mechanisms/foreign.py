"""What arguments of PyTorch's attention and others' are called here, for who writes them out of habit."""

from __future__ import annotations

from collections.abc import Iterable

from regard.errors import OptionError

OURS = {
    "is_causal": "causal=True",
    "attn_mask": "a rule where there is one (causal=, window=, documents=); else, of softmax, bias=, which is added to "
    "the scores: torch.zeros(T, S).masked_fill(~attn_mask, -torch.inf) of a mask whose True is where a key may be seen",
    "attention_mask": "visible=attention_mask.bool() [B,S], True where a key may be seen",
    "key_padding_mask": "visible=~key_padding_mask [B,S]: True is where a key may be seen",
    "dropout_p": "a layer's own, regard.nn.Attention(…, dropout=0.1), or mechanism.dropout of one that is built",
    "enable_gqa": "nothing: fewer heads in k and v than in q are grouped attention",
    "need_weights": "regard.mechanism(…).weights(q, k, regard.Mask(causal=…)) [B,H,T,S]; layers take need_weights=True",
    "average_attn_weights": "nothing: weights are those of each head, [B,H,T,S]; weights.mean(1) is their average",
    "embed_dim": "D",
    "num_heads": "H",
    "kdim": "source, the width of the sequence that keys and values come from",
    "batch_first": "nothing: the batch always comes first",
}
OURS["labels"] = "model.loss(tokens, targets), where targets[:, t] is what follows tokens[:, t]: nothing is shifted"
OURS["mask"] = OURS["attn_mask"]
OURS["attn_bias"] = OURS["attn_mask"]

# The arguments of flash-linear-attention's functions, for who calls a gated or delta mechanism.
FLA = {
    "g": "a=, [B,G,S]: heads come before tokens",
    "gk": "a=, [B,G,S,K]: heads come before tokens",
    "g_gamma": "the decay of 'retention', or a= of 'gated', [B,G,S]",
    "beta": "b=, [B,G,S]: heads come before tokens",
    "cu_seqlens": "documents=, the number of each token's document [B,S]",
    "initial_state": "the state of mechanism.extend(q, k, v, state, …)",
    "output_final_state": "the state that mechanism.extend(q, k, v, state, …) returns",
    "use_qk_l2norm_in_kernel": "q / ‖q‖ and k / ‖k‖ before the call, as in torch.nn.functional.normalize(k, dim=-1)",
    "allow_neg_eigval": "range=2, and b=2·sigmoid(x)",
}


def refuse_others(others: Iterable[str], what: str) -> None:
    """Raises for any argument that is left over, and says of PyTorch's what it is called here."""
    refuse_foreign(others, what)
    for name in sorted(others):
        raise OptionError(f"{what} has no argument '{name}'")


def refuse_foreign(given: Iterable[str], what: str) -> None:
    """Raises where an argument is called as PyTorch calls it, and says what it is called here."""
    for name in given:
        if name in OURS:
            raise OptionError(f"{what} has no argument '{name}'. Here it is {OURS[name]}.")
