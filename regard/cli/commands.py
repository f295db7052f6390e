"""All commands: group, summary, and two examples of each. The module of a command is imported when it is used.

So `regard --help` and the completion of a shell know all commands without importing PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

PACKAGE = "regard.cli"
CHECK = "Check"
TRAIN = "Train"
USE = "Use a model"
SEE = "See"
COUNT = "Race and count"
OTHER = "Data and machine"
GROUPS = (TRAIN, USE, CHECK, SEE, COUNT, OTHER)


@dataclass(frozen=True)
class Entry:
    """The entry of a command in the list of commands.

    `says` is one sentence that fits a line of 80 columns. `place` is its module and function, unless both are called
    as the command is. `plugins`: --plugin FILE imports a file first, so that the mechanisms in it can be named.
    """

    group: str
    says: str
    examples: tuple[str, str]
    place: str = ""
    plugins: bool = True


COMMANDS: dict[str, Entry] = {
    "run": Entry(
        TRAIN,
        "Run a whole experiment: trainings, evaluation, and a report.",
        ("regard run two-heads", "regard run knowledge data.world.people=100 --out runs/mine"),
        "train:run",
    ),
    "train": Entry(
        TRAIN,
        "Train one model by a recipe.",
        ("regard train lm data.text=FILE train.lr=3e-4", "regard train --resume RUN"),
        "train:train",
    ),
    "sweep": Entry(
        TRAIN,
        "Train a recipe with many settings: a grid, or a search.",
        (
            "regard sweep lm data.text=FILE --grid train.lr=1e-3,2e-3 model.layers=2,4",
            "regard sweep lm data.text=FILE --trials 20 --search train.lr=1e-4..1e-2:log",
        ),
    ),
    "convert": Entry(
        TRAIN,
        "Give a trained model fewer heads or another mechanism.",
        ("regard convert RUN --kv-heads 1", "regard convert RUN --mechanism performer --layers 2,3"),
    ),
    "runs": Entry(
        TRAIN,
        "List the runs, experiments and measurements in a folder.",
        ("regard runs", "regard runs elsewhere --json"),
        "train:runs",
        plugins=False,
    ),
    "report": Entry(
        TRAIN,
        "Write a page about an experiment, or one that compares runs.",
        ("regard report RUN", "regard report runs/softmax runs/elu --out compared.html"),
        "train:report",
    ),
    "generate": Entry(
        USE,
        "Continue a prompt.",
        (
            'regard generate RUN "ROMEO:" --max 300 --temperature 0.8',
            'regard generate MODEL "Once" --beams 4 --n 2',
        ),
    ),
    "evaluate": Entry(
        USE,
        "Count right answers, or measure how likely a text is.",
        ("regard evaluate RUN --text FILE", "regard evaluate RUN --data questions.tsv"),
    ),
    "predict": Entry(
        USE,
        "Write answers to questions, or labels of sentences.",
        (
            "regard predict RUN --input questions.txt --out answers.txt",
            "regard predict RUN --input sentences.txt --out labels.txt",
        ),
        "evaluate:predict",
    ),
    "summarize": Entry(
        USE,
        "Summarise articles with a trained encoder-decoder.",
        ("regard summarize RUN articles.jsonl", "regard summarize RUN articles.txt --beams 8 --n 3"),
    ),
    "export": Entry(
        USE,
        "Write a model as a folder that transformers can load.",
        ("regard export RUN --to exported", "regard export MODEL --to exported --json"),
    ),
    "eject": Entry(
        USE,
        "Write a model as one file of plain PyTorch.",
        ("regard eject RUN --out ejected", "regard eject gpt2 --out ejected --download"),
    ),
    "check": Entry(
        CHECK,
        "Check attention against its laws: each holds or is broken.",
        ("regard check softmax", "regard check --plugin mine.py --like softmax"),
        plugins=False,
    ),
    "grade": Entry(
        CHECK,
        "Grade students' functions and classes.",
        ("regard grade --list", "regard grade attention submission.py"),
        plugins=False,
    ),
    "mechanisms": Entry(
        CHECK,
        "List the mechanisms, their costs and their kernels.",
        ("regard mechanisms", "regard mechanisms --plugin mine.py --json"),
    ),
    "view": Entry(
        SEE,
        "Write one page that shows what a model attends to.",
        ('regard view gpt2 "The dog ran because it was hungry."', 'regard view RUN "To be, or not" -o page.html'),
    ),
    "serve": Entry(
        SEE,
        "Show a model on a local page: type a text and see attention.",
        ("regard serve", "regard serve RUN --port 0"),
    ),
    "heads": Entry(
        SEE,
        "Find out what each head of a model does.",
        ("regard heads gpt2", "regard heads RUN --json"),
    ),
    "plot": Entry(
        SEE,
        "Draw figures for papers, as PNG, SVG or PDF.",
        ("regard plot masks -o masks.pdf", 'regard plot weights gpt2 "The dog ran" --layer 0'),
        "plot:plot",
    ),
    "bench": Entry(
        COUNT,
        "Time mechanisms on this machine: time and memory by length.",
        ("regard bench --quick", "regard bench softmax --plugin mine.py --tokens 256,1024"),
        plugins=False,
    ),
    "cost": Entry(
        COUNT,
        "Compute what mechanisms and models cost: formulas and numbers.",
        ("regard cost softmax elu --tokens 4096", "regard cost --model gpt2 --device H200"),
    ),
    "design": Entry(
        COUNT,
        "Compute a query, key or head that attends to what you choose.",
        (
            "regard design --keys examples/keys.csv --select 0",
            "regard design --keys examples/keys.csv --average 0,2",
        ),
        plugins=False,
    ),
    "data": Entry(
        OTHER,
        "Show training data, and turn texts into files of tokens.",
        ("regard data show names --n 3", "regard data tokens FILE --out tokens --tokenizer bpe"),
        "data:data",
        plugins=False,
    ),
    "world": Entry(
        OTHER,
        "Generate an invented world of people: texts and questions.",
        ("regard world --out world", "regard world --out world --people 100 --seed 1"),
        "data:world",
        plugins=False,
    ),
    "doctor": Entry(
        OTHER,
        "Check what works on this machine, and what is missing.",
        ("regard doctor", "regard doctor --json"),
        plugins=False,
    ),
}

# Names of commands in other tools.
ALSO_CALLED = {
    "benchmark": "bench",
    "complete": "generate",
    "eval": "evaluate",
    "finetune": "train",
    "fit": "train",
    "flops": "cost",
    "infer": "generate",
    "list": "mechanisms",
    "ls": "runs",
    "race": "bench",
    "sample": "generate",
    "see": "view",
    "show": "view",
    "test": "check",
    "tune": "sweep",
    "verify": "check",
    "visualise": "view",
    "visualize": "view",
}

# Names of options in other tools, each with ours; the first that a command has is suggested.
OPTIONS_ALSO_CALLED = {
    "checkpoint": ("resume",),
    "context": ("tokens",),
    "cuda": ("device",),
    "gpu": ("device",),
    "length": ("tokens",),
    "lengths": ("tokens",),
    "max-length": ("max",),
    "max-new-tokens": ("max",),
    "max-tokens": ("max",),
    "num-beams": ("beams",),
    "num-return-sequences": ("n",),
    "num-samples": ("n",),
    "output": ("out", "output", "to"),
    "output-dir": ("out", "to"),
    "save-dir": ("out", "to"),
    "seq": ("tokens",),
    "seq-len": ("tokens",),
    "seqlen": ("tokens",),
}
