"""The families of Hugging Face models that regard's models can reproduce exactly, by their `model_type`."""

from regard.errors import HubError
from regard.hub.families.base import Family, TensorMap, output_head_of
from regard.hub.families.bert import Bert, Roberta, XLMRoberta
from regard.hub.families.gpt2 import GPT2
from regard.hub.families.llama import Llama, Mistral, Qwen2, Qwen3
from regard.hub.families.mamba2 import Mamba2
from regard.hub.families.qwen3_next import Qwen3Next
from regard.registry import Registry

FAMILIES: Registry[Family] = Registry("family of Hugging Face models", error=HubError)
# The order matters: a model is exported as the first family that can represent it.
for _family in (GPT2(), Llama(), Mistral(), Qwen2(), Qwen3(), Qwen3Next(), Mamba2(), Bert(), Roberta(), XLMRoberta()):
    FAMILIES.put(_family.model_type, _family)

__all__ = ["FAMILIES", "Family", "TensorMap", "output_head_of"]
