"""BERT, RoBERTa and XLM-RoBERTa; MiniLM is a BERT."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

from regard.hub.families.base import ACTIVATIONS, GELU, Family, Part, attention_section, projection_widths, projections
from regard.hub.keys import Keys
from regard.models import Encoder, EncoderConfig


class Bert(Family):
    """BERT: learned positions and token types, layer norms after, everything biased."""

    model_type = "bert"
    model = Encoder
    prefix = "bert."
    heads: ClassVar[Mapping[str, str]] = {
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
    spare = (
        "embeddings.position_ids",
        "embeddings.token_type_ids",
        "cls.seq_relationship.weight",
        "cls.seq_relationship.bias",
    )
    zero_bias = True
    words: ClassVar[Mapping[str, str]] = {
        "dense": "cls.predictions.transform.dense",
        "norm": "cls.predictions.transform.LayerNorm",
        "offset": "cls.predictions.bias",
        "table": "cls.predictions.decoder",
    }
    classes: ClassVar[tuple[str, str]] = ("pooler.dense", "classifier")

    def read(self, keys: Keys, head: str) -> EncoderConfig:
        width = keys.size("hidden_size", "width")
        heads = keys.size("num_attention_heads", "heads")
        if width % heads:
            raise keys.refuse("num_attention_heads", f"hidden_size = {width} does not divide into so many heads")
        keys.must("position_embedding_type", "absolute", None)
        mlp = keys.name("hidden_act", GELU)
        dropout = keys.number("hidden_dropout_prob")
        self._check_head(keys, head, mlp)
        classes = self._classes(keys)
        if head == "classes":
            keys.must("classifier_dropout", None, dropout)
        else:  # whatever it says, no other head has this dropout
            keys.take("classifier_dropout")
            classes = 2
        tied = keys.flag("tie_word_embeddings")
        return EncoderConfig(
            vocabulary=keys.size("vocab_size", "vocabulary"),
            tied=tied or head != "masked",
            token_types=keys.size("type_vocab_size", "vocabulary"),
            head=head,
            classes=classes,
            width=width,
            layers=keys.size("num_hidden_layers", "layers"),
            length=self._length(keys),
            dropout=dropout,
        ).but(
            attention={
                **attention_section(heads, heads, width // heads, bias=True, out_bias=True),
                "dropout": keys.number("attention_probs_dropout_prob"),
            },
            block={
                "norm": "layer",
                "before": False,
                "final_norm": False,
                "embedding_norm": True,
                "eps": keys.number("layer_norm_eps"),
                "mlp": mlp,
                "hidden": keys.size("intermediate_size", "hidden"),
                "bias": True,
            },
        )

    def _classes(self, keys: Keys) -> int:
        """Returns the number of classes: that of their names, or else num_labels."""
        labels = keys.document.get("id2label")
        if isinstance(labels, Mapping):
            return len(labels)
        return keys.size("num_labels", "classes", 2)

    def _check_head(self, keys: Keys, head: str, mlp: str) -> None:
        """Refuses a head for masked words with another activation than ours."""
        if head == "masked" and mlp != "gelu":
            raise keys.refuse("hidden_act", "regard's head for masked words has gelu, and BERT's has this one too")

    def _length(self, keys: Keys) -> int:
        """Returns the number of positions."""
        return keys.size("max_position_embeddings", "length")

    def _skipped(self, document: Mapping[str, Any]) -> int:
        """Returns the number of rows in the table of positions before the first position."""
        return 0

    def write(self, config: EncoderConfig) -> dict[str, Any]:
        document: dict[str, Any] = {
            "vocab_size": config.vocabulary,
            "hidden_size": config.width,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.attention.heads,
            "intermediate_size": config.block.hidden,
            "hidden_act": ACTIVATIONS.get(config.block.mlp, "gelu"),
            "hidden_dropout_prob": config.dropout,
            "attention_probs_dropout_prob": config.attention.dropout,
            "max_position_embeddings": config.length,
            "type_vocab_size": config.token_types,
            "layer_norm_eps": config.block.eps,
            "tie_word_embeddings": config.tied,
        }
        if config.head == "classes":
            labels = [f"LABEL_{n}" for n in range(config.classes)]
            document["id2label"] = dict(enumerate(labels))
            document["label2id"] = {name: n for n, name in enumerate(labels)}
        return document

    def parts(self, config: EncoderConfig, document: Mapping[str, Any]) -> Iterator[Part]:
        yield Part("embedding.weight", ("embeddings.word_embeddings.weight",))
        yield Part("types.weight", ("embeddings.token_type_embeddings.weight",), zeros=True)
        place = "embeddings.position_embeddings.weight"
        yield Part("stack.positions.table.weight", (place,), skip=self._skipped(document))
        yield from projections("stack.embedding_norm", "embeddings.LayerNorm", "weight", "bias")
        for n in range(config.layers):
            ours = f"stack.blocks.{n}"
            theirs = f"encoder.layer.{n}"
            for kind in ("weight", "bias"):
                names = tuple(f"{theirs}.attention.self.{x}.{kind}" for x in ("query", "key", "value"))
                yield Part(f"{ours}.attention.project.{kind}", names, projection_widths(config), zeros=kind == "bias")
            for mine, other in {
                "attention.out": "attention.output.dense",
                "attention_norm": "attention.output.LayerNorm",
                "mlp.into": "intermediate.dense",
                "mlp.out": "output.dense",
                "mlp_norm": "output.LayerNorm",
            }.items():
                yield from projections(f"{ours}.{mine}", f"{theirs}.{other}", "weight", "bias")
        if config.head == "masked":
            for name in ("dense", "norm"):
                yield from projections(f"head.{name}", self.words[name], "weight", "bias")
            if config.tied:
                yield Part("head.offset", (self.words["offset"],))
            else:  # without tying, transformers adds the bias of the decoder and not the other
                yield Part("head.offset", (f"{self.words['table']}.bias",))
                yield Part("head.table.weight", (f"{self.words['table']}.weight",))
        if config.head == "classes":
            for name, theirs in zip(("dense", "classes"), self.classes, strict=True):
                yield from projections(f"head.{name}", theirs, "weight", "bias")

    # Files often hold the tied table and its bias twice, once as part of the head.
    def copies(self, config: EncoderConfig) -> dict[str, str]:
        table = self.words["table"]
        offset = self.words["offset"]
        if config.head != "masked":
            return {}
        if not config.tied:
            return {offset: f"{table}.bias"}
        return {f"{table}.weight": "embeddings.word_embeddings.weight", f"{table}.bias": offset}

    def head(self, names: Collection[str]) -> str:
        if self.words["offset"] in names:
            return "masked"
        return "classes" if f"{self.classes[1]}.weight" in names else "none"


class Roberta(Bert):
    """RoBERTa: a BERT whose positions are counted from pad_token_id + 1 on."""

    model_type = "roberta"
    prefix = "roberta."
    heads: ClassVar[Mapping[str, str]] = {
        "RobertaModel": "none",
        "RobertaForMaskedLM": "masked",
        "RobertaForSequenceClassification": "classes",
    }
    default: ClassVar[Mapping[str, Any]] = {**Bert.default, "pad_token_id": 1}
    words: ClassVar[Mapping[str, str]] = {
        "dense": "lm_head.dense",
        "norm": "lm_head.layer_norm",
        "offset": "lm_head.bias",
        "table": "lm_head.decoder",
    }
    classes: ClassVar[tuple[str, str]] = ("classifier.dense", "classifier.out_proj")

    def _check_head(self, keys: Keys, head: str, mlp: str) -> None:
        """Refuses nothing: the head for masked words has gelu, whatever the MLPs have."""

    def _length(self, keys: Keys) -> int:
        rows = keys.size("max_position_embeddings", "length")
        skipped = self._skipped(keys.document)
        if not 1 <= skipped < rows:
            raise keys.refuse("pad_token_id", f"positions are counted from the one after it; expected 0 to {rows - 2}")
        return rows - skipped

    def _skipped(self, document: Mapping[str, Any]) -> int:
        pad = document.get("pad_token_id", self.default["pad_token_id"])
        return pad + 1 if isinstance(pad, int) else -1

    def write(self, config: EncoderConfig) -> dict[str, Any]:
        return {**super().write(config), "max_position_embeddings": config.length + 2, "pad_token_id": 1}


class XLMRoberta(Roberta):
    """XLM-RoBERTa: a RoBERTa under another name."""

    model_type = "xlm-roberta"
    heads: ClassVar[Mapping[str, str]] = {f"XLM{name}": head for name, head in Roberta.heads.items()}
