"""Small random models of transformers, and tokenizers for them."""

import pytest
import torch

from regard.data.reviews import ReviewsConfig, reviews

BASE = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
GROUPED = BASE | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
BART = {
    **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 4))},
    **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 61, "d_model": 24, "max_position_embeddings": 64},
    **{"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2},
    "forced_eos_token_id": None,
}
T5 = {
    **{"vocab_size": 61, "d_model": 24, "d_kv": 6, "num_heads": 4, "num_layers": 2, "d_ff": 32},
    **{"decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10},
}
GPT2 = {"vocab_size": 61, "n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 4}
GPT2 |= {"bos_token_id": None, "eos_token_id": None}
VIT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "bert": ("BertForMaskedLM", "BertConfig", BASE),
    "roberta": ("RobertaModel", "RobertaConfig", BASE),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 5}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        GROUPED | {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 8}),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        BASE
        | {"global_attn_every_n_layers": 2, "local_attention": 8, "pad_token_id": 0, "bos_token_id": 2}
        | {"eos_token_id": 2, "cls_token_id": 2, "sep_token_id": 3},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        GROUPED | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6},
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART),
    "vit": ("ViTModel", "ViTConfig", VIT | {"image_size": 32, "patch_size": 8}),
}


def stirred(model, size=0.3):
    """Returns the model for evaluation, with weights drawn anew, large enough that every part matters."""
    torch.manual_seed(1)
    for p in model.parameters():
        p.data = torch.randn_like(p) * size
    return model.eval()


def words(special=("[PAD]", "[MASK]", "[CLS]"), pairs=False):
    """A tokenizer of 61 words, the first of them special; with `pairs` it joins two texts as BERT's does.

    It then needs "[SEP]" among the special tokens.
    """
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    names = [*special, *(f"w{n}" for n in range(61 - len(special)))]
    made = Tokenizer(WordLevel({name: n for n, name in enumerate(names)}, unk_token=names[-1]))
    made.pre_tokenizer = Whitespace()
    roles = {"pad_token": "[PAD]", "mask_token": "[MASK]", "cls_token": "[CLS]", "unk_token": names[-1]}
    if pairs:
        made.post_processor = TemplateProcessing(
            "[CLS] $A [SEP]",
            "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            [("[CLS]", special.index("[CLS]")), ("[SEP]", special.index("[SEP]"))],
        )
        roles["sep_token"] = "[SEP]"
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **roles)


def tiny(folder, cls="RobertaForSequenceClassification", **changes):
    """A random RoBERTa, or another, with a tokenizer of words, as transformers saves them."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    made = reviews(ReviewsConfig(sentences=400))
    words.train_from_iterator((s.text for s in made.train), trainers.WordLevelTrainer(special_tokens=special))
    words.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)
    kind = getattr(transformers, cls)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 50, "pad_token_id": 1} | changes
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes))
    log = transformers.utils.logging
    log.disable_progress_bar()
    model.save_pretrained(folder)
    log.enable_progress_bar()
    tokenizer.save_pretrained(folder)
    return folder
