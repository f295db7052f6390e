"""A Hugging Face config, key by key: every key that affects the outputs is supported, or raises an error that names it.

A family takes the keys that it supports. Every other key must be one that need not be taken (`NEED_NOT_BE_TAKEN`, or
the user's `ignore`), be null, or have one of its allowed values (`ALLOWED_VALUES`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from regard.config import SIZE_LIMITS
from regard.errors import HubError, quote
from regard.reading import fits

# Keys that no family needs to take. Most do not affect a model's outputs: who wrote it, how it was initialised, how to
# generate with it. A few affect the outputs of some models, and the families concerned read them: pad_token_id gives
# the first position of RoBERTa, and id2label and num_labels give the size of a classification head.
NEED_NOT_BE_TAKEN = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _num_labels architectures
    attn_implementation begin_suppress_tokens bad_words_ids bos_token_id chunk_size_feed_forward cls_token_id
    decoder_start_token_id directionality diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size
    eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label initializer_factor initializer_range is_llama_config keys_to_ignore_at_inference
    label2id language length_penalty mask_token_id max_length min_length model_type n_ctx n_special no_repeat_ngram_size
    num_beam_groups num_beams num_labels num_return_sequences output_attentions output_hidden_states output_past
    output_scores pad_token_id pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
    pooler_type predict_special_tokens prefix pretraining_tp remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sentence_transformers sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_last_hidden_states tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905
)
# Keys of any model that are supported only with these values, which mostly disable a feature.
ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "per_layer_config": (None, {}),
    "problem_type": (None, "single_label_classification"),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
}
_MISSING = object()


class Keys:
    """The keys of a config.json, and in `left` those that are still to be taken.

    The keys in `NEED_NOT_BE_TAKEN` and `ignore` need not be taken, and are never in `left`. `default` holds
    transformers' defaults for missing keys. `ignore` names keys that, as the user says, do not affect the outputs.
    """

    def __init__(
        self, path: Path, hf_config: Mapping[str, Any], default: Mapping[str, Any], ignore: Collection[str] = ()
    ) -> None:
        self.path = path
        self.hf_config = hf_config
        self.default = default
        self.ignore = ignore
        self.left = set(hf_config) - NEED_NOT_BE_TAKEN - set(ignore)

    def refusal(self, key: str, why: str) -> HubError:
        """Returns the error for a key whose value is not supported."""
        value = self.hf_config.get(key, self.default.get(key))
        return HubError(f"{self.path}: {quote(key, marks=False)} = {quote(value)}: {why}")

    def take(self, key: str, otherwise: Any = _MISSING) -> Any:
        """Returns the value of a key, and marks the key as taken.

        A missing key has transformers' default, or else the value `otherwise`.
        """
        self.left.discard(key)
        value = self.hf_config.get(key, self.default.get(key, otherwise))
        if value is _MISSING:
            raise HubError(f"{self.path} has no {quote(key)}, which says how the model is built")
        return value

    def size(self, key: str, limit: str, otherwise: Any = _MISSING) -> int:
        """Returns the value of a key, which must be an integer from 1 to SIZE_LIMITS[limit].

        `otherwise` is used if the value is null, or if the key is missing and not in `default`.
        """
        value = self.take(key, otherwise)
        if value is None and otherwise is not _MISSING:
            value = otherwise
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= SIZE_LIMITS[limit]:
            raise self.refusal(key, f"expected a whole number from 1 to {SIZE_LIMITS[limit]}")
        return value

    def number(self, key: str, otherwise: Any = _MISSING) -> float:
        """Returns the value of a key, which must be a finite number ≥ 0, such as a dropout or an epsilon."""
        value = self.take(key, otherwise)
        if not fits(value, float) or not 0 <= value < float("inf"):
            raise self.refusal(key, "expected a number of zero or more")
        return float(value)

    def flag(self, key: str, otherwise: Any = _MISSING) -> bool:
        """Returns the value of a key, which must be true or false."""
        value = self.take(key, otherwise)
        if not isinstance(value, bool):
            raise self.refusal(key, "expected true or false")
        return value

    def name(self, key: str, known: Mapping[str, str]) -> str:
        """Returns regard's name for a key's string; `known` maps transformers' names to regard's.

        Raises an error for a string that is not in `known`.
        """
        value = self.take(key)
        if not isinstance(value, str) or value not in known:
            raise self.refusal(key, f"regard's models have {', '.join(known)} there")
        return known[value]

    def require(self, key: str, *allowed: Any) -> None:
        """Raises an error if a key has a value that is not among `allowed`, the only ones that regard's models support.

        A key in `ignore` may have any value. A missing key has transformers' default; without a default it is allowed.
        """
        if key not in self.ignore and self.take(key, allowed[0]) not in allowed:
            raise self.refusal(key, f"regard's models can only hold {allowed[0]!r} there")

    def finish(self) -> None:
        """Raises an error if a key has a value outside `ALLOWED_VALUES`, or if a key that is not null was not taken."""
        for key, allowed in ALLOWED_VALUES.items():
            self.require(key, *allowed)
        left = sorted(key for key in self.left if self.hf_config[key] is not None)
        if left:
            raise self.refusal(
                left[0],
                f"regard does not know what this key of a {quote(self.hf_config.get('model_type'))} changes, so it "
                f"will not leave it out unasked{_more(left)}. Where it changes nothing: "
                f"hub.load(…, ignore={quote(left)})",
            )


def _more(left: list[str]) -> str:
    """Returns " (nor key2, key3, …)", up to five more keys that were not taken; "" if there is only one such key."""
    return f" (nor {quote(', '.join(left[1:6]), marks=False)})" if len(left) > 1 else ""
