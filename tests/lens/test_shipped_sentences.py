"""The sentences that come with regard: trees are trees, mentions mean somebody, and no simple rule finds whom."""

import json
from collections import Counter

import pytest
import torch
from typer.testing import CliRunner

from regard.cli.app import app
from regard.data.files import DataError
from regard.data.tokenizers import Bytes
from regard.lens.heads import shipped
from regard.lens.heads.grammar import CASES, coreferent_texts, parsed_sentences
from regard.lens.heads.linguistics import MIN_PAIRS, RULES, is_resolvable
from regard.lens.heads.shipped import GENERATED, OWN, default_mentions, default_parsed, read_coreference, read_parsed
from regard.models import GPT


def path_to_root(sentence, word):
    """The words from one up to the root; fails where they go in a circle."""
    path = [word]
    while sentence.governors[path[-1]] >= 0:
        path.append(sentence.governors[path[-1]])
        assert len(path) <= len(sentence.words), sentence.text
    return path


def test_every_parse_is_a_tree_without_crossing_arcs_but_by_hand():
    sentences = default_parsed()
    assert len(sentences) == 40 + GENERATED == len({s.text for s in sentences})
    for n, sentence in enumerate(sentences):
        assert sentence.relations.count("root") == 1 and sentence.governors.count(-1) == 1, sentence.text
        assert sentence.governors[sentence.relations.index("root")] == -1
        for word in range(len(sentence.words)):
            path_to_root(sentence, word)
        if n >= 40:
            arcs = [tuple(sorted((a, b))) for a, b in enumerate(sentence.governors) if b >= 0]
            crossing = [(x, y) for x in arcs for y in arcs if x[0] < y[0] < x[1] < y[1]]
            assert not crossing, sentence.text
        assert [sentence.text[a:b] for a, b in sentence.words if sentence.text[a:b].strip() != sentence.text[a:b]] == []


def test_relations_fit_the_words_that_they_join():
    """The grammar's own parse, held against what the words themselves say."""
    for sentence in parsed_sentences(240, seed=3):
        words = [sentence.text[a:b].lower() for a, b in sentence.words]
        for n, (word, governor, relation) in enumerate(zip(words, sentence.governors, sentence.relations, strict=True)):
            if word == "the":
                assert relation == "det" and governor > n
                between = sentence.relations[n + 1 : governor]
                assert set(between) <= {"amod"}, sentence.text
            if word in ("was", "were", "had"):
                assert relation == "aux" and governor > n
            if word in ("is", "are"):
                subject = next(m for m, g in enumerate(sentence.governors) if g == governor and m < n)
                assert sentence.relations[subject] == "nsubj" and words[subject].endswith("s") == (word == "are")
            if relation == "nsubj":
                assert n < governor
            if relation == "obj":
                assert (n > governor) == (word != "that")
            if relation == "case" and word != "'s":
                assert sentence.relations[governor] in ("obl", "nmod") and n < governor


def test_pronouns_agree_with_whom_they_mean():
    women = {"she", "her", "herself"}
    men = {"he", "him", "his", "himself"}
    several = {"they", "them", "their", "themselves"}
    pronouns = {form for forms in CASES.values() for form in forms}
    for text in coreferent_texts(240, seed=5):
        shown = [text.text[a:b] for a, b in text.spans]
        assert list(text.spans) == sorted(text.spans)
        for n, (mention, cluster) in enumerate(zip(shown, text.clusters, strict=True)):
            if mention.lower() not in pronouns:
                continue
            meant = next(shown[m] for m in range(n) if text.clusters[m] == cluster)
            others = [shown[m] for m in range(n) if text.clusters[m] != cluster]
            assert others, text.text
            if mention.lower() in several:
                assert meant.endswith("s") or "children" in meant, text.text
                # Nobody else in the text is several, so that the pronoun means one thing only.
                assert not any(other.endswith(("rs", "ts", "es")) and " " in other for other in others), text.text
            if mention.lower() in women:
                assert not any(word in meant.split() for word in ("king", "boy", "uncle", "Peter", "John")), text.text
            if mention.lower() in men:
                assert not any(word in meant.split() for word in ("queen", "girl", "aunt", "Anna", "Ruth")), text.text


