"""Data files, questions, span corruption and token files: exact, or refused with file and line."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.data import (
    BPE,
    IGNORE,
    MARK,
    PAD,
    UNKNOWN,
    Bytes,
    Characters,
    DataError,
    Question,
    TokenFile,
    all_windows,
    calibration,
    corrupt,
    coverage,
    exact_match,
    most_frequent,
    pack_documents,
    prompt,
    question_batch,
    random_windows,
    read_documents,
    read_lines,
    read_predictions,
    read_questions,
    unseen,
    vocabulary,
    wilson,
    windows,
    write_lines,
    write_predictions,
    write_questions,
    write_tokens,
)
from regard.data.corruption import draw_spans, longest_cut, with_hole
from regard.data.files import read_pieces

PEOPLE = [Question("Where was Ada Kör born?", "Elm"), Question("Where was B. Li born?", "New Oak")]


# Lines

lines_of_text = st.lists(
    st.text(st.characters(exclude_characters="\n\0\r\ufeff", exclude_categories=["Cs"])), min_size=1
)


@given(lines=lines_of_text)
def test_lines_come_back_as_they_were_written(lines, tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    write_lines(path, lines)
    assert read_lines(path) == lines
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_lines(path) == lines


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_pieces_join_to_the_text_wherever_they_are_cut(size, tmp_path):
    text = "é🎉 a\r\nb\rc\u2028d\u0085e\n\nf"
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert "".join(read_pieces(tmp_path / "a", size)) == text
    (tmp_path / "a").write_bytes(b"a\nb\n" + "é".encode() + b"\xe9\n")
    with pytest.raises(DataError, match="line 3: byte 0xE9 is not UTF-8"):
        list(read_pieces(tmp_path / "a", size))
    (tmp_path / "a").write_bytes(b"a\nb\nc\0")
    with pytest.raises(DataError, match=r"line 3: a NUL byte.*UTF-16"):
        list(read_pieces(tmp_path / "a", size))


def test_lines_longer_than_a_piece(tmp_path):
    lines = ["ä" * 700_000, "b" * 1_500_000, "", "c"]
    write_lines(tmp_path / "a", lines)
    assert read_lines(tmp_path / "a") == lines


READ = {
    "byte order mark": (b"\xef\xbb\xbfq\ta\n", [("q", "a")]),
    "crlf": (b"q\ta\r\nr\tb\r\n", [("q", "a"), ("r", "b")]),
    "no final newline": (b"q\ta", [("q", "a")]),
    "quotes": (b'"q"\t"a"\nr "x\tb"\n', [('"q"', '"a"'), ('r "x', 'b"')]),
    "an unclosed quote": (b'"q\ta\nr\tb\n', [('"q', "a"), ("r", "b")]),
    "separators that are not line ends": (
        "q\u2028r\ta\u0085b\u2029c\x0bd\x0ce\x1cf\n".encode(),
        [("q\u2028r", "a\u0085b\u2029c\x0bd\x0ce\x1cf")],
    ),
    "carriage return inside": (b"q\rr\ta\n", [("q\rr", "a")]),
    "spaces": (b" q \t a \n", [(" q ", " a ")]),
    "no answers": (b"q\nr\n", [("q", None), ("r", None)]),
    "empty answers": (b"q\t\nr\n", [("q", None), ("r", None)]),
}
REFUSED = {
    "invalid utf-8": (b"q\ta\nr\t\xff\n", "line 2: byte 0xFF is not UTF-8"),
    "latin-1": ("q\ta\nr\té\n".encode("latin-1"), "line 2: byte 0xE9 is not UTF-8"),
    "a cut character": ("q\té".encode()[:-1], "line 1: byte 0xC3 is not UTF-8"),
    "nul": (b"q\ta\nr\tb\0\n", "line 2: a NUL byte"),
    "utf-16": ("q\ta\n".encode("utf-16-le"), "line 1: a NUL byte.*UTF-16"),
    "utf-16 with mark": ("\ufeffq\ta\n".encode("utf-16-le"), "line 1.*UTF-16"),
    "mixed": (b"q\ta\nr\n", "line 2: no answer, but line 1 has an answer"),
    "mixed the other way": (b"q\nr\tb\n", "line 2: an answer, but line 1 has none"),
    "two tabs": (b"q\ta\nr\tb\tc\n", "line 2: 2 tabs; expected one"),
    "empty question": (b"q\ta\n\ta\n", "line 2: an empty question"),
    "blank line": (b"q\ta\n\n", "line 2: an empty question"),
    "empty": (b"", "is empty; expected one question a line"),
    "only a mark": (b"\xef\xbb\xbf", "is empty; expected one question a line"),
}


@pytest.mark.parametrize("case", READ)
def test_questions_are_read_exactly(case, tmp_path):
    raw, rows = READ[case]
    (tmp_path / "q.tsv").write_bytes(raw)
    found = read_questions(tmp_path / "q.tsv")
    assert found == [Question(*row) for row in rows]
    assert read_questions(tmp_path / "q.tsv", answers=False) == found
    write_questions(tmp_path / "again.tsv", found)
    assert read_questions(tmp_path / "again.tsv") == found


@pytest.mark.parametrize("case", REFUSED)
def test_questions_that_cannot_be_read_are_named_by_file_and_line(case, tmp_path):
    raw, message = REFUSED[case]
    (tmp_path / "q.tsv").write_bytes(raw)
    with pytest.raises(DataError, match=f"q.tsv.*{message}"):
        read_questions(tmp_path / "q.tsv")


def test_answers_may_be_demanded_or_not(tmp_path):
    path = tmp_path / "q.tsv"
    path.write_text("q\ta\nr\n")
    assert read_questions(path, answers=False) == [Question("q", "a"), Question("r")]
    with pytest.raises(DataError, match=r"q\.tsv, line 2: no tab"):
        read_questions(path, answers=True)
    path.write_text("q\ta\nr\t \n")
    with pytest.raises(DataError, match=r"q\.tsv, line 2: an empty answer"):
        read_questions(path, answers=True)
    with pytest.raises(DataError, match="holds a tab"):
        write_questions(path, [Question("q\tr", "a")])
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_questions(tmp_path / "none.tsv")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_questions(tmp_path)


def test_documents_skip_blank_lines_and_predictions_do_not(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\n  \ntwo\n")
    assert read_documents(path) == ["one", "two"]
    path.write_text("\n\n")
    with pytest.raises(DataError, match="only blank lines"):
        read_documents(path)
    write_predictions(path, ["a", "", "b\nc\r", ""])
    assert read_predictions(path) == ["a", "", "b c ", ""]


@pytest.mark.parametrize("line", ["a\nb", "a\0", "a\r", "\ufeffa", "\ud800"])
def test_a_line_that_would_not_come_back_is_refused_and_the_earlier_file_stays(line, tmp_path):
    write_lines(tmp_path / "a", ["earlier"])
    with pytest.raises(DataError, match="line 1"):
        write_lines(tmp_path / "a", [line])
    assert read_lines(tmp_path / "a") == ["earlier"]
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("at", ["open", "fsync", "replace", "lines"])
def test_a_write_that_fails_leaves_the_earlier_file_and_nothing_else(at, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_lines(tmp_path / "a", ["earlier"])
    targets = {"open": (Path, "open"), "fsync": (os, "fsync"), "replace": (Path, "replace")}
    with monkeypatch.context() as patch:
        if at in targets:
            patch.setattr(*targets[at], fails)
        with pytest.raises(DataError, match="cannot be written: No space left") as caught:
            write_lines(tmp_path / "a", (fails() if at == "lines" and n else "new" for n in range(2)))
    assert str(tmp_path / "a") in str(caught.value)
    assert read_lines(tmp_path / "a") == ["earlier"] and os.listdir(tmp_path) == ["a"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path):
    write_lines(tmp_path / "a", ["earlier"])
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match="Permission denied"):
        write_lines(tmp_path / "a", ["new"])
    assert read_lines(tmp_path / "a") == ["earlier"]
    tmp_path.chmod(0o700)


def test_places_that_are_no_files(tmp_path):
    (tmp_path / "a").write_text("x")
    with pytest.raises(DataError, match="cannot be written"):
        write_lines(tmp_path / "a" / "b", ["new"])
    with pytest.raises(DataError, match="no regular file"):
        write_lines(tmp_path, ["new"])
    (tmp_path / "link").symlink_to("a")
    write_lines(tmp_path / "link", ["through the link"])
    assert read_lines(tmp_path / "a") == ["through the link"] and (tmp_path / "link").is_symlink()


# Questions and scores


def test_what_a_model_gets_of_a_question():
    tokenizer = vocabulary(text for q in PEOPLE for text in (q.text, q.answer))
    assert [tokenizer.id(t) for t in (PAD, MARK, UNKNOWN)] == [0, 1, 2]
    assert (tokenizer.role("pad"), tokenizer.role("mask"), tokenizer.role("unknown")) == (0, 1, 2)
    block = 40
    x, y, visible, *_ = question_batch(tokenizer, PEOPLE, block)
    assert x.shape == y.shape == (2, block - 1) and visible is None
    for question, row, targets in zip(PEOPLE, x, y, strict=True):
        whole = f"{question.text}{MARK}{question.answer}{MARK}"
        assert tokenizer.decode(row) == (whole + PAD * block)[: block - 1]
        loss = targets != IGNORE
        assert tokenizer.decode(targets[loss]) == question.answer + MARK
        first = int(loss.nonzero()[0])
        assert tokenizer.decode(row[: first + 1]) == prompt(question) == question.text + MARK
        assert loss[first : first + len(question.answer) + 1].all() and loss.sum() == len(question.answer) + 1
    longest = max(len(q.text + q.answer) + 2 for q in PEOPLE)
    question_batch(tokenizer, PEOPLE, longest)
    with pytest.raises(
        DataError, match=f"question 2, 'Where was B. Li born\\?': {longest} tokens.*block has {longest - 1}"
    ):
        question_batch(tokenizer, PEOPLE, longest - 1)
    with pytest.raises(DataError, match="no answer"):
        question_batch(tokenizer, [Question("q")], block)
    with pytest.raises(DataError, match="special token"):
        question_batch(Characters("abc"), PEOPLE, block)


def test_marks_and_pads_of_a_user_are_unknown_not_ours():
    odd = Question(f"a{MARK}b{PAD}?", f"c{MARK}{PAD}d")
    tokenizer = vocabulary([odd.text, odd.answer])
    assert tokenizer.encode(prompt(odd)).count(1) == 1
    x = question_batch(tokenizer, [odd], 16).x
    assert tokenizer.decode(x[0]) == f"a{UNKNOWN}b{UNKNOWN}?{MARK}c{UNKNOWN}{UNKNOWN}d{MARK}" + PAD * 4
    rows, lengths = pack_documents(tokenizer, [odd.text, "abc"], 99)
    assert rows.tolist() == [tokenizer.encode(f"a{UNKNOWN}b{UNKNOWN}?"), [*tokenizer.encode("abc"), 0, 0]]
    assert lengths.tolist() == [5, 3]
    assert unseen(tokenizer, ["aé", f"é{MARK}x"]) == {"é": 2, MARK: 1, "x": 1}
    assert unseen(Bytes(), ["é"]) == {}


def test_documents_are_cut_and_padded():
    tokenizer = vocabulary(["abcdef"])
    rows, lengths = pack_documents(tokenizer, ["abcdef", "ab"], 4)
    assert lengths.tolist() == [4, 2]
    assert [tokenizer.decode(row) for row in rows] == ["abcd", f"ab{PAD}{PAD}"]
    for wrong in ([], ["a", ""]):
        with pytest.raises(DataError):
            pack_documents(tokenizer, wrong, 4)


def test_matches_baselines_and_intervals():
    assert exact_match(["Elm", "elm", "Elm ", ""], ["Elm", "Elm", "Elm", ""]) == [True, False, False, True]
    assert most_frequent(["b", "a", "c", "a", "b"]) == "b"
    for wrong in (lambda: exact_match(["a"], []), lambda: most_frequent([]), lambda: wilson(3, 2)):
        with pytest.raises(DataError):
            wrong()
    # Worked by hand from the formula.
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(0, 0) == (0, 1) and wilson(0, 9)[0] == 0 and wilson(9, 9)[1] == 1


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]), st.booleans()), min_size=1, max_size=60),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_calibration_and_coverage_do_not_depend_on_the_order_of_answers(pairs, bins, shuffler):
    confidence, right = zip(*pairs, strict=True)
    found, points = calibration(confidence, right, bins), coverage(confidence, right)
    again = list(pairs)
    shuffler.shuffle(again)
    confidence, right = zip(*again, strict=True)
    assert calibration(confidence, right, bins).error == pytest.approx(found.error)
    assert coverage(confidence, right) == points
    assert sum(b.n for b in found.bins) == len(pairs) and len(found.bins) <= bins
    assert points[-1] == (1.0, sum(right) / len(pairs))
    assert points == sorted(points)


def test_calibration_does_not_flatter_who_knows_nothing():
    """Always stating the share of right answers has no calibration error, and neither separation nor skill."""
    right = [True, False, False, False] * 5
    constant = calibration([0.25] * 20, right)
    assert (constant.error, constant.separation, constant.skill) == (0.0, 0.5, 0.0)
    knows = calibration([0.9 if r else 0.1 for r in right], right)
    assert knows.separation == 1.0 and knows.skill == pytest.approx(1 - 0.01 / (0.25 * 0.75))
    wrong = calibration([0.1 if r else 0.9 for r in right], right)
    assert wrong.separation == 0.0 and wrong.skill < 0
    nothing = calibration([1e-4] * 20, [False] * 20)
    assert nothing.error < 1e-3 and nothing.separation is None and nothing.skill is None


def test_calibration_by_hand():
    confidence = [i / 100 for i in range(100)]
    found = calibration(confidence, [c >= 0.5 for c in confidence])
    assert [b.n for b in found.bins] == [10] * 10 and [b.accuracy for b in found.bins] == [0.0] * 5 + [1.0] * 5
    assert found.bins[0].confidence == pytest.approx(0.045) and found.error == pytest.approx(0.25)
    assert calibration([0.5] * 4, [True, True, False, False]).error == 0
    assert coverage([0.9, 0.1, 0.9, 0.5], [True, False, True, False]) == [(0.5, 1.0), (0.75, 2 / 3), (1.0, 0.5)]
    for wrong in ([0.5], [0.5, float("nan")], [0.5, 1.5]):
        with pytest.raises(DataError):
            calibration(wrong, [True, False])


# Span corruption


def slow(document, cut, span, start, block, mark, pad):
    document = document[:cut]
    taken = document[start : start + span]
    row = [*document[:start], mark, *document[start + span :], mark, *taken]
    return row + [pad] * (block - len(row)), len(row)


@pytest.mark.parametrize("block", [9, 16, 37, 128])
@pytest.mark.parametrize("ignore", [True, False])
def test_corruption_is_what_the_slow_way_gives(block, ignore):
    source = torch.Generator().manual_seed(block)
    documents = torch.randint(3, 99, (211, 131), generator=source, dtype=torch.int32)
    lengths = torch.randint(1, 132, (211,), generator=source)
    seed = 5
    x, y, *_ = corrupt(documents, lengths, block, 1, 0, torch.Generator().manual_seed(seed), ignore_padding=ignore)
    draws = torch.rand(4, 211, generator=torch.Generator().manual_seed(seed))
    drawn = draw_spans(lengths, longest_cut(block), draws)
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (211, block - 1)
    for n, (cut, span, start) in enumerate(zip(*(t.tolist() for t in drawn), strict=True)):
        document = documents[n, : lengths[n]].tolist()
        assert cut <= min(len(document), block * 7 // 8) and cut >= min(4, len(document))
        assert 1 <= span <= cut and 0 <= start <= cut - span
        row, filled = slow(document, cut, span, start, block, 1, 0)
        assert x[n].tolist() == row[:-1]
        targets = row[1:]
        if ignore:
            targets[filled - 1 :] = [IGNORE] * (block - filled)
        assert y[n].tolist() == targets
        sequence = [*x[n].tolist(), row[-1]][:filled]
        first, second = (i for i, token in enumerate(sequence) if token == 1)
        assert sequence[:first] + sequence[second + 1 :] + sequence[first + 1 : second] == document[:cut]


def test_cuts_are_uniform_and_spans_a_quarter_on_average():
    n = 400_000
    draws = torch.rand(4, n, generator=torch.Generator().manual_seed(1))
    cut, span, start = draw_spans(torch.full((n,), 500), longest_cut(128), draws)
    counts = torch.bincount(cut, minlength=113)[4:]
    assert counts.sum() == n and len(counts) == 109
    expected = n / 109
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 109 + 5 * (2 * 109) ** 0.5
    assert (span / cut).mean().item() == pytest.approx(0.25, rel=0.01)
    for length in (4, 5, 11, 112):
        share = (span[cut == length] / length).double()
        assert share.mean().item() == pytest.approx(0.25, rel=0.02)
        assert 1 / 8 - 1 / length < share.min() and share.max() < 3 / 8 + 1 / length
    for length in (4, 5):
        counts = torch.bincount(start[(cut == length) & (span == 1)], minlength=length)
        expected = counts.sum() / length
        assert len(counts) == length and ((counts - expected) ** 2 / expected).sum() < length + 5 * (2 * length) ** 0.5


def test_a_share_of_the_documents_is_read_whole():
    n, block = 2000, 128
    documents = torch.randint(3, 99, (n, 131), generator=torch.Generator().manual_seed(1))
    lengths = torch.full((n,), 131)
    lengths[::2] = 40

    def cuts(share):
        x = corrupt(documents, lengths, block, 1, 0, torch.Generator().manual_seed(2), cut_share=share).x
        return (x > 1).sum(1)

    whole = lengths.clamp(max=longest_cut(block))
    assert torch.equal(cuts(0.0), whole)
    some, all_cut = cuts(0.25), cuts(1.0)
    is_whole = some == whole
    assert torch.equal(some[~is_whole], all_cut[~is_whole])  # the cuts are those of the same seed
    assert is_whole[1::2].float().mean().item() == pytest.approx(0.75 + 0.25 / 109, abs=0.04)


def test_a_draw_next_to_one_is_no_longer_than_the_longest_cut():
    draws = torch.full((4, 1), 1 - 2**-24)
    for block in (9, 16, 128):
        longest = longest_cut(block)
        cut, span, start = draw_spans(torch.tensor([500]), longest, draws)
        assert cut.item() == longest and start + span <= cut


def test_the_same_seed_gives_the_same_bits_and_short_documents_stay_whole():
    documents = torch.arange(3, 63).view(6, 10)
    lengths = torch.tensor([1, 2, 3, 4, 9, 10])
    first, again, other = (
        corrupt(documents, lengths, 32, 1, 0, torch.Generator().manual_seed(seed)) for seed in (7, 7, 8)
    )
    assert torch.equal(first.x, again.x) and torch.equal(first.y, again.y) and not torch.equal(first.x, other.x)
    assert ((first.x > 1).sum(1)[:4] == lengths[:4]).all()
    for block, spans in ((8, (0.1, 0.2)), (32, (0.0, 0.5)), (32, (0.5, 0.4)), (32, (0.5, 1.1))):
        with pytest.raises(DataError):
            corrupt(documents, lengths, block, 1, 0, torch.Generator(), spans)


def test_corruption_compiles_as_one_graph():
    documents, lengths = torch.randint(3, 99, (8, 50)), torch.randint(1, 51, (8,))
    drawn = draw_spans(lengths, longest_cut(32), torch.rand(4, 8))
    made = torch.compile(with_hole, fullgraph=True, backend="aot_eager")(documents, *drawn, 32, 1, 0)
    want = with_hole(documents, *drawn, 32, 1, 0)
    assert torch.equal(made.x, want.x) and torch.equal(made.y, want.y)


# Files of tokens

TEXT = "The cat  sat on the mät.\nIt was\n\na 日本語 cat's mat;\tand that was that.\r\n\r\nThe end, at last! " * 40


@pytest.mark.parametrize("kind", ["characters", "bytes", "bpe"])
@pytest.mark.parametrize("piece", [7, 100, 1 << 20])
def test_tokens_of_pieces_are_those_of_the_whole_text(kind, piece, tmp_path):
    if kind == "bpe":
        pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8", newline="")
    train, dev = write_tokens(tmp_path / "a.txt", tmp_path / "made", kind, 300, 0.8, piece=piece)
    found = np.concatenate([train.tokens, dev.tokens])
    assert found.tolist() == train.tokenizer.encode(TEXT) and train.tokenizer.decode(found) == TEXT
    assert len(train) == round(0.8 * len(found)) and train.tokens.dtype == np.uint16
    assert isinstance(train.tokens, np.memmap)
    names = ["dev.npy", "manifest.json", "tokenizer.json", "train.npy"]
    assert sorted(p.name for p in (tmp_path / "made").iterdir()) == names
    again = TokenFile.open(tmp_path / "made" / "dev.npy")
    assert again.tokens.tolist() == dev.tokens.tolist() and again.tokenizer.size == train.tokenizer.size


def test_a_tokenizer_may_be_given_and_wide_ids_fit(tmp_path):
    (tmp_path / "a.txt").write_text("abcabc")
    wide = Characters([chr(0x10000 + i) for i in range(70_000)] + ["a", "b", "c"])
    train, dev = write_tokens(tmp_path / "a.txt", tmp_path, wide)
    assert train.tokens.dtype == np.uint32 and train.tokens.tolist() == [70_000, 70_001, 70_002, 70_000]
    assert dev.tokens.tolist() == [70_001, 70_002]


def test_short_texts_train_and_empty_ones_are_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcd")
    train, dev = write_tokens(path, tmp_path / "made")
    assert (len(train), len(dev)) == (2, 2)
    batch = random_windows(train.tokens, 5, 128, torch.Generator().manual_seed(0))
    assert batch.x.tolist() == [[0]] * 5 and batch.y.tolist() == [[1]] * 5
    for text, message in (("", "is empty"), ("abc", "has 3 tokens")):
        path.write_text(text)
        with pytest.raises(DataError, match=f"a.txt {message}"):
            write_tokens(path, tmp_path / "made")
    assert TokenFile.open(tmp_path / "made" / "train.npy").tokens.tolist() == [0, 1]


def test_a_text_that_cannot_be_used_leaves_no_folder(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(DataError):
        write_tokens(tmp_path / "a.txt", tmp_path / "new" / "made")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_tokenizer_that_was_changed_is_told(tmp_path):
    (tmp_path / "a.txt").write_text("abcdabcd")
    write_tokens(tmp_path / "a.txt", tmp_path / "made")
    path = tmp_path / "made" / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(DataError, match=r"tokenizer\.json does not match its hash"):
        TokenFile.open(tmp_path / "made" / "train.npy")
    (tmp_path / "made" / "manifest.json").unlink()
    TokenFile.open(tmp_path / "made" / "train.npy")


def test_token_files_that_are_none(tmp_path):
    (tmp_path / "a.txt").write_text("abcdef")
    path = tmp_path / "x.npy"
    for wrong in (np.zeros(3), np.zeros((2, 2), np.uint16), np.array([{}], dtype=object)):
        np.save(path, wrong, allow_pickle=True)
        with pytest.raises(DataError, match=r"x\.npy"):
            TokenFile.open(path)
    path.write_bytes(b"no numpy")
    with pytest.raises(DataError, match=r"x\.npy cannot be read"):
        TokenFile.open(path)
    with pytest.raises(DataError, match=r"none\.npy cannot be read"):
        TokenFile.open(tmp_path / "none.npy")
    with pytest.raises(LookupError, match="Did you mean 'bytes'"):
        write_tokens(tmp_path / "a.txt", tmp_path, "byte")
    with pytest.raises(DataError, match="share = 1"):
        write_tokens(tmp_path / "a.txt", tmp_path, share=1)
    with pytest.raises(DataError, match="cannot be written"):
        write_tokens(tmp_path / "a.txt", tmp_path / "a.txt")


@given(st.integers(2, 60), st.integers(1, 70), st.integers(1, 5))
def test_all_windows_have_each_token_as_a_target_once(n, length, batch):
    tokens = np.arange(n, dtype=np.uint16)
    x, y = [], []
    for part in all_windows(tokens, length, batch):
        assert part.x.shape == part.y.shape and part.x.shape[1] == min(length, n - 1) and len(part.x) <= batch
        counts = part.y != IGNORE
        assert not part.x[~counts].any()
        x += part.x[counts].tolist()
        y += part.y[counts].tolist()
    assert y == list(range(1, n)) and x == list(range(n - 1))


def test_random_windows_start_everywhere():
    tokens = np.arange(100, dtype=np.uint16)
    batch = random_windows(tokens, 5000, 90, torch.Generator().manual_seed(0))
    assert torch.equal(batch.y, batch.x + 1) and torch.equal(
        batch.x - batch.x[:, :1], torch.arange(90).expand(5000, 90)
    )
    assert sorted(set(batch.x[:, 0].tolist())) == list(range(10)) and batch.y.max() == 99
    assert windows(tokens, 3, np.array([0, 96])).y.tolist() == [[1, 2, 3], [97, 98, 99]]
    with pytest.raises(DataError, match="expected 0 to 96"):
        windows(tokens, 3, np.array([97]))
    with pytest.raises(DataError):
        random_windows(tokens[:1], 2, 3, torch.Generator())


def test_byte_pairs_are_learned_from_pieces_too(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8", newline="")
    made = [write_tokens(tmp_path / "a.txt", tmp_path / str(p), "bpe", 290, piece=p)[0] for p in (50, 1 << 20)]
    assert all(isinstance(m.tokenizer, BPE) and m.tokenizer.size == 290 for m in made)
    assert made[0].tokens.tolist() == made[1].tokens.tolist()


def test_spans_of_whole_words():
    """The span is whole words, as far as the cut goes, and put back in its hole it gives the document."""
    texts = [
        "Ada Lovelace was born in Old Crailgrad in 1815.",
        "Erik Targavard, a poet, was born in Junerfield.",
        "one",
    ]
    tokenizer = vocabulary(texts)
    rows, lengths = pack_documents(tokenizer, texts, 112)
    space, source = tokenizer.encode(" ")[0], torch.Generator().manual_seed(0)
    for _ in range(200):
        x = corrupt(rows, lengths, 96, 1, 0, source, between=space).x
        for text, row in zip(texts, x, strict=True):
            prefix, suffix, span = tokenizer.decode(row.tolist()).rstrip(PAD).split(MARK)
            assert text.startswith(prefix + span + suffix) and span
            assert prefix == "" or prefix.endswith(" ")
            assert suffix == "" or suffix.startswith(" ")
