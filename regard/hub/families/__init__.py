"""The families of Hugging Face models whose weights regard's models hold exactly, by their `model_type`."""

from regard.errors import HubError
from regard.hub.families.base import Family, Part, head_of
from regard.hub.families.bert import Bert, Roberta, XLMRoberta
from regard.hub.families.gpt2 import GPT2
from regard.hub.families.llama import Llama, Mistral, Qwen2, Qwen3
from regard.registry import Registry

FAMILIES: Registry[Family] = Registry("family of Hugging Face models", error=HubError)
# The order matters: a model is exported to the first family that can hold it.
for _family in (GPT2(), Llama(), Mistral(), Qwen2(), Qwen3(), Bert(), Roberta(), XLMRoberta()):
    FAMILIES.put(_family.model_type, _family)

__all__ = ["FAMILIES", "Family", "Part", "head_of"]