def test_no_simple_rule_finds_the_antecedents():
    right = Counter()
    cases = 0
    for text in default_mentions():
        for mention in range(len(text.spans)):
            if is_resolvable(text, mention):
                before = [n for n in range(mention) if text.spans[n][1] <= text.spans[mention][0]]
                cases += 1
                for rule, place in RULES.items():
                    right[rule] += text.clusters[before[place]] == text.clusters[mention]
    assert cases >= 150
    assert all(0.2 < right[rule] / cases < 0.6 for rule in RULES), right


def test_most_relations_occur_often_enough_and_no_distance_finds_subjects():
    sentences = default_parsed()
    counts = Counter(r for s in sentences for r, g in zip(s.relations, s.governors, strict=True) if g >= 0)
    often = {relation for relation, n in counts.items() if n >= MIN_PAIRS}
    assert {"nsubj", "obj", "iobj", "obl", "det", "amod", "advmod", "aux", "advcl", "acl", "ccomp", "conj"} <= often
    gaps = Counter(
        g - n for s in sentences for n, (g, r) in enumerate(zip(s.governors, s.relations, strict=True)) if r == "nsubj"
    )
    assert gaps.most_common(1)[0][1] < 0.6 * gaps.total()


def test_the_same_seed_writes_the_same_sentences():
    assert parsed_sentences(24, 1) == parsed_sentences(24, 1) != parsed_sentences(24, 2)
    assert coreferent_texts(24, 1) == coreferent_texts(24, 1) != coreferent_texts(24, 2)


def test_files_with_too_few_cases_say_how_many_are_needed(tmp_path):
    few = {"text": "Ann saw Bob and she ran", "clusters": [[[0, 3], [16, 19]], [[8, 11]]]}
    (tmp_path / "a.jsonl").write_text((json.dumps(few) + "\n") * 6)
    with pytest.raises(DataError, match=r"a\.jsonl: coreference needs 10 mentions .*, has 6; .*--coreference without"):
        read_coreference(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text((json.dumps(few) + "\n") * MIN_PAIRS)
    assert len(read_coreference(tmp_path / "a.jsonl")) == MIN_PAIRS
    rows = [f"{i + 1}\tw{i}\t_\t_\t_\t_\t{i}\t{'dep' if i else 'root'}\t_\t_" for i in range(4)]
    (tmp_path / "a.conllu").write_text(("\n".join(rows) + "\n\n") * 3)
    with pytest.raises(DataError, match=r"needs 10 pairs of words, the most frequent \(dep\) has 9"):
        read_parsed(tmp_path / "a.conllu")
    (tmp_path / "a.conllu").write_text(("\n".join(rows) + "\n\n") * 4)
    assert len(read_parsed(tmp_path / "a.conllu")) == 4
    assert len(read_parsed(OWN)) == len(read_coreference(OWN)) == 40 + GENERATED


def test_the_command_needs_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "GENERATED", 24)  # as many as a test has time for
    torch.manual_seed(0)
    model = GPT.preset("nano", vocabulary=256, length=128, layers=1)
    model.tokenizer = Bytes()
    model.save(tmp_path / "model")
    (tmp_path / "texts").write_text("the dog ran home .\nthe cat slept .\n")
    asked = ["heads", "--coreference", str(tmp_path / "model"), "--texts", str(tmp_path / "texts"), "--syntax"]
    shown = CliRunner().invoke(app, asked, catch_exceptions=False).stdout
    assert "Coreference: decoder" in shown and "mention is right in" in shown
    assert "nsubj to dep" in shown and "a relation needs 10 pairs: " in shown
    assert "obj to dep has 4, " in shown and "appos has 1, " in shown
    # Untrained heads find nothing.
    assert "✓" not in shown
