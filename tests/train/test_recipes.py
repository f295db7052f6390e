"""Recipes: what is built in resolves, what is misspelt is told, and what a run wrote down is the recipe again."""

import tomllib
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training import TINY, pretraining

from regard.config import ConfigError
from regard.errors import RegardError
from regard.train import Run, recipe, stage
from regard.train.recipe import SECTIONS, apply_variant, load, merge_tables, parse, recipe_names, resolve
from regard.train.settings import TrainConfig

OWN = """
task = "corruption"

[data]
documents = "docs.txt"

[model]
width = 24

[train]
steps = 5
optimizer = "sgd"

[variant.long.train]
steps = 50
schedule = { name = "linear", floor = 0.5 }
"""


def _variants():
    root = resources.files("regard") / "recipes"
    for name in recipe_names():
        tables = tomllib.loads((root / f"{name}.toml").read_text(encoding="utf-8"))
        yield from ((name, variant) for variant in (None, *tables.get("variant", {})))


@pytest.mark.parametrize("name, variant", list(_variants()))
def test_every_recipe_and_variant_resolves(name, variant):
    made = load(name, variant=variant)
    assert made.train.total(rows=1000) > 0
    assert resolve(name, made.as_dict()).as_dict() == made.as_dict()


def test_the_known_recipes():
    assert {"knowledge/pretrain", "knowledge/finetune", "knowledge/scratch"} <= set(recipe_names())
    full, plain = load("knowledge/pretrain", variant="full"), load("knowledge/pretrain")
    # Muon was measured for reading alone.
    answering = [load(name, variant=v) for name in ("knowledge/finetune", "knowledge/scratch") for v in (None, "full")]
    assert {made.train.optimizer.name for made in (plain, full)} == {"muon"}
    assert {made.train.optimizer.name for made in answering} == {"adamw"}
    assert full.data.world.people == 3000 > plain.data.world.people and full.data.block == 128
    assert full.model["preset"] == plain.model["preset"]  # a variant is a change, no more


