"""The meanings of all keys of recipes, in a few words, by section."""

from __future__ import annotations

OF_MODEL = {
    "class": "GPT, Encoder, Seq2Seq or Classifier",
    "preset": "sizes by name, e.g. nano, char or gpt2; other keys change them",
}

_SPLIT = {
    "train": "file to learn from; none: generated data",
    "dev": "file to evaluate on while training",
    "test": "file that is looked at once, at the end",
}
_PEOPLE = {
    "people": "people who are written about",
    "places": "places to be born in",
    "variety": "share of names of another form",
    "seed": "draws the data that are generated",
}

MEANINGS: dict[str, dict[str, str]] = {
    # data
    "LMData": {
        "text": "a UTF-8 text to learn from",
        "tokens": "instead of a text: a folder that `regard data tokens` made",
        "tokenizer": "how a text is divided: characters, bytes or bpe",
        "vocabulary": "the size of a BPE",
        "block": "the window in tokens",
        "share": "the part to train on; the rest is dev",
    },
    "HeadsData": {
        "seeds": "trainings of each, with seeds from train.seed on",
        "positions": "kinds of positions to compare",
        "merges": "ways of merging heads to compare",
        "sentences": "sentences that are measured on their own",
    },
    "RecallData": {
        "vocabulary": "tokens, half of them keys and half values",
        "train": "sizes to learn from: length, pairs, examples",
        "test": "sizes to be tested on at the end",
        "dev": "examples of each size by which the best checkpoint is chosen",
        "empty": "what stands where no query does: zeros or random tokens",
    },
    "RepeatsData": {
        "again": "share of rows that say a stretch of the text again",
        "random": "share of rows that repeat random tokens",
        "first": "so many steps begin with random tokens alone",
    },
    "KnowledgeData": {
        "documents": "file of documents, one a line; none: an invented world",
        "train": "file of questions and answers to learn from",
        "dev": "file of questions to evaluate on while training",
        "test": "file of questions that are asked at the end",
        "block": "the window in characters",
        "cut": "share of documents that are cut to a random length",
        "spans": "least and greatest share of a document that is masked",
        "words": "whether what is masked is widened to whole words",
        "mix": "documents read along for each question that is learned",
    },
    "WorldConfig": _PEOPLE
    | {
        "biographies": "biographies of each person",
        "sentences": "sentences of a biography, at most 6",
        "permuted": "whether the order of facts varies",
        "full_names": "whether each sentence has the full name",
        "told": "share of biographies that say the birthplace",
        "celebrities": "share of people with more biographies",
        "fame": "how many times as many those have",
        "skew": "exponent of the places' shares; 0: all alike",
        "asked": "people with a training question; none: half",
        "held_out": "people with a dev question, and as many with a test question",
        "unwritten": "people never written about, as a share of those who are",
    },
    "SummarizeData": _SPLIT
    | {
        "article": "key or column of the article",
        "summary": "key or column of the summary",
        "held_out": "share cut off from train for dev, and for test, without files",
        "tokenizer": "bpe, bytes or characters",
        "tokenizer_file": "a tokenizer that exists already",
        "vocabulary": "the size of a BPE",
        "source": "tokens after which an article is cut",
        "target": "tokens after which a summary is cut",
        "copies": "share of training rows that copy a passage of the article",
    },
    "NoticesConfig": _PEOPLE
    | {
        "held_out": "people held out for dev, and as many for test",
        "told": "share of articles that say the birthplace",
    },
    "SentimentData": _SPLIT
    | {
        "held_out": "share cut off from train for dev, and for test, without files",
        "length": "tokens after which a text is cut, special ones counted",
        "padding": "rows are as long as the longest of their batch, or as length",
        "truncation": "whether longer texts are cut; else they are an error",
        "workers": "threads that make the batches of the coming steps",
        "shuffle": "whether sentences come in random order",
    },
    "ReviewsConfig": {
        "sentences": "generated sentences to learn from",
        "held_out": "sentences held out for dev, and as many for test",
        "unseen": "share of adjectives that occur only there",
        "seed": "draws the sentences",
    },
    # model
    "StackConfig": {
        "width": "numbers that stand for a token",
        "layers": "blocks on top of each other",
        "length": "the most tokens that it reads; the data may decide it",
        "mechanism": "the attention, by name, or one name for each layer",
        "options": "options of the mechanism, e.g. {features = 256}",
        "position": "learned, sinusoidal, rotary, alibi or none",
        "position_options": "options of the position",
        "dropout": "dropout of embeddings and of what each block adds",
        "checkpoint": "compute blocks again on the way back: less memory, more time",
    },
    "GPTConfig": {
        "vocabulary": "different tokens; the data decide it",
        "tied": "whether the output layer is the embedding",
    },
    "EncoderConfig": {
        "vocabulary": "different tokens; the data decide it",
        "tied": "whether the output layer is the embedding",
        "token_types": "kinds of segments; 0: no such embedding",
        "head": "none (vectors), masked (a word at each place) or classes",
        "classes": "classes of a text",
    },
    "Seq2SeqConfig": {
        "vocabulary": "different tokens; the data decide it",
        "target_vocabulary": "different tokens to write; none: the same",
        "shared": "whether both sides have one embedding",
        "tied": "whether the output layer is the embedding",
        "start": "the token that every target begins with",
        "cross": "the mechanism by which the decoder reads the encoder",
        "cross_options": "options of that mechanism",
    },
    "AttentionConfig": {
        "heads": "query heads",
        "groups": "key/value heads; none: as many as heads",
        "key_heads": "heads of queries and keys where values have more, each with a memory; none: as many",
        "key_width": "width of a head's keys; none: width / heads",
        "value_width": "width of a head's values; none: as its keys",
        "merge": "concatenate, shuffle, shift, reweight or reweight-sequence",
        "merge_options": "options of the merge",
        "window": "tokens that each token sees, itself included; none: all",
        "bias": "whether queries, keys and values have one; none: as block.bias",
        "out_bias": "whether the output has one; none: as block.bias",
        "qk_norm": "whether each head's queries and keys are normalised, or the norm's name",
        "positions": "whether rotary positions and ALiBi hold in these layers",
        "decay": "how decays are made where a mechanism takes them: softplus, logsigmoid, constant or step",
        "decay_options": "options of the decay, e.g. {most = 0.1} for step",
        "by_mechanism": "what is different in layers with a mechanism, by its name",
        "dropout": "dropout of the attention weights",
    },
    "ConvolutionConfig": {
        "width": "tokens that a short convolution over queries, keys and values sees; 0: none",
        "activation": "what follows the convolution, e.g. silu",
        "bias": "whether the convolution has one",
    },
    "OutputConfig": {
        "norm": "whether each head's output is normalised, or the norm's name",
        "gate": "activation of a gate on each head's output; none: no gate",
        "joint": "whether the gate comes first and the norm is one over all heads",
        "skip": "whether a head's values are added to its output, times a learned number",
    },
    "BlockConfig": {
        "norm": "layer, rms or rms_zero_centred",
        "before": "whether norms stand before attention and MLP; else after",
        "eps": "what a norm adds to the variance",
        "final_norm": "whether a norm ends the stack; none: where norms come before",
        "embedding_norm": "whether embeddings are normalised",
        "mlp": "gelu, gelu_tanh, relu or swiglu",
        "hidden": "width inside the MLP; none: its own rule",
        "bias": "whether layers have biases",
    },
    "ClassifierConfig": {
        "name": "the encoder: a folder, a run or an id on the hub; none: the default",
        "download": "whether an id on the hub may be downloaded",
    },
    # train
    "TrainConfig": {
        "epochs": "how long, in passes over the data",
        "steps": "how long, in steps; wins over epochs",
        "batch": "rows of a step",
        "micro": "rows computed at a time; 0: all",
        "lr": "the highest learning rate",
        "clip": "the largest norm of the gradient; 0: any",
        "smoothing": "share of a target's probability spread over all tokens",
        "average": "decay of the average of weights that is measured and saved; 0: none",
        "precision": "auto, float32, bfloat16 or float16",
        "compile": "auto, off, graph, inductor or both",
        "deterministic": "the same bits each time on a GPU too",
        "shard": "whether several processes share the weights",
        "seed": "decides weights, batches and dropout",
        "init": "a run or model folder to start from",
    },
    "OptimizerConfig": {
        "name": "any of torch.optim, e.g. adamw, adam or sgd; or muon",
        "decay": "weight decay of the matrices of layers",
        "options": "what else it takes, e.g. {betas = [0.9, 0.98]}",
    },
    "ScheduleConfig": {
        "name": "cosine, linear, constant, root, trapezoid or noam",
        "warmup": "steps of linear rise; below 1: a share of all",
        "floor": "where it ends, in parts of the highest rate",
    },
    "EvaluationConfig": {
        "every": "steps between evaluations; below 1: a share of all",
        "metric": "what the best checkpoint is chosen by; none: the task's own",
        "patience": "stop after so many evaluations without a better one; 0: never",
        "target": "stop where the metric has reached this; 0: never",
    },
    "SavingConfig": {
        "every": "steps between checkpoints; below 1: a share of all",
        "keep": "so many of the latest stay, and the best; 0: none at the end",
        "log": "where metrics go besides: tensorboard, trackio or wandb",
    },
}
