"""What the command line says about a MODEL."""

HELP = (
    "A run, a model folder, a Hugging Face folder or name, a GGUF file; small, which comes with regard; minilm, of "
    "regard's extra models; random:MODEL is an untrained twin, as is random:gpt2; random:llama@tiny is a small one."
)
# Where the model has to be of regard's own classes, or becomes so.
OWN_HELP = "A run, a model folder, a Hugging Face folder or name; or small, which comes with regard."
