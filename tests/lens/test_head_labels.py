"""What heads do: labels for heads that do it, none for heads that do not, and none for chance."""

import json
import math

import pytest
import torch
import typer
from typer.testing import CliRunner

from regard.cli.heads import heads as command
from regard.data.files import DataError
from regard.data.tokenizers import Bytes, Characters, TextError
from regard.errors import OptionError
from regard.lens.heads.ablation import ablate
from regard.lens.heads.annotations import Mentions, Parsed, read_conllu, read_mentions
from regard.lens.heads.examine import default_labels, default_texts, examine, repeated_tokens
from regard.lens.heads.labels import MIXED, HeadLabel, Score, _interval, choose_label, label_heads
from regard.lens.heads.linguistics import evaluate_coreference, evaluate_syntax
from regard.lens.heads.redundancy import redundant_pairs
from regard.lens.heads.scores import SCORE_DESCRIPTIONS
from regard.lens.models import RecordableModel
from regard.lens.recording.hub_models import hub_card
from regard.lens.recording.overview import add_overview
from regard.lens.recording.regard_models import regard_card
from regard.lens.trace.arrays import pack
from regard.lens.trace.format import load
from regard.lens.trace.formulas import Dense, SoftmaxFormula
from regard.lens.trace.rules import MaskRules
from regard.lens.trace.tokens import Tokens
from regard.lens.trace.trace import Card, RecordedAttention, Recording
from regard.models import GPT, Encoder, Seq2Seq

CARD = Card("made up", "GPT", "regard", 0, 1, 1, 1, 8, 8, 8, ("softmax",))
WORDS = [
    "[S]",
    "the",
    "dog",
    "saw",
    "the",
    "cat",
    ",",
    "and",
    "then",
    "the",
    "dog",
    "ran",
    "home",
    ".",
    "a",
    "bird",
    "sang",
    "while",
    "the",
    "cat",
    "slept",
    ".",
    "[E]",
]


def sequence(words=WORDS, seed=0):
    """Words in an order of their own between the two special ones."""
    inner = words[1:-1]
    order = torch.randperm(len(inner), generator=torch.Generator().manual_seed(seed)).tolist()
    shown = [words[0], *(inner[i] for i in order), words[-1]]
    text = " ".join(shown[1:-1])
    starts, ends, at = [-1], [-1], 0
    for word in shown[1:-1]:
        starts.append(at)
        ends.append(at + len(word))
        at += len(word) + 1
    special = [1, *[0] * len(inner), 1]
    return Tokens("text", text, shown, None, [*starts, -1], [*ends, -1], special=special)


def mapped(weights, tokens, causal=False):
    """A recording of one attention with just these weights, [H,T,T]."""
    tiles = [[pack(head, "f16")] for head in weights]
    dense = Dense(weights.shape[1], tiles)
    a = RecordedAttention(
        0, "encoder", "self", "a", "softmax", 0, 0, len(weights), len(weights), dense, MaskRules(causal)
    )
    made = Recording("text", CARD, [tokens], [a])
    add_overview(made, a)
    return made


def sets(tokens):
    """For each label the keys that it is about, written out token by token."""
    T, shown = len(tokens), tokens.tokens
    count = {w: shown.count(w) for w in shown}
    made = {name: torch.zeros(T, T) for name in SCORE_DESCRIPTIONS}
    for i in range(T):
        for j in range(T):
            inner = 0 < j < T - 1
            made["previous"][i, j] = j == i - 1
            made["next"][i, j] = j == i + 1
            made["self"][i, j] = i == j
            made["first"][i, j] = j == 0
            made["separator"][i, j] = j == T - 1
            made["punctuation"][i, j] = shown[j] in ",."
            made["same word"][i, j] = inner and i != j and shown[i] == shown[j]
            made["rare word"][i, j] = inner and shown[j] in (
                "saw",
                "and",
                "then",
                "ran",
                "home",
                "bird",
                "sang",
                "slept",
            )
            made["induction"][i, j] = inner and 0 < j < i + 1 and shown[j - 1] == shown[i] and j - 1 < i and j - 1 > 0
            made["local"][i, j] = abs(i - j) <= 3
            made["broadcast"][i, j] = j == T // 2
    assert count["the"] > 1
    return made


