"""Help texts for the argument MODEL."""

HELP = (
    "A run, a model folder, a Hugging Face folder or name, a GGUF file; small, which comes with regard; minilm, of "
    "regard's extra models; random:gpt2 is gpt2 with random weights, random:llama@tiny a tiny one."
)
# For commands that need a model of regard's own classes, or convert it into one.
OWN_HELP = "A run, a model folder, a Hugging Face folder or name; or small, which comes with regard."
