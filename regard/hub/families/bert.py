"""BERT, RoBERTa and XLM-RoBERTa; MiniLM is a BERT."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

from regard.hub.families.base import (
    ACTIVATION_FROM_HF,
    ACTIVATION_TO_HF,
    Family,
    TensorMap,
    attention_section,
    layer_maps,
    projection_widths,
)
from regard.hub.keys import Keys
from regard.models import Encoder, EncoderConfig


class Bert(Family):
    """BERT: learned positions and token types, post-norm (LayerNorm), biases everywhere.

    `mlm_head` and `classification_head` hold the names of the layers and tensors of its output heads.
    """

    model_type = "bert"
    model = Encoder
    prefix = "bert."
    output_heads: ClassVar[Mapping[str, str]] = {
        "BertModel": "none",
        "BertForMaskedLM": "masked",
        "BertForPreTraining": "masked",
        "BertForSequenceClassification": "classes",
    }
    default: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "classifier_dropout": None,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    ignored_suffixes = (
        "embeddings.position_ids",
        "embeddings.token_type_ids",
        "cls.seq_relationship.weight",
        "cls.seq_relationship.bias",
    )
    zero_bias = True
    mlm_head: ClassVar[Mapping[str, str]] = {
        "dense": "cls.predictions.transform.dense",
        "norm": "cls.predictions.transform.LayerNorm",
        "bias": "cls.predictions.bias",
        "decoder": "cls.predictions.decoder",
    }
    classification_head: ClassVar[tuple[str, str]] = ("pooler.dense", "classifier")

    def read(self, keys: Keys, head: str) -> EncoderConfig:
        width = keys.size("hidden_size", "width")
        heads = keys.size("num_attention_heads", "heads")
        if width % heads:
            raise keys.refusal("num_attention_heads", f"hidden_size = {width} does not divide into so many heads")
        keys.require("position_embedding_type", "absolute", None)
        mlp = keys.name("hidden_act", ACTIVATION_FROM_HF)
        dropout = keys.number("hidden_dropout_prob")
        self._check_head(keys, head, mlp)
        classes = self._count_labels(keys)
        if head == "classes":
            keys.require("classifier_dropout", None, dropout)
        else:  # no other head has this dropout, so its value does not matter
            keys.take("classifier_dropout")
            classes = 2  # the default of `EncoderConfig`: the other heads have no classes
        tied = keys.flag("tie_word_embeddings")
        return EncoderConfig(
            vocabulary=keys.size("vocab_size", "vocabulary"),
            tied=tied or head != "masked",
            token_types=keys.size("type_vocab_size", "vocabulary"),
            head=head,
            classes=classes,
            width=width,
            layers=keys.size("num_hidden_layers", "layers"),
            length=self._count_positions(keys),
            dropout=dropout,
        ).but(
            attention={
                **attention_section(heads, heads, width // heads, bias=True, out_bias=True),
                "dropout": keys.number("attention_probs_dropout_prob"),
            },
            block={
                "norm": "layer",
                "before": False,  # post-norm
                "final_norm": False,
                "embedding_norm": True,
                "eps": keys.number("layer_norm_eps"),
                "mlp": mlp,
                "hidden": keys.size("intermediate_size", "hidden"),
                "bias": True,
            },
        )

    def _count_labels(self, keys: Keys) -> int:
        """Returns the number of labels: the length of id2label, or else num_labels."""
        labels = keys.hf_config.get("id2label")
        if isinstance(labels, Mapping):
            return len(labels)
        return keys.size("num_labels", "classes", 2)

    def _check_head(self, keys: Keys, head: str, mlp: str) -> None:
        """Refuses an MLM head whose activation is not gelu."""
        if head == "masked" and mlp != "gelu":
            raise keys.refusal(
                "hidden_act", "BERT's MLM head also uses hidden_act, and regard's MLM head has only gelu"
            )

    def _count_positions(self, keys: Keys) -> int:
        """Returns the number of positions."""
        return keys.size("max_position_embeddings", "length")

    def _skipped_rows(self, hf_config: Mapping[str, Any]) -> int:
        """Returns the number of rows of the position embedding before that of the first position."""
        return 0

    def write(self, config: EncoderConfig) -> dict[str, Any]:
        hf_config: dict[str, Any] = {
            "vocab_size": config.vocabulary,
            "hidden_size": config.width,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.attention.heads,
            "intermediate_size": config.block.hidden,
            "hidden_act": ACTIVATION_TO_HF.get(config.block.mlp, "gelu"),
            "hidden_dropout_prob": config.dropout,
            "attention_probs_dropout_prob": config.attention.dropout,
            "max_position_embeddings": config.length,
            "type_vocab_size": config.token_types,
            "layer_norm_eps": config.block.eps,
            "tie_word_embeddings": config.tied,
        }
        if config.head == "classes":
            labels = [f"LABEL_{n}" for n in range(config.classes)]
            hf_config["id2label"] = dict(enumerate(labels))
            hf_config["label2id"] = {name: n for n, name in enumerate(labels)}
        return hf_config

    def tensor_maps(self, config: EncoderConfig, hf_config: Mapping[str, Any]) -> Iterator[TensorMap]:
        yield TensorMap("embedding.weight", ("embeddings.word_embeddings.weight",))
        yield TensorMap("types.weight", ("embeddings.token_type_embeddings.weight",), zeros=True)
        positions = "embeddings.position_embeddings.weight"
        yield TensorMap("stack.positions.table.weight", (positions,), skip=self._skipped_rows(hf_config))
        yield from layer_maps("stack.embedding_norm", "embeddings.LayerNorm", "weight", "bias")
        for n in range(config.layers):
            ours = f"stack.blocks.{n}"
            theirs = f"encoder.layer.{n}"
            for kind in ("weight", "bias"):
                names = tuple(f"{theirs}.attention.self.{x}.{kind}" for x in ("query", "key", "value"))
                yield TensorMap(
                    f"{ours}.attention.project.{kind}", names, projection_widths(config), zeros=kind == "bias"
                )
            for our_layer, their_layer in {
                "attention.out": "attention.output.dense",
                "attention_norm": "attention.output.LayerNorm",
                "mlp.into": "intermediate.dense",
                "mlp.out": "output.dense",
                "mlp_norm": "output.LayerNorm",
            }.items():
                yield from layer_maps(f"{ours}.{our_layer}", f"{theirs}.{their_layer}", "weight", "bias")
        if config.head == "masked":
            for name in ("dense", "norm"):
                yield from layer_maps(f"head.{name}", self.mlm_head[name], "weight", "bias")
            if config.tied:
                yield TensorMap("head.offset", (self.mlm_head["bias"],))
            else:  # untied, transformers uses decoder.bias, not predictions.bias
                yield TensorMap("head.offset", (f"{self.mlm_head['decoder']}.bias",))
                yield TensorMap("head.table.weight", (f"{self.mlm_head['decoder']}.weight",))
        if config.head == "classes":
            for name, theirs in zip(("dense", "classes"), self.classification_head, strict=True):
                yield from layer_maps(f"head.{name}", theirs, "weight", "bias")

    # Tied: files often hold the embedding and predictions.bias a second time, as decoder.weight and decoder.bias.
    # Untied: transformers uses decoder.bias, and files also hold predictions.bias, which is not used.
    def copies(self, config: EncoderConfig) -> dict[str, str]:
        decoder = self.mlm_head["decoder"]
        bias = self.mlm_head["bias"]
        if config.head != "masked":
            return {}
        if not config.tied:
            return {bias: f"{decoder}.bias"}
        return {f"{decoder}.weight": "embeddings.word_embeddings.weight", f"{decoder}.bias": bias}

    def guess_output_head(self, names: Collection[str]) -> str:
        if self.mlm_head["bias"] in names:
            return "masked"
        return "classes" if f"{self.classification_head[1]}.weight" in names else "none"


class Roberta(Bert):
    """RoBERTa: a BERT whose first position is row pad_token_id + 1 of the position embedding."""

    model_type = "roberta"
    prefix = "roberta."
    output_heads: ClassVar[Mapping[str, str]] = {
        "RobertaModel": "none",
        "RobertaForMaskedLM": "masked",
        "RobertaForSequenceClassification": "classes",
    }
    default: ClassVar[Mapping[str, Any]] = {**Bert.default, "pad_token_id": 1}
    mlm_head: ClassVar[Mapping[str, str]] = {
        "dense": "lm_head.dense",
        "norm": "lm_head.layer_norm",
        "bias": "lm_head.bias",
        "decoder": "lm_head.decoder",
    }
    classification_head: ClassVar[tuple[str, str]] = ("classifier.dense", "classifier.out_proj")

    def _check_head(self, keys: Keys, head: str, mlp: str) -> None:
        """Refuses nothing: RoBERTa's MLM head has gelu, whatever activation the MLPs have."""

    def _count_positions(self, keys: Keys) -> int:
        rows = keys.size("max_position_embeddings", "length")
        skipped = self._skipped_rows(keys.hf_config)
        if not 1 <= skipped < rows:
            raise keys.refusal("pad_token_id", f"positions are counted from the one after it; expected 0 to {rows - 2}")
        return rows - skipped

    def _skipped_rows(self, hf_config: Mapping[str, Any]) -> int:
        pad = hf_config.get("pad_token_id", self.default["pad_token_id"])
        # `_count_positions` refuses −1, and so a config without a valid pad_token_id.
        return pad + 1 if isinstance(pad, int) else -1

    def write(self, config: EncoderConfig) -> dict[str, Any]:
        return {**super().write(config), "max_position_embeddings": config.length + 2, "pad_token_id": 1}


class XLMRoberta(Roberta):
    """XLM-RoBERTa: a RoBERTa under another name."""

    model_type = "xlm-roberta"
    output_heads: ClassVar[Mapping[str, str]] = {f"XLM{name}": head for name, head in Roberta.output_heads.items()}