def toward(choose_label, amount):
    """Weights that give `amount` to the choose_label keys, and are even otherwise."""
    T = choose_label.shape[0]
    share = choose_label / choose_label.sum(-1, keepdim=True).clamp(min=1)
    some = (choose_label.sum(-1, keepdim=True) > 0).float() * amount
    return some * share + (1 - some) / T


TEXTS = [sequence(seed=n) for n in range(8)]


@pytest.mark.parametrize("name", [n for n in SCORE_DESCRIPTIONS if n not in ("broad", "rare word")])
def test_a_head_that_does_it_is_labelled_and_one_that_does_it_a_little_is_not(name):
    strong = [mapped(toward(sets(t)[name], 0.6)[None], t) for t in TEXTS]
    weak = [mapped(toward(sets(t)[name], 0.05)[None], t) for t in TEXTS]
    again = (strong, weak) if name == "induction" else ((), ())  # the texts stand for repeated tokens
    assert label_heads(strong, again[0])[0].label == name
    assert label_heads(weak, again[1])[0].label == MIXED
    away = [
        mapped((1 - sets(t)[name])[None] / (1 - sets(t)[name]).sum(-1, keepdim=True).clamp(min=1), t) for t in TEXTS
    ]
    assert label_heads(away)[0].label != name


def test_rare_words():
    """Each text has words of its own, and words that all of them share."""
    texts = []
    for n in range(12):
        own = [f"{c}{'xyzuvwrstqpk'[n]}" for c in ("la", "mo", "ni")]
        words = ["[S]", *["the", "dog", "and", "the", "cat", "saw", "the"], *own, *["dog", "and", "cat"], "[E]"]
        texts.append(sequence(words, n))
    weights = [
        toward(torch.tensor([[float(w[-1] in "xyzuvwrstqpk" and len(w) == 3) for w in t.tokens]] * len(t)), 0.6)
        for t in texts
    ]
    labels = label_heads([mapped(w[None], t) for w, t in zip(weights, texts, strict=True)])
    assert labels[0].label == "rare word"


def vectors(q, k, tokens, causal=True):
    a = RecordedAttention(
        0, "decoder", "self", "a", "softmax", 0, 0, len(q), len(k), SoftmaxFormula(1 / math.sqrt(q.shape[-1]))
    )
    a.rules, a.q, a.k = MaskRules(causal), q, k
    made = Recording("text", CARD, [tokens], [a])
    add_overview(made, a)
    return made


def test_broad_is_more_even_than_chance_and_chance_is_not_broad():
    torch.manual_seed(0)
    tokens = [Tokens("text", "", [str(i) for i in range(40)]) for _ in range(6)]
    chance = [vectors(torch.randn(6, 40, 16) * 2, torch.randn(6, 40, 16) * 2, t) for t in tokens]
    assert {x.label for x in label_heads(chance)} == {MIXED}
    even = []
    for t in tokens:  # long vectors, at right angles to each other: they could single out keys and do not
        q, k = torch.randn(2, 40, 16) * 2, torch.randn(2, 40, 16) * 2
        q[..., :8], k[..., 8:] = 0, 0
        even.append(vectors(q * 2, k * 2, t))
    assert {x.label for x in label_heads(even)} == {"broad"}


def test_the_wide_yields_to_the_narrow_and_a_resting_place_to_work():
    def score(effect, low=None, texts=12):
        return Score(0.2 + 0.8 * effect, 0.2, effect, effect - 0.02 if low is None else low, effect + 0.02, texts)

    assert choose_label({"local": score(0.5), "previous": score(0.3)}) == "previous"
    assert choose_label({"local": score(0.5), "previous": score(0.2)}) == "local"
    assert choose_label({"first": score(0.9), "same word": score(0.12)}) == "same word"
    assert choose_label({"first": score(0.6), "broadcast": score(0.6)}) == "first"
    assert choose_label({"first": score(0.09)}) == MIXED
    assert choose_label({"first": score(0.3, low=-0.01)}) == MIXED
    assert choose_label({"first": score(0.3, texts=4)}) == MIXED
    both = HeadLabel(0, 0, "decoder", 0, "induction", {"first": score(0.8), "induction": score(0.4)})
    assert both.rests == "first" and both.as_dict()["rests"]["effect"] == 0.8 and both.effect == 0.4
    only = HeadLabel(0, 0, "decoder", 0, "induction", {"first": score(0.05), "induction": score(0.4)})
    assert only.rests is None and only.as_dict()["rests"] is None