@pytest.mark.parametrize(
    "name, variant, overrides, words",
    [
        ("knowledge/pretrian", None, [], "no recipe 'knowledge/pretrian'. Did you mean 'knowledge/pretrain'"),
        ("knowledge/pretrain", "ful", [], "no variant 'ful'. Did you mean 'full'"),
        ("knowledge/pretrain", None, ["trian.lr=1"], "no section 'trian'.* Did you mean 'train.lr'"),
        ("knowledge/pretrain", None, ["train.lrr=1"], "no key 'lrr' in train. Did you mean 'lr'"),
        ("knowledge/pretrain", None, ["train.schedule.warmpu=1"], "no key 'warmpu' in train.schedule. Did you mean"),
        ("knowledge/pretrain", None, ["data.world.peple=1"], "no key 'peple' in data.world. Did you mean 'people'"),
        ("knowledge/pretrain", None, ["model.widht=1"], "no key 'widht' in model. Did you mean 'width'"),
        ("knowledge/pretrain", None, ["model.attention.head=1"], "no key 'head' in model.attention. Did you mean"),
        ("knowledge/pretrain", None, ["model.preset=chra"], "model.preset = 'chra'.* Did you mean 'char'"),
        ("knowledge/pretrain", None, ["model.preset=3"], "model.preset = 3"),
        ("knowledge/pretrain", None, ["model.class=GTP"], "model.class = 'GTP'. Did you mean 'GPT'"),
        ("knowledge/pretrain", None, ["model.class=[1]"], r"model.class = \[1\]"),
        ("knowledge/pretrain", None, ["train.lr=fast"], "train.lr = 'fast': expected a number"),
        ("knowledge/pretrain", None, ["train.steps=1.5"], "train.steps = 1.5: expected a whole number"),
        ("knowledge/pretrain", None, ["train.deterministic=1"], "train.deterministic = 1: expected true or false"),
        ("knowledge/pretrain", None, ["train.saving.log=wandb"], "train.saving.log = 'wandb': expected a list"),
        ("knowledge/pretrain", None, ["train.schedule=3"], "train.schedule = 3: expected a section"),
        ("knowledge/pretrain", None, ["train.lr=-1"], "train.lr = -1: expected 0 or more"),
        ("knowledge/pretrain", None, ["train.lr=nan"], "train.lr = nan: expected 0 or more"),
        ("knowledge/pretrain", None, ["train.lr=inf"], "train.lr = inf: expected 0 or more"),
        ("knowledge/pretrain", None, ["train.batch=0"], "train.batch = 0: expected 1 to"),
        ("knowledge/pretrain", None, ["train.batch=99999999"], "train.batch = 99999999: expected 1 to"),
        (
            "knowledge/pretrain",
            None,
            ["train.batch=64", "train.micro=48"],
            "train.micro = 48 does not divide train.batch = 64",
        ),
        ("knowledge/pretrain", None, ["train.precision=fp8"], "train.precision = 'fp8': expected auto, float32"),
        ("knowledge/pretrain", None, ["train.compile=always"], "train.compile = 'always': expected auto, off"),
        ("knowledge/pretrain", None, ["train.evaluation.patience=-1"], "patience = -1: expected 0 or more"),
        ("knowledge/pretrain", None, ["train.saving.keep=-1"], "train.saving.keep = -1: expected 0 or more"),
        ("knowledge/pretrain", None, ["train.schedule.floor=2"], "train.schedule.floor = 2: expected 0 to 1"),
        ("knowledge/pretrain", None, ["model.width=100000000"], "model.width = 100000000: expected 1 to"),
        ("knowledge/pretrain", None, ["model.layers=0"], "model.layers = 0: expected 1 to"),
        ("knowledge/pretrain", None, ["data.block=8"], "data.block = 8: expected at least 9"),
        ("knowledge/pretrain", None, ["data.spans=[0.5]"], r"data.spans = \[0.5\]: expected two shares"),
        ("knowledge/pretrain", None, ["data.spans=[0.5,0.2]"], "data.spans = .*expected two shares"),
        ("knowledge/pretrain", None, ["data.mix=-1"], "data.mix = -1: expected 0 to"),
        ("knowledge/pretrain", None, ["lr=3"], "'lr=3': expected section.key=value"),
        ("knowledge/pretrain", None, ["data=3"], "'data=3': expected section.key=value"),
        ("knowledge/pretrain", None, ["train.lr"], "'train.lr': expected section.key=value"),
        ("knowledge/pretrain", None, ["train..lr=1"], "expected section.key=value"),
        ("none.toml", None, [], r"the recipe none.toml cannot be read"),
    ],
)
def test_what_is_wrong_is_told(name, variant, overrides, words):
    with pytest.raises(ConfigError, match=words):
        load(name, overrides, variant)


@pytest.mark.parametrize(
    "text, words",
    [
        ("task = 'corruptoin'", "task = 'corruptoin'. Did you mean 'corruption'"),
        ("", "task = None"),
        ("task = ['a']", "task = "),
        ("task = 'corruption'\n[trian]\nlr = 1", "unknown section 'trian'. Did you mean 'train'"),
        ("task = 'corruption'\ntrain = 3", "train = 3: expected a section"),
        ("task = 'corruption'\n[train]\nlrr = 1", "no key 'lrr' in train"),
        ("task = ", "is damaged or no TOML"),
    ],
)
def test_a_file_that_is_wrong(text, words, tmp_path):
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load(str(tmp_path / "own.toml"))


def test_settings_of_one_mechanism_hold_for_it_alone(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(
        OWN + "\n[mechanism.elu.train]\nlr = 0.25\nsteps = 7\n[variant.long.mechanism.elu.model]\nlayers = 3\n"
    )
    assert load(str(path)).train.steps == 5
    assert load(str(path), ["model.mechanism=performer"]).train.steps == 5
    elu = load(str(path), ["model.mechanism=elu", "train.lr=0.5"])
    assert (elu.train.steps, elu.train.lr) == (7, 0.5)  # what is asked for goes before
    assert "layers" not in elu.model
    assert load(str(path), ["model.mechanism=elu"], "long").model["layers"] == 3
    assert resolve(str(path), elu.as_dict()).as_dict() == elu.as_dict()
    for wrong, words in (("[mechanism.elo.train]\nlr = 1", "elo"), ("mechanism = 'elu'", "expected sections")):
        path.write_text("task = 'corruption'\n" + wrong)
        with pytest.raises(RegardError, match=words):
            load(str(path))


def test_a_recipe_of_ones_own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN, encoding="utf-8")
    made = load(str(path), ["train.lr=0.5", "model.layers=2"])
    assert (made.train.steps, made.train.lr, made.train.optimizer.name) == (5, 0.5, "sgd")
    assert dict(made.model) == {"width": 24, "layers": 2} and made.data.documents == "docs.txt"
    long = load(str(path), variant="long")
    assert (long.train.steps, long.train.schedule.name, long.train.schedule.floor) == (50, "linear", 0.5)


