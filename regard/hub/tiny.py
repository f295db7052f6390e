"""Makes the config of a Hugging Face model small: the same architecture in a size that a laptop checks in seconds.

Every kind of layer stays, and windows and chunks become short, so that a short text crosses their edges.
"""

from __future__ import annotations

from typing import Any

from regard.errors import HubError, quote

TINY = "@tiny"  # after a name: 'random:llama@tiny'

_HIDDEN = 64
_HEADS = 4
_HEAD = _HIDDEN // _HEADS
_VOCABULARY = 128
_POSITIONS = 256
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
# What a field becomes, by the names that configs of transformers give it. Fields that are None or absent stay so.
_SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "pooler_output_size"), _HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("head_dim", "d_kv", "query_pre_attn_scalar"), _HEAD),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), _HEAD),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "linear_num_key_heads", "n_groups", "expert_layer_period"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), _POSITIONS),
    **dict.fromkeys(("sliding_window", "local_attention", "attention_chunk_size"), 16),
    **{"attn_layer_period": 2, "attn_layer_offset": 1, "chunk_size": 64, "vocab_size": _VOCABULARY},
    **{"image_size": 32, "patch_size": 8, "encoder_stride": 8, "num_mel_bins": 8, "max_source_positions": 12},
}
_TOKENS = {"pad": 0, "bos": 1, "cls": 1, "decoder_start": 1, "eos": 2, "sep": 2, "forced_eos": 2, "mask": 3}


def shrink_config(config: Any) -> Any:
    """Returns a small config of the same class, with the settings of `config` that are no sizes."""
    small: dict[str, Any] = {name: size for name, size in _SIZES.items() if _is_size(getattr(config, name, None))}
    layers = 2
    by_layer = _lists_by_layer(config)
    for kinds in by_layer.values():  # as many layers as it takes to have one of each kind
        layers = max(layers, 1 + max(kinds.index(kind) for kind in set(kinds)))
    small |= {name: kinds[:layers] for name, kinds in by_layer.items()}
    rotation = getattr(config, "rope_parameters", None) or {}
    if "original_max_position_embeddings" in rotation:
        before = int(_POSITIONS // rotation["factor"])
        small["rope_parameters"] = rotation | {"original_max_position_embeddings": before}
    small |= dict.fromkeys((name for name in _LAYERS if _is_size(getattr(config, name, None))), layers)
    heads = getattr(config, "num_key_value_heads", None)
    if _is_size(heads):
        grouped = heads < config.num_attention_heads
        small["num_key_value_heads"] = _HEADS // 2 if grouped else _HEADS
    if _is_size(getattr(config, "expand", None)) and "num_heads" in small:  # a Mamba: its heads span the inner width
        small["num_heads"] = int(config.expand) * _HIDDEN // _HEAD
    if _is_size(getattr(config, "mamba_n_heads", None)) and not hasattr(config, "mamba_d_ssm"):  # so do Granite 4's
        small |= {"mamba_n_heads": int(config.mamba_expand) * _HIDDEN // _HEAD, "mamba_d_head": _HEAD}
        # Their default configs have no softmax layer: no trained model is like that, and transformers' cache fails.
        if set(by_layer.get("layer_types", ())) == {"linear_attention"}:
            small["layer_types"][-1] = "full_attention"
        if getattr(config, "attn_layer_indices", ()) is None:
            small["attn_layer_indices"] = [layers - 1]
    if _is_size(getattr(config, "n_group", None)) and config.n_group > 1:  # of experts, half of which are looked at
        small |= {"n_group": 2, "topk_group": 1}
    for name, token in _TOKENS.items():
        given = getattr(config, f"{name}_token_id", None)
        if isinstance(given, list) or (isinstance(given, int) and given >= _VOCABULARY):
            small[f"{name}_token_id"] = token
    for name in getattr(config, "sub_configs", None) or ():
        if getattr(config, name, None) is not None:
            small[name] = shrink_config(getattr(config, name))
    settings = config.to_diff_dict() | small
    # Some classes write a field under another name, and would take what stands there.
    written = {name: config.attribute_map.get(name, name) for name in small}
    settings |= {written[name]: x for name, x in small.items() if written[name] in settings}
    settings.pop("model_type", None)
    try:
        return type(config)(**settings)
    except Exception as error:  # whatever a config class has against its own fields
        raise HubError(f"a {type(config).__name__} cannot be made small: {quote(error)}") from error


def _lists_by_layer(config: Any) -> dict[str, list[str]]:
    """Returns the fields of a config that say in a word what each layer is."""
    count = getattr(config, "num_hidden_layers", None)
    fields = config.to_dict()
    return {
        name: list(words)
        for name, words in fields.items()
        if isinstance(words, list) and words and len(words) == count and all(isinstance(word, str) for word in words)
    }


def _is_size(value: Any) -> bool:
    """Tells whether the value of a field is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)