def test_induction_is_measured_on_repeated_tokens_alone():
    chosen = [mapped(toward(sets(t)["induction"], 0.6)[None], t) for t in TEXTS]
    even = [mapped(torch.full((1, len(t), len(t)), 1 / len(t)), t) for t in TEXTS]
    assert "induction" not in label_heads(chosen)[0].scores
    assert label_heads(chosen, even)[0].scores["induction"].effect == pytest.approx(0, abs=2e-3)
    assert label_heads(even, chosen)[0].label == "induction"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["previous", "first", "local"])
def test_an_effect_is_the_share_beyond_chance_whatever_the_length(name, causal):
    """A head that gives 0.4 to its keys and is even otherwise has the effect 0.4 in short texts and in long ones."""
    found = []
    for length in (12, 60):
        tokens = Tokens("text", "", [str(i) for i in range(length)])
        i, j = torch.arange(length)[:, None], torch.arange(length)[None]
        keys = {"previous": j == i - 1, "first": j == 0 * i, "local": (i - j).abs() <= 3}[name]
        seen = (j <= i) | torch.tensor(not causal)
        even = seen / seen.sum(1, keepdim=True)
        chosen = (keys & seen).float()
        weights = 0.6 * even + 0.4 * chosen / chosen.sum(1, keepdim=True).clamp(min=1)
        weights = torch.where((chosen.sum(1, keepdim=True) > 0), weights, even)
        found.append(label_heads([mapped(weights[None], tokens, causal)] * 6)[0].scores[name])
    assert [s.effect for s in found] == pytest.approx([0.4, 0.4], abs=2e-3)
    assert found[0].score > found[1].score + 0.01  # the plain share falls with the length


@pytest.mark.parametrize("texts", [6, 12, 40])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(texts):
    """Queries of one text are alike, so it is the texts that are drawn."""
    torch.manual_seed(0)
    room, inside = torch.full((1, texts), 40.0, dtype=torch.float64), 0
    for n in range(300):
        low, high = _interval((0.1 + 0.05 * torch.randn(1, texts, dtype=torch.float64)) * 40, room, n)
        inside += bool(low[0] <= 0.1 <= high[0])
    assert 0.92 * 300 <= inside <= 0.98 * 300


def test_few_texts_say_nothing():
    strong = [mapped(toward(sets(t)["previous"], 0.6)[None], t) for t in TEXTS]
    assert label_heads(strong[:4])[0].label == MIXED and label_heads(strong[:5])[0].label == "previous"
    alone = label_heads(strong[:1])[0].scores["previous"].as_dict()
    assert alone["low"] is None and alone["effect"] == pytest.approx(0.6, abs=2e-3)


def detectors(ids):
    """The detection patterns of TransformerLens, [T,T] each: the previous token, a duplicate, what followed one."""
    T = len(ids)
    token = torch.tensor(ids)
    duplicate = ((token[:, None] == token[None]) & ~torch.eye(T, dtype=torch.bool)).tril().float()
    after = torch.cat([torch.zeros(T, 1), duplicate[:, :-1]], 1).tril()
    return {"previous": torch.eye(T).roll(1, 0).tril(-1), "same word": duplicate, "induction": after}


def test_effects_agree_with_the_detectors_of_transformerlens():
    """The share of all attention that falls on a pattern, as they score it, puts the heads in the same order."""
    torch.manual_seed(0)
    ids = [torch.randint(0, 90, (24,)).repeat(2).tolist() for _ in range(6)]
    chosen = [torch.rand(3, 30), torch.randn(30, 48, 48)]
    recordings, theirs = [], {name: torch.zeros(30) for name in ("previous", "same word", "induction")}
    for n, text in enumerate(ids):
        patterns = detectors(text)
        base = (chosen[1] + 0.1 * n).masked_fill(~torch.ones(48, 48).tril().bool(), -torch.inf)
        for at, pattern in enumerate(patterns.values()):
            base = base + pattern * (6 * chosen[0][at] ** 3)[:, None, None]
        weights = base.softmax(-1)
        recordings.append(mapped(weights, Tokens("text", "", [f"t{i}" for i in text], text), causal=True))
        for name, pattern in patterns.items():
            theirs[name] += (weights * pattern).sum((1, 2)) / weights.sum((1, 2)) / len(ids)
    labels = label_heads(recordings, recordings)
    for name, scores in theirs.items():
        ours = torch.tensor([x.scores[name].effect for x in labels])
        ranks = torch.stack([x.argsort().argsort().double() for x in (ours, scores)])
        assert float(torch.corrcoef(ranks)[0, 1]) > 0.97, name


