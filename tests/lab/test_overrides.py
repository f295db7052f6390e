"""No override is ignored: each is found in what is trained, or refused; and the command of a report asks for the same.

Nothing is trained here: recipes are resolved, as an experiment resolves them before its first training.
"""

import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from regard.cli.app import app
from regard.config import ConfigError
from regard.data.tokenizers import Bytes
from regard.errors import RegardError
from regard.lab import experiment
from regard.lab.base import EXPERIMENTS, RunOptions, Shown
from regard.lab.experiment import Session, TrainingExperiment, plan_trainings, read_overrides
from regard.lab.recall.run import OWN_KEYS
from regard.lab.sentiment import run as sentiment
from regard.train import recipe
from regard.train.recipe import COMPARE, flatten, load, parse, recipe_names, resolve_model
from regard.train.tasks.summarize import END, START

# Names, of which one is possible where a text is expected.
NAMES = (
    "linear",
    "elu",
    "rms",
    "swiglu",
    "rotary",
    "sgd",
    "bytes",
    "length",
    "float32",
    "off",
    "shift",
    "characters",
    "random",
)
OTHERS = (0.25, 0.5, 2, 3, 4, 7, 64, 128, 1024, True, "x", [0.2, 0.3], [1, 2], ["shift", "concatenate"])
OTHERS += (["rotary", "learned"], ["sgd", "adam"])


def leaves(made):
    """Every key of a resolved recipe, with its value; a table of options has a key of the user's."""
    tables = {
        "data": made.data.as_dict(),
        "model": resolve_model(made.model)[1].as_dict(),
        "train": made.train.as_dict(),
    }
    return {f"{section}.{key}": value for section, table in tables.items() for key, value in keys(table)}


