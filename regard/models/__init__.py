"""Models over any mechanism: decoder-only, encoder, encoder-decoder; their configs, folders and summaries."""

from regard.config import ConfigError
from regard.data.batch import IGNORE
from regard.models.base import Model
from regard.models.config import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    GPTConfig,
    Seq2SeqConfig,
    StackConfig,
)
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.folder import ModelFolderError, load, save
from regard.models.gpt import GPT
from regard.models.losses import head_loss, token_loss
from regard.models.seq2seq import Seq2Seq
from regard.models.stack import Stack, StackState
from regard.models.summary import Summary, summarize

__all__ = [
    "GPT",
    "IGNORE",
    "AttentionConfig",
    "BlockConfig",
    "ConfigError",
    "Decoder",
    "Encoder",
    "EncoderConfig",
    "GPTConfig",
    "Model",
    "ModelFolderError",
    "Seq2Seq",
    "Seq2SeqConfig",
    "Stack",
    "StackConfig",
    "StackState",
    "Summary",
    "head_loss",
    "load",
    "save",
    "summarize",
    "token_loss",
]