def test_the_baseline_is_that_of_an_even_spread_under_the_same_mask():
    tokens = Tokens("text", "", [str(i) for i in range(30)])
    even = torch.ones(30, 30).tril() / torch.arange(1, 31)[:, None]
    labels = label_heads([mapped(even[None], tokens, causal=True)] * 4)
    for score in labels[0].scores.values():
        assert score.effect == pytest.approx(0, abs=2e-3)
    assert labels[0].scores["first"].score > 0.1  # early queries see little else


def test_a_key_that_happens_to_be_popular_is_no_broadcast():
    draw = torch.Generator().manual_seed(0)
    columns = [torch.randint(0, len(t), (4, len(t)), generator=draw) for t in TEXTS]
    sharp = [torch.nn.functional.one_hot(c, len(t)).float() for c, t in zip(columns, TEXTS, strict=True)]
    labels = label_heads([mapped(w, t) for w, t in zip(sharp, TEXTS, strict=True)])
    assert all(abs(x.scores["broadcast"].effect) < 0.06 for x in labels)


@pytest.mark.parametrize("cls", [GPT, Encoder])
@pytest.mark.parametrize(
    ("sharper", "seeds", "allowed"), [(1, 4, 0), pytest.param(10, 20, 0.02, marks=pytest.mark.slow)]
)
def test_random_weights_are_not_labelled(cls, sharper, seeds, allowed):
    """Also where queries and keys are ten times as long, so that attention is as uneven as in trained models."""
    labelled = total = 0
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = cls.preset("nano", vocabulary=256, length=128)
        model.tokenizer = Bytes()
        for block in model.stack.layers:
            block.attention.project.weight.data[:96] *= sharper  # queries and keys
        subject = RecordableModel(model, model.tokenizer, regard_card(model))
        recordings = [subject.record_one(text[:80]) for text in default_texts()[:6]]
        again = [subject.record_one(ids) for ids in repeated_tokens(subject, seed)]
        labels = label_heads(recordings, again)
        labelled, total = labelled + sum(x.label != MIXED for x in labels), total + len(labels)
    assert total == seeds * 9 and labelled <= allowed * total


@pytest.mark.slow
def test_a_model_trained_on_repetition_shows_its_induction_head():
    torch.manual_seed(0)
    model = GPT(vocabulary=40, length=64, width=64, layers=2, attention={"heads": 4}, tied=False).train()
    for p in model.parameters():
        p.data *= 4 if p.dim() > 1 else 1  # GPT-2's start is made for wider models
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, betas=(0.9, 0.98))
    for step in range(450):
        n = int(torch.randint(6, 20, ()))
        tokens = torch.randint(0, 40, (32, n)).repeat(1, 48 // n + 1)[:, :48]
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits[:, n:].flatten(0, 1), tokens[:, n + 1 :].flatten())
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 50)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.5
    subject = RecordableModel(model.eval(), None, regard_card(model))
    ids = repeated_tokens(subject)
    recordings = [subject.record_one(x) for x in ids]
    labels = label_heads(recordings, recordings)
    found = {(x.layer, x.label) for x in labels}
    assert {(0, "previous"), (1, "induction")} <= found
    torch.manual_seed(0)
    fresh = GPT(model.config)
    twin = RecordableModel(fresh.eval(), None, regard_card(fresh))
    again = [twin.record_one(x) for x in ids]
    assert {x.label for x in label_heads(again, again)} == {MIXED}


def test_redundant_heads_are_those_that_are_alike_and_not_just_even():
    torch.manual_seed(0)
    tokens = Tokens("text", "", [str(i) for i in range(20)])
    sharp = (torch.randn(20, 20) * 3).softmax(-1)
    other = (torch.randn(20, 20) * 3).softmax(-1)
    even = torch.full((20, 20), 1 / 20)
    nearly = sharp * 0.98 + even * 0.02
    found = redundant_pairs([mapped(torch.stack([sharp, other, even, even, nearly]), tokens)])
    assert [tuple(x["head"] for x in pair["heads"]) for pair in found] == [(0, 4)]
    assert 0 < found[0]["divergence"] < 0.02