def keys(table, prefix=""):
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def others(value):
    """Values that may stand in place of another."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value + 1, 2 * value, value - 1, *OTHERS)
    if isinstance(value, float):
        return (value / 2, (value + 1) / 2, value + 1, *OTHERS)
    if isinstance(value, str):
        return (*NAMES, *OTHERS)
    if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        return ([{**value[0], "examples": value[0]["examples"] + 1}],)
    return OTHERS


def change(key, value, resolve):
    """An override of a key, and the value that it asks for; None where no other value is possible."""
    if isinstance(value, Mapping):
        owns = ("softmax.window", "gated-delta.convolution.width") if key.endswith(".by_mechanism") else ("own",)
        made = (change(f"{key}.{own}", None, resolve) for own in owns)  # a recipe's layers have one of them
        return next((found for found in made if found is not None), None)
    for other in others(value):
        if other == value:
            continue
        text = f"{key}={experiment.override_words({'_': {'_': other}})[0].partition('=')[2]}"
        try:
            made = resolve(text)
        except ConfigError:
            continue
        if leaves(made).get(key) == other:
            return text, key, other
    return None


@cache
def changes(name, *base):
    """Every key of a recipe with another value that it may have."""
    found = {}
    for key, value in leaves(load(name, base)).items():
        made = change(key, value, lambda text: load(name, [*base, text]))
        if made is not None:
            found[key] = made
    return found


@pytest.mark.parametrize("name", recipe_names())
def test_every_key_of_a_recipe_can_be_changed(name):
    assert set(leaves(load(name))) - set(changes(name)) == set()


# Experiments


@pytest.fixture
def planned(tmp_path, monkeypatch, request):
    """Plans an experiment with overrides: a session, and its trainings by stage and title."""
    tokenizer = tmp_path / "tokenizer.json"
    Bytes((START, END)).save(tokenizer)
    (tmp_path / "prose.txt").write_text("A little text. " * 60)
    base = {
        "knowledge": ["data.world.people=12", "data.world.asked=8", "data.world.held_out=2", "data.world.places=40"],
        "summarize": ["data.notices.people=60", "data.notices.held_out=10", f"data.tokenizer_file={tokenizer}"],
        "sentiment": [],
        "heads": [
            f"data.text={tmp_path / 'prose.txt'}",
            "data.tokenizer=bytes",
            "data.seeds=2",
            "data.sentences.long=So be it.",
        ],
        "recall": [],
    }
    monkeypatch.setattr(sentiment, "Classifier", lambda config: SimpleNamespace(tokenizer=None))
    monkeypatch.setattr(sentiment, "Sentiment", lambda *arguments: SimpleNamespace(rows=640))
    monkeypatch.setattr(sentiment, "_describe_plan", lambda *arguments: "")
    number = iter(range(1 << 20))

    def plan(name, overrides, variant=None, device="cpu", bare=False, out=None):
        words = [*([] if bare else base[name]), *overrides]
        asked = read_overrides(EXPERIMENTS[name], words)
        folder = out or tmp_path / f"{name}-{next(number)}"
        session = Session(name, folder, asked, variant, device, Shown())
        return session, plan_trainings(EXPERIMENTS[name], session).trainings

    plan.base = base
    return plan


def test_what_an_override_of_one_stage_says_is_what_it_trains_with(planned):
    _, trainings = planned("sentiment", ["sgd.train.optimizer.options.momentum=0.0"])
    options = {t.stage: t.recipe.train.optimizer.options for t in trainings}
    assert options == {"adamw": {}, "adagrad": {}, "sgd": {"momentum": 0.0}}


FILES = {name: name for name in ("summarize", "sentiment", "heads", "recall")} | {"knowledge": "knowledge/pretrain"}
STAGES = {
    "knowledge": {"scratch": "knowledge/scratch", "pretrain": "knowledge/pretrain", "finetune": "knowledge/finetune"},
    "summarize": {"softmax": "summarize", "performer": "summarize"},
    "sentiment": {"adamw": "sentiment", "adagrad": "sentiment", "sgd": "sentiment"},
    "heads": {},
    "recall": {},
}
SHARED = {  # keys of data that one stage alone cannot have: all of them read the same
    "knowledge": ("data.documents", "data.train", "data.dev", "data.test", "data.world."),
    "summarize": (
        *("data.train", "data.dev", "data.test", "data.article", "data.summary", "data.held_out"),
        *("data.tokenizer", "data.tokenizer_file", "data.vocabulary", "data.notices."),
    ),
    "sentiment": (),
    "heads": (),
    "recall": (),
}
COMPARED = {  # what the experiment varies, and which key says how
    "knowledge": {},
    "summarize": {},
    "sentiment": {"train.optimizer.name": "compare.optimizers"},
    "heads": {"model.position": "data.positions", "model.attention.merge": "data.merges"},
    "recall": OWN_KEYS,
}
OF_PERFORMER = ("model.encoder.mechanism", "model.decoder.mechanism", "model.cross")
FIRST_FILES = {  # files of one's own need each other, and are read: they have tests of their own
    "knowledge": ("data.documents", "data.train", "data.dev", "data.test"),
    "summarize": ("data.train", "data.dev", "data.test", "data.tokenizer_file"),
    "sentiment": (),
    "heads": ("data.text", "data.tokens"),
    "recall": (),
}


def exempt(name, stage, key):
    """Whether a training does not have what all were asked, because the experiment sets it there, as is documented."""
    if name == "knowledge" and stage == "finetune":  # goes on with the pretrained model, which has it
        return key.startswith("model.") or key == "train.init"
    if name == "summarize" and stage == "performer":
        return key in OF_PERFORMER
    return name in ("heads", "recall") and key == "train.seed"  # the first of the seeds


def test_these_are_all_experiments_that_train():
    assert set(FILES) == {name for name, known in EXPERIMENTS.items() if isinstance(known, TrainingExperiment)}


def is_value(found, value):
    """Whether a setting has a value; of a file, its absolute path."""
    return found == value or (isinstance(value, str) and found == str(Path(value).resolve()))


@pytest.mark.parametrize("name", FILES)
def test_an_override_of_all_stages_is_what_each_trains_with(name, planned, tmp_path):
    missing = []
    for key, (text, changed, value) in changes(FILES[name], *planned.base[name]).items():
        if key in FIRST_FILES[name]:
            continue
        if key in COMPARED[name]:
            with pytest.raises(ConfigError, match=COMPARED[name][key]):
                planned(name, [text])
            continue
        try:
            _, trainings = planned(name, [text], out=None if key.startswith("data.") else tmp_path / "shared")
        except RegardError as error:  # it was not ignored, but does not fit the data, or the other models
            said = key.rpartition(".")[2] if key.endswith(".by_mechanism") else "data."
            assert said in key and said in str(error), (text, error)
            continue
        for training in trainings:
            if not is_value(leaves(training.recipe).get(changed), value) and not exempt(name, training.stage, key):
                missing.append((training.title, text))
    assert missing == []


@pytest.mark.parametrize("name, stage", [(name, stage) for name, stages in STAGES.items() for stage in stages])
def test_an_override_of_one_stage_is_what_that_one_trains_with(name, stage, planned, tmp_path):
    shared = tmp_path / "shared"
    usual = {training.stage: leaves(training.recipe) for training in planned(name, [], out=shared)[1]}
    wrong = []
    for key, (text, changed, value) in changes(STAGES[name][stage], *planned.base[name]).items():
        refused = key.startswith(SHARED[name]) or key in COMPARED[name]
        if refused or (stage == "performer" and key in OF_PERFORMER):
            with pytest.raises(ConfigError, match=f"{stage}.{'.'.join(key.split('.')[:2])}"):
                planned(name, [f"{stage}.{text}"], out=shared)
            continue
        if stage == "performer":  # its layers have this mechanism, and those of the recipe another
            text, changed = (said.replace("by_mechanism.softmax", "by_mechanism.performer") for said in (text, changed))
        _, trainings = planned(name, [f"{stage}.{text}"], out=shared)
        own = [leaves(training.recipe).get(changed) for training in trainings if training.stage == stage]
        if not own or not all(is_value(found, value) for found in own):
            wrong.append(text)
        for training in trainings:  # and no other has it
            found = leaves(training.recipe)
            if (
                training.stage != stage
                and key != "train.lr"
                and found.get(changed) != usual[training.stage].get(changed)
            ):
                wrong.append((training.title, text))
    assert wrong == []


@pytest.mark.parametrize(
    "name, overrides, words",
    [
        ("sentiment", ["train.optimizer=adam"], "train.optimizer: this experiment compares them"),
        ("sentiment", ["compare.rates.adam=1"], "compare.rates.adam: adam is not one of compare.optimizers"),
        ("sentiment", ["compare.rates.sgd=1", "sgd.train.lr=2"], "sgd.train.lr: compare.rates.sgd says it already"),
        ("sentiment", ['compare.optimizers=["adamw"]', "sgd.train.lr=1"], "'sgd': no such stage is trained"),
        ("summarize", ["compare.features=[]", "performer.train.steps=3"], "'performer': no such stage is trained"),
        ("summarize", ["compare.rates=[1]", "train.lr=2"], "train.lr: compare.rates says it already"),
        ("summarize", ["performer.model.encoder.options.features=8"], "say compare.features"),
        ("heads", ["model.attention.merge=shift"], "say which by data.merges"),
        ("knowledge", ["compare.strangers=9"], "compare.strangers: an invented world has strangers of its own"),
        (
            "knowledge",
            ['compare.mechanisms=["elu"]', "model.mechanism=relu"],
            "model.mechanism: compare.mechanisms says",
        ),
        ("knowledge", ['compare.mechanisms=["elu"]', "finetune.model.mechanism=relu"], "finetune.model.mechanism: com"),
        ("knowledge", ['compare.mechanisms=["elu", "elu"]'], "expected none twice"),
        ("knowledge", ["compare.settings.a.trian.lr=1"], "compare.settings.a.trian: no such section.* mean 'train'"),
        ("knowledge", ["compare.settings.a.train.lrate=1"], "no key 'lrate' in train"),
        ("knowledge", ["compare.settings.a=1"], "compare.settings.a = 1: expected changes"),
        ("knowledge", ["compare.settings.a.data.world.people=20"], "all candidates read the same data"),
        ("knowledge", ["compare.settings.a.pretrain.data.dev=x"], "all candidates read the same data; say data.dev"),
        ("knowledge", ["compare.settings.a.train.lr=1", "pretrain.train.lr=2"], "compare.settings.a.train.lr says it"),
        ("knowledge", ["compare.strangrs=1"], "no key 'strangrs' in compare. Did you mean 'strangers'"),
    ],
)
def test_what_cannot_have_an_effect_is_refused(name, overrides, words, planned):
    with pytest.raises(ConfigError, match=words):
        planned(name, overrides)


@pytest.mark.parametrize(
    "name, overrides, words",
    [
        (
            "knowledge/pretrain",
            ["data.documents=d.txt", "data.world.people=20"],
            "data.world: nothing is generated where",
        ),
        ("knowledge/finetune", ["data.documents=d.txt", "data.world.people=20"], "data.world: nothing is generated"),
        (
            "sentiment",
            ["data.train=a.tsv", "data.reviews.sentences=9"],
            "data.reviews: nothing is generated where data.",
        ),
        ("summarize", ["data.train=a.tsv", "data.notices.places=50"], "data.notices: nothing is generated where data."),
    ],
)
def test_settings_of_generated_data_are_refused_beside_files(name, overrides, words, planned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        load(name, overrides)
    (tmp_path / "d.txt").write_text("Ada was born in Elm.\n")
    (tmp_path / "q.tsv").write_text("Where was Ada born?\tElm\n")
    whole = name.partition("/")[0]
    files = ["data.train=q.tsv", "data.dev=q.tsv"] if whole == "knowledge" else []
    if whole != "summarize":  # reads its pairs when it plans
        with pytest.raises(ConfigError, match=words):
            planned(whole, [*overrides, *files], bare=True)


def test_strangers_that_cannot_be_made_are_refused_where_they_were_asked_for(planned, tmp_path):
    (tmp_path / "d.txt").write_text("Ada was born in Elm.\nBo was born in Oak.\n")
    (tmp_path / "q.tsv").write_text("Where was Ada born?\tElm\nWho was born in Oak?\tBo\n")
    files = [
        f"data.documents={tmp_path / 'd.txt'}",
        f"data.train={tmp_path / 'q.tsv'}",
        f"data.dev={tmp_path / 'q.tsv'}",
    ]
    with pytest.raises(ConfigError, match=r"compare\.strangers: the questions differ in more than a name"):
        planned("knowledge", [*files, "compare.strangers=9"], bare=True)
    for overrides in ([], ["compare.strangers=0"]):
        planned("knowledge", [*files, *overrides], bare=True)


def test_candidates_have_the_settings_that_they_are_named_by(planned):
    overrides = ['compare.mechanisms=["softmax", "elu"]', "train.lr=0.5", "compare.settings.slow.finetune.train.lr=0.1"]
    overrides += ["compare.settings.wide.model.width=256", "compare.settings.wide.train.lr=0.25"]
    _, trainings = planned("knowledge", overrides)
    made = {t.title: t.recipe for t in trainings}
    assert len(made) == 2 * (3 + 1 + 3)  # what is only fine-tuned otherwise reads once
    for mechanism in ("softmax", "elu"):
        reading = made[f"{mechanism}: pretraining"]
        assert resolve_model(reading.model)[1].mechanism == mechanism and reading.train.lr == 0.5
        slow = made[f"{mechanism}, slow: with pretraining"]
        assert slow.train.lr == 0.1 and slow.train.init == made[f"{mechanism}: with pretraining"].train.init
        wide = made[f"{mechanism}, wide: pretraining"]
        assert resolve_model(wide.model)[1].width == 256 and wide.train.lr == 0.25
        tuned = made[f"{mechanism}, wide: with pretraining"]
        assert tuned.train.init.endswith(f"{mechanism}-wide/pretraining") and tuned.train.lr == 0.25
    folders = [t.folder for t in trainings]
    assert len(set(folders)) == len(folders) and "softmax-wide/without-pretraining" in folders


@pytest.mark.parametrize("name", ["approximate", "scale", "argmax", "two-heads"])
def test_every_key_of_a_measurement_can_be_changed_and_none_other(name, monkeypatch, tmp_path):
    """What is measured with is what was asked, and the command of the results asks for it again."""
    known = EXPERIMENTS[name]
    monkeypatch.setattr(type(known), "run_config", lambda self, config, out, say: config)
    usual = known.Config()
    for key, value in usual.as_dict().items():
        low, high = usual.limits.get(key, (0, 99))
        for other in ([low, high], [high]) if isinstance(value, list) else (high, low, low + 1):
            text = f"{key}={experiment.override_words({'_': {'_': other}})[0].partition('=')[2]}"
            try:
                config = known.run(tmp_path, [text], RunOptions(), Shown())
            except ConfigError:  # it does not fit the others
                continue
            if other != value:
                break
        found = config.as_dict()
        assert found[key] == other and {k: v for k, v in found.items() if k != key} == {
            k: v for k, v in usual.as_dict().items() if k != key
        }
        words = shlex.split(known._command(config))[3:]
        assert known.run(tmp_path, words, RunOptions(), Shown()) == config
    with pytest.raises(ConfigError, match="no key 'drawss'"):
        known.run(tmp_path, ["drawss=3"], RunOptions(), Shown())
    assert known.run(tmp_path, [], RunOptions(seed=7), Shown()).seed == 7


def test_the_more_particular_of_two_learning_rates_counts(planned):
    _, trainings = planned("sentiment", ["train.lr=0.5", "compare.rates.sgd=0.25", "adagrad.train.lr=2"])
    assert {t.stage: t.recipe.train.lr for t in trainings} == {"adamw": 0.5, "adagrad": 2, "sgd": 0.25}
    _, trainings = planned("sentiment", ['compare.optimizers=["adam", "sgd"]', "adam.train.lr=3"])
    assert {t.stage: t.recipe.train.lr for t in trainings} == {"adam": 3, "sgd": sentiment.RATES["sgd"]}
    _, trainings = planned("summarize", ["compare.rates=[1, 2]", "compare.features=[8]", "softmax.train.lr=3"])
    assert [(t.stage, t.recipe.train.lr) for t in trainings] == [("softmax", 3), ("performer", 1), ("performer", 2)]


def test_files_of_ones_own_are_what_each_stage_reads(planned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.txt").write_text("Ada was born in Elm.\n")
    for name in ("t", "v"):
        (tmp_path / f"{name}.tsv").write_text("Where was Ada born?\tElm\n")
    own = ["data.documents=d.txt", "data.train=t.tsv", "data.dev=v.tsv"]
    for training in planned("knowledge", own, bare=True)[1]:
        data = training.recipe.data
        assert [data.documents, data.train, data.dev] == [str(tmp_path / x) for x in ("d.txt", "t.tsv", "v.tsv")]


# The command that a report shows

COMMANDS = {
    "knowledge": [
        *("data.documents=d.txt", "data.train=own questions.tsv", "data.dev='v.tsv'", "train.seed=7"),
        *("finetune.train.init=elsewhere", "finetune.model.dropout=0.1", "data.spans=[0.2, 0.3]", "train.lr=1e-5"),
        *("compare.strangers_file=s.tsv", 'compare.mechanisms=["elu"]', "compare.settings.a b.model.width=64"),
    ],
    "summarize": [
        "compare.rates=[1e-3]",
        "model.encoder.mechanism=elu",
        "performer.train.steps=3",
        "data.copies=0",
    ],
    "sentiment": [
        "sgd.train.optimizer.options={momentum = 0.5, nesterov = true}",
        'model.name="12"',
        "data.padding=length",
    ],
    "heads": ['data.sentences.weird=" 12 "', 'data.sentences.normal=true, or "not"?', "train.saving.log=[]"],
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("variant, device", [(None, "cpu"), ("full", "meta")])
def test_the_command_shown_gives_the_same_recipes(name, variant, device, planned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.txt").write_text("Ada was born in Elm.\n")
    (tmp_path / "s.tsv").write_text("Where was Bo born?\n")
    for file in ("own questions.tsv", "v.tsv"):
        (tmp_path / file).write_text("Where was Ada born?\tElm\n")
    monkeypatch.setattr("regard.lab.heads.run.Sentences", lambda *arguments: None)
    monkeypatch.setattr("regard.lab.heads.run._describe_plan", lambda *arguments: "")
    base = [] if name == "knowledge" else planned.base[name]
    first, trainings = planned(name, [*base, *COMMANDS[name]], variant, device, bare=True, out=tmp_path / "out")
    typed = {}

    def run(experiment, folder, overrides, options, shown):
        typed.update(name=experiment.name, overrides=overrides, variant=options.variant, device=options.device)
        raise ConfigError("enough")

    monkeypatch.setattr(TrainingExperiment, "run", run)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    regard, *words = shlex.split(first.command)
    assert regard == "regard" and isinstance(CliRunner().invoke(app, words).exception, ConfigError)
    again, repeated = planned(
        typed["name"], typed["overrides"], typed["variant"], typed["device"] or "cpu", bare=True, out=tmp_path / "out"
    )
    assert again == first and again.command == first.command
    assert [t.recipe for t in repeated] == [t.recipe for t in trainings] and trainings


def test_a_seed_on_the_command_line_is_in_the_command(planned):
    session, _ = planned("knowledge", ["train.seed=3"])
    assert "train.seed=3" in session.command


@pytest.mark.parametrize(
    "text", ["12", "true", " a ", "", "[1", "1e-3", "a'b\"c", "{}", "nan", "2020-01-01", "a\nb=1", "é"]
)
def test_a_text_is_read_as_the_same_text(text):
    asked = {"train": {"x": text, "y": [text, 1.5e-7, {"z": text}], "empty": {}}}
    assert parse(experiment.override_words(asked)) == asked


def test_what_a_config_says_can_be_said_on_the_command_line():
    asked = {key: table for key, table in load("summarize").as_dict().items() if key in recipe.SECTIONS}
    assert dict(flatten(parse(experiment.override_words(asked)))) == dict(flatten(asked))
    assert COMPARE not in asked


def test_asking_for_epochs_takes_the_place_of_a_recipes_steps():
    assert recipe.load("lm", ["data.text=a.txt"]).train.steps == 2500
    asked = recipe.load("lm", ["data.text=a.txt", "train.epochs=1"]).train
    assert (asked.epochs, asked.steps) == (1, 0)
    both = recipe.load("lm", ["data.text=a.txt", "train.epochs=1", "train.steps=7"]).train
    assert both.steps == 7
