"""Families of Hugging Face models that regard's models hold exactly."""

from regard.hub.families.base import Family, Part
from regard.hub.families.bert import Bert, Roberta, XLMRoberta
from regard.hub.families.gpt2 import GPT2
from regard.hub.families.llama import Llama, Mistral, Qwen2, Qwen3

_ALL: tuple[Family, ...] = (GPT2(), Llama(), Mistral(), Qwen2(), Qwen3(), Bert(), Roberta(), XLMRoberta())
FAMILIES = {family.model_type: family for family in _ALL}

__all__ = ["FAMILIES", "Family", "Part"]