def parsed(n, seed=0):
    """Sentences whose words depend on a word that no fixed distance finds, but for 'det', which is always next."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(n):
        words = [f"w{i}" for i in range(9)]
        heads = [(i + 1) if i % 2 == 0 and i < 8 else int(torch.randint(0, 9, (), generator=draw)) for i in range(9)]
        heads = [h if h != i else (i + 4) % 9 for i, h in enumerate(heads)]
        relations = ["det" if i % 2 == 0 and i < 8 else "obj" for i in range(9)]
        text = " ".join(words)
        spans = [(text.index(w), text.index(w) + 2) for w in words]
        made.append(Parsed(text, tuple(spans), tuple(heads), tuple(relations)))
    return made


def test_a_head_that_follows_syntax_stands_out_and_one_that_looks_ahead_does_not():
    sentences = parsed(25)
    turn = iter(sentences)

    def record(text):
        sentence = next(turn)
        starts, ends = zip(*sentence.words, strict=True)
        tokens = Tokens("text", text, text.split(), None, list(starts), list(ends))
        right, after = torch.zeros(9, 9), torch.zeros(9, 9)
        for i, head in enumerate(sentence.governors):
            right[i, head] = 1
            after[i, min(i + 1, 8)] = 1
        return mapped(torch.stack([after, 0.4 * right + 0.6 * torch.eye(9)]), tokens)  # itself does not count

    found = {(x["relation"], x["direction"]): x for x in evaluate_syntax(record, sentences)}
    follows = found["obj", "to head"]
    assert follows["head"] == 1 and follows["score"] == 1 and follows["stands_out"]
    assert follows["baseline"] < 0.5
    ahead = found["det", "to head"]
    assert ahead["score"] == 1 and ahead["baseline"] == 1 and not ahead["stands_out"]


def test_a_head_that_finds_the_antecedent_stands_out():
    text = "Ann met Bob and Cid and Dan , then he saw him and left"
    spans = tuple((text.index(f"{w} "), text.index(f"{w} ") + len(w)) for w in ("Ann", "Bob", "Cid", "Dan", "he"))
    given = [Mentions(text, spans, (0, 1, 2, 3, 1)) for _ in range(12)]

    def record(text):
        words = text.split()
        starts = [sum(len(w) + 1 for w in words[:i]) for i in range(len(words))]
        tokens = Tokens("text", text, words, None, starts, [s + len(w) for s, w in zip(starts, words, strict=True)])
        finds = torch.zeros(len(words), len(words))
        finds[:, 2] = 1
        nearest = torch.zeros_like(finds)
        nearest[:, 6] = 1
        return mapped(torch.stack([nearest, toward(finds, 0.4)]), tokens)

    found = evaluate_coreference(record, given)
    assert found["head"] == 1 and found["score"] == 1 and found["baseline"] == 0 and found["stands_out"]
    assert evaluate_coreference(record, given[:3]) is None
    # A head that always looks at the first mention has found nothing where the first is right so often.
    first = [Mentions(text, spans, (1, 0, 2, 3, 1)) for _ in range(12)]
    always = evaluate_coreference(lambda text: first_looker(record(text)), first)
    assert always["score"] == 1 and always["rule"] == "first" and always["baseline"] == 1 and not always["stands_out"]


def first_looker(recording):
    """The same recording with a head that gives all weight to the first token."""
    T = len(recording.sequences[0])
    weights = torch.zeros(1, T, T)
    weights[..., 0] = 1
    return mapped(weights, recording.sequences[0])


CONLLU = """# text = Don't go!
1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\t_\t_\t3\taux\t_\t_
2\tn't\tnot\tPART\t_\t_\t3\tadvmod\t_\t_
3\tgo\tgo\tVERB\t_\t_\t0\troot\t_\tSpaceAfter=No
3.1\tyou\t_\t_\t_\t_\t_\t_\t_\t_
4\t!\t!\tPUNCT\t_\t_\t3\tpunct\t_\t_

