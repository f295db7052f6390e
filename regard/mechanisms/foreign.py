"""What arguments of PyTorch's attention, and of other libraries', are called here, for who writes them out of habit."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from regard.errors import OptionError

RULES = ("causal", "visible", "window", "documents", "bias", "slopes", "softcap", "sinks")
OURS = {
    "is_causal": "causal=True, which a layer is told where it is made",
    "causal": "said once, where the layer is made; a GPT always is, an Encoder never",
    "attn_mask": "a rule where there is one (causal=, window=, documents=; a layer gets rules=regard.Mask(window=…) "
    "where it is made); else, of softmax, bias=, which is added to the scores: "
    "torch.zeros(T, S).masked_fill(~attn_mask, -torch.inf) of a mask whose True is where a key may be seen",
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
# Looked at only where a mechanism has no such option: one of somebody's own may call an option so.
ELSEWHERE = {
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "scaling": "scale=",
    "window_size": "window=, a whole number that counts the query itself: (3, 0) of flash-attn is window=4",
    "sliding_window": "window=, a whole number that counts the query itself",
    "alibi_slopes": "slopes=, one a head [H]",
    "logits_soft_cap": "softcap=",
    "cu_seqlens": "documents= [B,S], the number of each token's document: "
    "torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())[None]",
    "block_mask": "a rule: causal=, window=, documents=, visible=",
    "score_mod": "bias=, slopes= or softcap= of softmax, or a mechanism of your own",
    "dropout": OURS["dropout_p"],
    "num_kv_heads": "G=, of a layer; regard.attend sees it by the shape of k and v",
    "head_dim": "K=, of a layer; regard.attend sees it by the shape of q and k",
}
ELSEWHERE["cu_seqlens_q"] = ELSEWHERE["cu_seqlens"].replace("cu_seqlens", "cu_seqlens_q")
ELSEWHERE["num_key_value_heads"] = ELSEWHERE["kv_heads"] = ELSEWHERE["num_kv_heads"]
ELSEWHERE["dim_head"] = ELSEWHERE["head_dim"]

# What mechanisms are called elsewhere, in small letters and with dashes.
MECHANISMS_ELSEWHERE = {
    **dict.fromkeys(("flash", "flash-attention", "sdpa", "mha", "gqa", "mqa", "full", "vanilla", "dot"), "softmax"),
    **dict.fromkeys(("flash-attention-2", "flex-attention", "scaled-dot-product", "dot-product", "eager"), "softmax"),
    **dict.fromkeys(("hard", "hardmax", "hard-attention"), "argmax"),
    **dict.fromkeys(("linear-attention", "linear-transformer"), "elu"),
    **dict.fromkeys(("favor", "favor+"), "performer"),
    **dict.fromkeys(("rfa", "random-features", "rff"), "fourier"),
    **dict.fromkeys(("rbf", "gaussian-kernel"), "gaussian"),
    "retnet": "retention",
    **dict.fromkeys(("gla", "mamba2", "mamba-2", "ssd", "gated-linear-attention", "simple-gla"), "gated"),
    **dict.fromkeys(("deltanet", "delta-net", "delta-rule"), "delta"),
    **dict.fromkeys(("gated-deltanet", "gated-delta-net", "gdn", "kda"), "gated-delta"),
}

# The arguments of flash-linear-attention's functions, for who calls a gated or delta mechanism.
FLA = {
    "g": "a=, [B,G,S]: heads come before tokens",
    "gk": "a=, [B,G,S,K]: heads come before tokens",
    "g_gamma": "the decay of 'retention', or a= of 'gated', [B,G,S]",
    "beta": "b=, [B,G,S]: heads come before tokens",
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


def suggest_ours(options: Iterable[str], of_layer: bool = False, of_memory: bool = False) -> str:
    """Returns what to say beside options that a mechanism has not: what another library's is here, or the near rule.

    `of_memory` is for gated and delta mechanisms, which know the arguments of flash-linear-attention.
    """
    known = ELSEWHERE
    if of_memory:
        known = ELSEWHERE | FLA
    named = [f" Here '{name}' is {known[name]}." for name in options if name in known]
    if named:
        return "".join(named)
    close = [match for name in options for match in get_close_matches(name, RULES, n=1)]
    if not close:
        return ""
    if of_layer:
        return f" Did you mean rules=regard.Mask({close[0]}=…)?"
    return f" Did you mean {close[0]}= of regard.attend?"