def test_a_recipe_that_extends_another(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text("extends = 'knowledge/pretrain'\n[train]\nlr = 0.5\n")
    made, base = load(str(path), variant="full"), load("knowledge/pretrain", variant="full")
    assert made.train == base.train and made.data == base.data  # the variant's rate is the base's
    assert load(str(path)).train == load("knowledge/pretrain").train.but(lr=0.5)
    path.write_text(f"extends = '{path}'")
    with pytest.raises(ConfigError, match="extends itself"):
        load(str(path))


@pytest.mark.parametrize(
    "text, value",
    [
        ("6e-3", 6e-3),
        ("12", 12),
        ("1_000", 1000),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("['a', 'b']", ["a", "b"]),
        ('["elu", "softmax"]', ["elu", "softmax"]),
        ("[adamw,sgd]", ["adamw", "sgd"]),
        ("[ softmax, synthesizer-random ]", ["softmax", "synthesizer-random"]),
        ("[a/b.txt,c]", "[a/b.txt,c]"),
        ("{ momentum = 0.9 }", {"momentum": 0.9}),
        ("plain text", "plain text"),
        ("/a/b=c/d.txt", "/a/b=c/d.txt"),
        ('"12"', "12"),
        ("a#b", "a#b"),
        ("C:\\x", "C:\\x"),
        ("", ""),
        ("a\nb = 3", "a\nb = 3"),
    ],
)
def test_values_are_toml_or_text(text, value):
    assert parse([f"train.x={text}"]) == {"train": {"x": value}}


def test_changes_to_one_section_add_up():
    both = ["train.schedule=linear", "train.schedule.floor=0.5"]
    for changes in (both, both[::-1]):
        made = load("knowledge/pretrain", changes).train.schedule
        assert (made.name, made.floor) == ("linear", 0.5)
    assert load("knowledge/pretrain", ["train.lr=1", "train.lr=2"]).train.lr == 2


tables = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
).filter(lambda t: isinstance(t, dict))


@given(a=tables, b=tables)
def test_laying_tables_over_each_other(a, b):
    assert merge_tables({}, a) == merge_tables(a, {}) == merge_tables(a, a) == a
    before = repr((a, b))
    made = merge_tables(a, b)
    assert repr((a, b)) == before and set(made) == set(a) | set(b)
    assert merge_tables(made, b) == made
    for key in b:
        inner = isinstance(a.get(key), dict) and isinstance(b[key], dict)
        assert made[key] == (merge_tables(a[key], b[key]) if inner else b[key])


def test_a_variant_is_laid_over_the_recipe():
    tables = {"task": "t", "train": {"lr": 1, "steps": 2}, "variant": {"v": {"train": {"lr": 3}}}}
    assert apply_variant(tables, "v", "r") == {"task": "t", "train": {"lr": 3, "steps": 2}}
    assert apply_variant(tables, None, "r") == {"task": "t", "train": {"lr": 1, "steps": 2}}


def test_what_a_run_wrote_is_the_recipe_again(tmp_path):
    changes = ["train.optimizer={name = 'adamw', options = {betas = [0.8, 0.9]}}", "model.mechanism=['elu']"]
    made = pretraining("train.steps=1", "data.world.unwritten=0.2", *changes)
    run = stage.train(made, tmp_path / "run")
    tables = {key: value for key, value in run.config.items() if key != "device"}
    again = resolve("again", tables)
    assert again.train == made.train and again.data == made.data
    assert recipe.resolve_model(again.model) == recipe.resolve_model(made.model)
    assert run.config["versions"].keys() == {"regard", "torch", "python"}
    assert Run.open(run.path).config == run.config


def test_the_default_of_every_section_is_one_that_can_be():
    assert TrainConfig().but(**TrainConfig().as_dict()) == TrainConfig()
    assert SECTIONS == ("data", "model", "train")
    assert pretraining().train.batch == 8 and len(TINY) > 5