1\tRun\trun\tVERB\t_\t_\t0\troot:x\t_\t_
"""


def test_syntax_is_read_with_the_characters_of_each_word(tmp_path):
    (tmp_path / "a.conllu").write_text(CONLLU)
    first, second = read_conllu(tmp_path / "a.conllu")
    assert first.text == "Don't go!" and [first.text[a:b] for a, b in first.words] == ["Don't", "Don't", "go", "!"]
    assert first.governors == (2, 2, -1, 2) and second.relations == ("root",)
    for wrong, match in (
        ("1\tRun\trun\n", "line 1: 3 columns"),
        (CONLLU.replace("\t3\taux", "\tx\taux"), "line 3: 'x'"),
        (CONLLU.replace("\t3\tpunct", "\t9\tpunct"), "depends on 9 of 4"),
        ("# nothing\n\n", "no sentence"),
        (CONLLU.replace("\n4\t", "\n7\t"), "word 7, expected 4"),
    ):
        (tmp_path / "b.conllu").write_text(wrong)
        with pytest.raises(DataError, match=match):
            read_conllu(tmp_path / "b.conllu")


def test_mentions_are_read_and_checked(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "Ann saw her", "clusters": [[[8, 11], [0, 3]]]}\n\n')
    assert read_mentions(path) == [Mentions("Ann saw her", ((0, 3), (8, 11)), (0, 0))]
    for wrong, match in (
        ('{"text": "a"}', "line 1: KeyError"),
        ("[1]", "line 1: TypeError"),
        ('{"text": "a", "clusters": [[[0, 9]]]}', "0 to 9 of a text of 1"),
        ("{", "line 1 is damaged or no JSON"),
    ):
        path.write_text(wrong + "\n")
        with pytest.raises(DataError, match=match):
            read_mentions(path)


def subject_of(model, tokenizer=None):
    torch.manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.2
    model.tokenizer = tokenizer or Bytes()
    return RecordableModel(model.eval(), model.tokenizer, regard_card(model))


def test_removing_a_head_costs_what_its_output_was_worth():
    subject = subject_of(GPT.preset("nano", vocabulary=256, length=64, layers=2))
    model = subject.model
    model.stack.layers[1].attention.out.weight.data[:, 16:32] = 0  # head 1 of layer 1 says nothing
    found = ablate(subject, ["the dog ran home", "a cat"])
    cost = {(x["layer"], x["head"]): x["cost"] for x in found["heads"]}
    assert found["measure"] == "loss" and len(cost) == 6 and cost[1, 1] == 0
    assert all(abs(c) > 1e-5 for place, c in cost.items() if place != (1, 1))
    tokens = [torch.tensor([list(t.encode())]) for t in ("the dog ran home", "a cat")]
    before = sum(float(model.loss(t[:, :-1], t[:, 1:]).detach()) for t in tokens) / 2
    assert found["whole"] == pytest.approx(before, rel=1e-5)
    model.stack.layers[0].attention.out.weight.data[:, :16] = 0
    after = sum(float(model.loss(t[:, :-1], t[:, 1:]).detach()) for t in tokens) / 2
    assert cost[0, 0] == pytest.approx(after - before, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", ["bloom", "gptj"])
def test_heads_that_cannot_be_removed_are_not_said_to_cost_nothing(name):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    if name == "bloom":
        config = transformers.BloomConfig(vocab_size=61, hidden_size=24, n_layer=2, n_head=4)
        model = transformers.BloomForCausalLM(config).eval()
    else:
        config = transformers.GPTJConfig(vocab_size=61, n_embd=24, n_layer=2, n_head=4, rotary_dim=4)
        model = transformers.GPTJForCausalLM(config).eval()
    subject = RecordableModel(model, None, hub_card(model))
    with pytest.raises(OptionError, match="makes its attention itself"):
        ablate(subject, [list(range(5, 17))])


def test_a_head_without_scores_can_be_removed():
    subject = subject_of(GPT.preset("nano", vocabulary=256, length=64, layers=1, mechanism="synthesizer-random"))
    assert any(x["cost"] != 0 for x in ablate(subject, ["the dog ran home"])["heads"])


def test_removing_a_head_of_a_hugging_face_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    subject = RecordableModel(model, None, hub_card(model))
    ids = list(range(5, 17))
    found = ablate(subject, [ids])
    cost = {(x["layer"], x["head"]): x["cost"] for x in found["heads"]}
    assert found["measure"] == "change" and found["whole"] is None and len(cost) == 8
    with torch.no_grad():
        before = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        model.encoder.layer[0].attention.output.dense.weight[:, 12:18] = 0
        after = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    assert cost[0, 2] == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-3)


@pytest.fixture
def folder(tmp_path):
    model = subject_of(GPT.preset("nano", vocabulary=256, length=256, layers=2)).model
    model.save(tmp_path / "model")
    return tmp_path / "model"


def run(*words):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(w) for w in words], catch_exceptions=False)


def test_the_command_prints_tables_and_json(folder, tmp_path):
    (tmp_path / "texts").write_text("the dog ran home and the dog slept .\nthe cat saw the dog , and ran .\n" * 2)
    shown = run(folder, "--texts", tmp_path / "texts", "--ablate", "--save", tmp_path / "x.trace")
    assert shown.exit_code == 0
    for part in ("heads are specialised", "Over the layers", "Without a head: rise of the loss", "decoder 1"):
        assert part in shown.stdout
    trace = load(tmp_path / "x.trace")
    assert len(trace.recordings[0].labels) == 6
    found = json.loads(run(folder, "--texts", tmp_path / "texts", "--json").stdout)
    assert found["texts"] == 4 and len(found["heads"]) == 6 and len(found["layers"]) == 2
    assert set(found["heads"][0]["scores"]) <= set(SCORE_DESCRIPTIONS)
    twin = json.loads(run(f"random:{folder}", "--texts", tmp_path / "texts", "--json").stdout)
    assert twin["counts"] == {MIXED: 6} and twin["specialised"] == 0


def test_the_command_takes_annotations(folder, tmp_path):
    rows = [f"{i + 1}\tw{i}\t_\t_\t_\t_\t{i}\tdep\t_\t_" for i in range(8)]
    (tmp_path / "a.conllu").write_text(("\n".join(rows) + "\n\n") * 3)
    mention = {"text": "Ann saw Bob and she ran", "clusters": [[[0, 3], [16, 19]], [[8, 11]]]}
    (tmp_path / "a.jsonl").write_text((json.dumps(mention) + "\n") * 12)
    asked = (folder, "--syntax", tmp_path / "a.conllu", "--coreference", tmp_path / "a.jsonl")
    found = json.loads(run(*asked, "--json").stdout)
    assert found["syntax"][0]["relation"] == "dep" and found["coreference"]["pairs"] == 12
    shown = run(*asked).stdout
    assert "the best head of each relation" in shown and "Coreference: decoder" in shown


def test_texts_that_a_model_cannot_read_are_named_or_left_out(tmp_path):
    subject = subject_of(GPT.preset("nano", vocabulary=20, length=16, layers=1), Characters.of("abcdefgh "))
    with pytest.raises(OptionError, match="none of the texts"):
        examine(subject)
    with pytest.raises(TextError):
        examine(subject, ["abc!"])
    short = subject_of(GPT.preset("nano", vocabulary=256, length=16, layers=1))
    found, recordings = examine(short)
    assert found["texts"] == len(default_texts()) and len(recordings[0].sequences[0]) == 16


def test_an_encoder_decoder_is_examined_on_both_sides():
    with pytest.warns(UserWarning, match="the decoder wrote its own"):
        found, _ = examine(subject_of(Seq2Seq.preset("nano", vocabulary=256)), ["the dog ran home ."] * 2)
    assert {x["side"] for x in found["heads"]} == {"encoder", "decoder"} and len(found["heads"]) == 18
    assert [row["side"] for row in found["layers"]] == ["encoder"] * 3 + ["decoder"] * 3


def test_labels_for_a_page_say_nothing_of_targets_that_regards_texts_have_not(recwarn):
    labels = default_labels(subject_of(Seq2Seq.preset("nano", vocabulary=256)))
    assert {x["side"] for x in labels} == {"encoder", "decoder"}
    assert not [str(w.message) for w in recwarn if "no target was given" in str(w.message)]


def test_default_texts_are_plain_and_many():
    texts = default_texts()
    assert len(texts) >= 10 and all(100 < len(t) < 400 and t == t.strip() for t in texts)
