"""`regard check`: right attention passes, each mistake is named by its law, and the report can be acted on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import regard
from regard.checking import DRAWS
from regard.cli.app import app
from regard.errors import OptionError, PluginError, RegardError, UnknownNameError
from regard.laws import LAWS, Case

ROOT = Path(__file__).parents[2]
MUTANTS = ROOT / "tests" / "helpers" / "mutants.py"
LEAKY = ROOT / "examples" / "leaky_performer.py"

BROKEN_BY = {
    "RawScores": "rows",
    "ValuesScaled": "weights",
    "TiledHeads": "heads",
    "HalfState": "recurrent",
    "StepWithoutScale": "recurrent",
    "SharedState": "recurrent",
    "Epsilon": "rows",
    "OnlyTheLastWrite": "cross",
    "minus_ten_thousand": "hidden",
    "MinusBillion": "blind",
    "NanLeak": "blind",
    "ForgetsPadding": "batch",
    "BoastfulCost": "flops",
    "KernelForgetsPadding": "kernel",
    "KernelLeavesRows": "kernel",
    "WrongBackward": "gradients",
    "NoGradientForKeys": "gradients",
    "sees_next": "looks-ahead",
    "whole_sequence_maximum": "looks-ahead",
    "batch_statistics": "batch",
    "depends_on_row": "batch",
    "ignores_padding": "batch",
    "tiles": "heads",
    "wrong_gradient": "gradients",
    "wrong_shape": "heads",
    "unmasked_causal_module": "looks-ahead",
    "keys_tiled": "heads",
    "queries_reversed": "heads",
    "unscaled_single_query": "queries",
    "scaled_by_length": "queries",
    "off_by_one_for_fewer_queries": "queries",
    "reads_memory_as_contiguous": "batch",
    "forgets_after_a_thousand": "looks-ahead",
    "wrong_gradient_under_padding": "gradients",
    "DetachedState": "recurrent",
    "BatchSecond": "recurrent",
    "keeps_keys": "pure",
    "over_its_own_heads": "attends",
    "exp_without_maximum": "precision",
    "normalises_its_first_block": "averages",
    "falls_towards_itself": "positions",
}


def run(*args):
    return CliRunner().invoke(app, ["check", *map(str, args)])


@pytest.mark.parametrize("name", BROKEN_BY)
def test_a_mistake_is_named_by_its_law(name):
    result = run("--plugin", f"{MUTANTS}:{name}", "--only", BROKEN_BY[name], "--json")
    assert result.exit_code == 1, result.output
    (verdict,) = json.loads(result.output)
    assert verdict["status"] == "broken"
    assert "Error: " not in verdict["detail"]  # found by the law, not by an accident within it
    assert verdict["error"] == "inf" or verdict["error"] > verdict["limit"]


def test_every_law_is_broken_by_some_mutant():
    assert set(BROKEN_BY.values()) == set(LAWS)


@pytest.mark.parametrize("name", ["attention", "right_module", "right_for_fewer_queries"])
def test_right_attention_of_a_stranger_breaks_no_law(name):
    result = run("--plugin", f"{MUTANTS}:{name}", "--json")
    verdicts = json.loads(result.output)
    assert result.exit_code == 0, result.output
    kept = {v["law"] for v in verdicts if v["status"] == "holds"}
    always = {"looks-ahead", "batch", "gradients", "heads", "positions", "pure", "attends", "precision"}
    assert kept - {"queries", "averages"} == always
    assert "queries" in kept or name != "right_for_fewer_queries"


def test_a_mechanism_only_breaks_the_laws_it_should():
    broken = {v.law for v in regard.check(regard.plugin(f"{MUTANTS}:StepWithoutScale")).broken}
    assert broken == {"recurrent"}


def test_finds_by_itself_that_a_sequence_wide_stabiliser_looks_ahead():
    result = run("--plugin", LEAKY)
    assert result.exit_code == 1
    assert "breaks 'looks-ahead'" in result.output
    assert "print(LAWS['looks-ahead'](thing, case))" in result.output


def test_a_reproducer_is_five_lines_that_show_the_violation_again():
    (verdict,) = regard.check(regard.plugin(str(LEAKY)), only=["looks-ahead"]).broken
    assert len(verdict.reproducer.splitlines()) == 5
    shown = subprocess.run([sys.executable, "-c", verdict.reproducer], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("Finding(error=0.")
    assert f"{verdict.error:.4f}"[:5] in shown.stdout


def test_an_example_is_shrunk():
    (verdict,) = regard.check(regard.plugin(f"{MUTANTS}:sees_next"), only=["looks-ahead"]).broken
    case = verdict.case
    assert (case.B, case.T, case.H, case.G, case.K, case.V) == (1, 2, 1, 1, 1, 1)
    assert case.padding == "none" and case.window is None and not case.documents


def test_check_takes_names_classes_instances_functions_and_modules():
    only = ["looks-ahead"]
    built = regard.mechanism("performer", features=8, width=5)
    for thing in (
        "softmax",
        type(regard.mechanism("elu")),
        built,
        lambda q, k, v: q.new_zeros(*q.shape[:3], v.shape[3]),
    ):
        assert regard.check(thing, only=only, draws=4).ok


def test_options_that_nobody_would_heed_are_an_error():
    for thing in (lambda q, k, v, causal=True: v, regard.mechanism("softmax"), nn.Linear(4, 4)):
        with pytest.raises(OptionError, match="features: only a mechanism by its name or class"):
            regard.check(thing, features=12)
    with pytest.raises(OptionError, match="features: whole models have laws of their own"):
        regard.check(regard.GPT(vocabulary=5, width=8, layers=1, length=4, attention={"heads": 2}), features=12)


def test_an_instance_is_checked_at_the_sizes_it_was_built_for():
    built = regard.mechanism("synthesizer", heads=4, width=6, length=12)
    verdicts = regard.check(built, draws=6)
    assert verdicts.ok, verdicts


def test_a_module_over_tokens_that_is_not_causal_may_say_so():
    thing = regard.plugin(f"{MUTANTS}:unmasked_causal_module", causal=False)
    (verdict,) = regard.check(thing, only=["looks-ahead"])
    assert verdict.status == "does not apply"


def test_torch_multihead_attention_is_found_to_give_nan_for_a_row_that_sees_nothing():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, key_padding_mask=None):
            return self.inner(x, x, x, key_padding_mask=key_padding_mask, need_weights=True)[0]

    verdicts = {v.law: v for v in regard.check(Wrapped(), causal=False, only=["hidden", "blind", "batch"], draws=8)}
    assert verdicts["hidden"].status == "holds"
    assert verdicts["blind"].status == "noted"
    assert verdicts["batch"].status == "holds"


def test_zero_row_sums_are_reported():
    class Dead(regard.mechanisms()["linear"]):
        def __init__(self):
            super().__init__(phi=lambda x: x.relu() * 0)

    assert "rows" in {v.law for v in regard.check(Dead, only=["rows"]).broken}


def test_all_mechanisms_hold_and_the_table_says_so():
    result = run("--draws", 4)
    assert result.exit_code == 0
    for name in regard.mechanisms():
        assert name in result.output
    assert " 0 broken" in result.output


def test_single_mechanism_dtype_and_law():
    result = run("performer", "--dtype", "bf16", "--only", "looks-ahead", "--json")
    (verdict,) = json.loads(result.output)
    assert verdict["status"] == "holds" and verdict["error"] == 0
    assert verdict["draws"] <= DRAWS


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["performr"], ["performr", "Did you mean 'performer'?"]),
        (["softmax", "--only", "look-ahead"], ["look-ahead", "Did you mean 'looks-ahead'?"]),
        (["softmax", "--dtype", "int8"], ["int8", "float32"]),
        (["softmax", "--draws", "0"], ["draws = 0"]),
        (["--plugin", "nowhere.py"], ["nowhere.py", "file.py:name"]),
        (["--plugin", str(MUTANTS)], ["several things", ":name"]),
        (["--plugin", f"{MUTANTS}:tils"], ["tils", "Did you mean 'tiles'?"]),
        (["softmax", "--plugin", str(LEAKY)], ["not both"]),
        (["elu", "--like", "softmx"], ["--like softmx", "Did you mean 'softmax'?"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, fragments):
    done = subprocess.run([sys.executable, "-m", "regard", "check", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    for fragment in fragments:
        assert fragment in done.stderr


def test_errors_in_python_are_of_one_family():
    for call in (
        lambda: regard.check("performr"),
        lambda: regard.check("softmax", only=["nothing"]),
        lambda: regard.check("softmax", dtype="int8"),
        lambda: regard.check(3),
        lambda: regard.plugin("nowhere.py"),
    ):
        with pytest.raises(RegardError):
            call()
    assert issubclass(UnknownNameError, RegardError) and issubclass(OptionError, RegardError)


def test_a_plugin_that_cannot_be_imported_says_why(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import no_such_module_anywhere\n")
    with pytest.raises(PluginError, match="no_such_module_anywhere"):
        regard.plugin(str(file))


def test_a_mechanism_in_one_file_of_your_own(tmp_path):
    file = tmp_path / "cosine.py"
    file.write_text(
        "from torch.nn.functional import normalize\n"
        "from regard.mechanisms import Pairwise, register, scores\n"
        "from regard.shapes import Mask\n\n"
        "@register('cosine')\n"
        "class Cosine(Pairwise):\n"
        "    formula = 'softmax(8 cos(q, k)) v'\n"
        "    def weights(self, q, k, mask=Mask()):\n"
        "        return mask.softmax(8 * scores(normalize(q, dim=-1), normalize(k, dim=-1), mask))\n"
    )
    try:
        result = run("--plugin", file, "--json")
        assert result.exit_code == 0, result.output
        assert "cosine" in regard.mechanisms()
        x = torch.randn(1, 2, 5, 3)
        assert regard.attend(x, x, x, "cosine", causal=True).shape == x.shape
    finally:
        from regard.mechanisms import base

        base.MECHANISMS.pop("cosine", None)


def test_case_shows_only_what_differs():
    assert repr(Case(T=3, seed=4)) == "Case(T=3, seed=4)"


def test_mechanisms_command_lists_everything():
    result = CliRunner().invoke(app, ["mechanisms", "--json"])
    rows = {row["name"]: row for row in json.loads(result.output)}
    assert set(rows) == set(regard.mechanisms())
    assert all(row["formula"] and row["time"] and row["state"] for row in rows.values())
    assert rows["softmax"]["kernels"]["parallel"] == ["sdpa"]
    table = CliRunner().invoke(app, ["mechanisms"]).output
    assert all(name in table for name in rows)


def test_version():
    done = subprocess.run([sys.executable, "-m", "regard", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"regard {regard.__version__}\n"


def test_what_is_checked_stays_as_it_was():
    for thing in (
        regard.mechanism("synthesizer", heads=2, width=3, length=12),
        nn.Linear(5, 5),
        regard.GPT.preset("nano"),
    ):
        thing.train()
        before = {n: x.clone() for n, x in thing.state_dict().items()}
        regard.check(thing, draws=4, only=["batch"])
        assert thing.training
        for n, x in thing.state_dict().items():
            assert x.dtype == before[n].dtype and torch.equal(x, before[n])


def slipped(scale=True, axis=-1, causal_is=None, lower=True, repeat=torch.repeat_interleave):
    """Softmax attention by hand, with one slip or none."""

    def by_hand(q, k, v, causal=True):
        times = q.shape[1] // k.shape[1]
        scores = q @ repeat(k, times, 1).mT / (q.shape[-1] ** 0.5 if scale else 1)
        if causal if causal_is is None else causal_is:
            may = torch.ones(scores.shape[-2:], dtype=torch.bool)
            scores = scores.masked_fill(~(may.tril() if lower else may.triu()), float("-inf"))
        return scores.softmax(axis) @ repeat(v, times, 1)

    return by_hand


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        ({"scale": False}, "is the factor 1/√K missing?"),
        ({"axis": -2}, "the softmax belongs over the keys"),
        ({"causal_is": False}, "is causal=True ignored?"),
        ({"causal_is": True}, "is causal=False ignored?"),
        ({"lower": False}, "is the mask transposed?"),
        ({"repeat": lambda x, times, axis: x.repeat(1, times, 1, 1)}, "query head h needs head h // (H/G)"),
    ],
)
def test_a_slip_is_named_in_words(slip, words):
    (verdict,) = regard.check(slipped(**slip), like="softmax", only=["same"])
    assert verdict.status == "broken" and words in verdict.detail


def test_what_computes_the_same_is_found_to():
    (verdict,) = regard.check(slipped(), like="softmax", only=["same"])
    assert verdict.status == "holds"
    other = lambda q, k, v, causal=True: regard.attend(q, k, v, "elu", causal=causal)  # noqa: E731
    assert regard.check("elu", like=other, only=["same"]).ok
    layer = nn.Linear(5, 5)
    assert regard.check(layer, like=layer, only=["same"], draws=2).ok
    assert regard.check(layer, like=nn.Linear(5, 5), only=["same"], draws=2).broken


def test_another_mechanism_is_not_the_same_and_no_slip_is_invented():
    (verdict,) = regard.check("argmax", like="softmax", only=["same"])
    assert verdict.status == "broken" and "those of" not in verdict.detail
    assert len(verdict.reproducer.splitlines()) == 5
    shown = subprocess.run([sys.executable, "-c", verdict.reproducer], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("Finding(error=") and f"{verdict.error:.4f}"[:5] in shown.stdout


def test_padding_is_compared_too():
    def averages_blind_rows(q, k, v, causal=True, visible=None):
        bias = None if visible is None else torch.where(visible, 0.0, -1e9)[:, None, None]
        return regard.attend(q, k, v, causal=causal, bias=bias)

    (verdict,) = regard.check(averages_blind_rows, like="softmax", only=["same"], blind_zeros=True)
    assert verdict.status == "broken" and verdict.detail == "outputs with padding"

    def drops_the_mask(q, k, v, causal=True, visible=None):
        return regard.attend(q, k, v, causal=causal)

    (verdict,) = regard.check(drops_the_mask, like="softmax", only=["same"])
    assert verdict.status == "broken" and verdict.detail.startswith("outputs with padding")
    assert "is the mask of visible keys ignored?" in verdict.detail


def test_a_choice_of_laws_keeps_the_comparison():
    assert [v.law for v in regard.check("elu", like="softmax", only=["looks-ahead"], draws=2)] == [
        "looks-ahead",
        "same",
    ]
    assert [v.law for v in regard.check("elu", like="softmax", only=["same"], draws=2)] == ["same"]
    result = run("softmax", "--like", "elu", "--only", "looks-ahead", "--draws", "2")
    assert result.exit_code == 1 and "breaks 'same'" in result.output


def test_like_needs_something_comparable():
    with pytest.raises(OptionError, match="whole models have laws of their own"):
        regard.check(regard.GPT.preset("nano"), like="softmax")
    with pytest.raises(OptionError, match="Linear cannot be compared with <lambda>"):
        regard.check(nn.Linear(5, 5), like=lambda q, k, v, causal=True: v)
    (verdict,) = regard.check(nn.Linear(5, 5), like="softmax", only=["same"], draws=2)
    assert verdict.status == "could not be asked" and "takes tokens" in verdict.detail
    with pytest.raises(UnknownNameError):
        regard.check("softmax", like="softmx")
    with pytest.raises(UnknownNameError, match="same"):
        regard.check("softmax", only=["same"])


def test_what_depends_on_the_length_looks_ahead():
    def scaled_by_length(q, k, v):
        return regard.attend(q * q.shape[2], k, v, causal=True)

    (verdict,) = regard.check(scaled_by_length, only=["looks-ahead"])
    assert verdict.status == "broken" and "without the rest" in verdict.detail


def test_verdicts_are_told_in_words():
    told = str(regard.check(slipped(scale=False), like="softmax", only=["same", "heads"], draws=6))
    first, second, last = told.splitlines()
    assert first == "✗ by_hand breaks 'same': gives what softmax gives on the same inputs"
    assert second.startswith("  outputs (those of softmax with q multiplied by √K") and ", allowed 1.0e-" in second
    assert last == "✓ by_hand keeps heads"
    assert str(regard.check("elu", only=["kernel"], draws=2)[0]).startswith(("✓ elu, 'kernel': ", "– elu, 'kernel': "))


class Coursework(nn.Module):
    """Multi-head attention as it is taught: forward(Q, K, V, mask), with 0 in the mask for what is hidden."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, Q, K, V, mask=None):
        Q, K, V = self.split(self.W_q(Q)), self.split(self.W_k(K)), self.split(self.W_v(V))
        scores = Q @ K.transpose(-2, -1) / Q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return self.W_o((scores.softmax(-1) @ V).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Causal self-attention with a mask of a fixed size, as in nanoGPT."""

    def __init__(self, width=20, heads=2, block_size=16):
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.register_buffer("tril", torch.ones(block_size, block_size).tril())

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.project(x).split(C, 2))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C)


class OnlyOneLength(nn.Module):
    """Takes exactly `length` tokens, as a module that learned its weights does."""

    def __init__(self, length, width):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(length, length))
        self.values = nn.Linear(width, width)

    def forward(self, x):
        T = len(self.scores)
        allowed = torch.ones(T, T, dtype=torch.bool).tril()
        return self.scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ self.values(x)


def over_batches(q, k, v):
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) / q.shape[-1] ** 0.5, -1), v)


def softmax_in_float32(q, k, v, causal=True):
    scores = (q @ k.mT / q.shape[-1] ** 0.5).float()
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v


def only_float32(q, k, v, causal=True):
    T = q.shape[2]
    added = torch.zeros(T, T)
    if causal:
        added = torch.full((T, T), float("-inf")).triu(1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added)


RIGHT = {
    "coursework": lambda: Coursework(24, 4),
    "nn.MultiheadAttention": lambda: nn.MultiheadAttention(24, 4),
    "nn.MultiheadAttention, batch first": lambda: nn.MultiheadAttention(24, 4, batch_first=True),
    "block": Block,
    "over batches": lambda: over_batches,
    "softmax in float32": lambda: softmax_in_float32,
    "only float32": lambda: only_float32,
    "builtin": lambda: torch.nn.functional.scaled_dot_product_attention,
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_attention_is_never_accused(name):
    torch.manual_seed(0)
    verdicts = regard.check(RIGHT[name](), draws=8)
    assert verdicts.ok and verdicts.asked and not verdicts.problems, str(verdicts)
    assert {"batch", "heads"} <= {v.law for v in verdicts.having("holds")}


def test_a_module_of_one_length_is_asked_at_that_length():
    verdicts = regard.check(OnlyOneLength(6, 10), length=6, causal=True, draws=4)
    assert verdicts.ok and "looks-ahead" in {v.law for v in verdicts.having("holds")}, str(verdicts)
    verdicts = regard.check(OnlyOneLength(6, 10), draws=4)
    assert not verdicts.asked and "length=" in verdicts.problems[0]


def test_an_exception_is_no_broken_law(tmp_path):
    file = tmp_path / "homework.py"
    file.write_text("def attend(q, k, v, causal=True):\n    return q @ k\n")
    result = run("--plugin", file)
    assert result.exit_code == 2 and "breaks" not in result.output
    text = " ".join(result.output.split())
    assert "attend(q [7, 3, 5, 6]" in text and "homework.py, line 2" in text and "q [B,H,T,K]" in text
    (first, *_) = json.loads(run("--plugin", file, "--json").output)
    assert first["status"] == "could not be asked"


def test_an_exception_now_and_then_leaves_the_other_cases(tmp_path):
    def raises_for_one_token(q, k, v, causal=True):
        if q.shape[2] == 1:
            raise RuntimeError("one token")
        return softmax_in_float32(q.double(), k.double(), v.double(), causal).to(q.dtype)

    verdicts = regard.check(raises_for_one_token)
    assert verdicts.ok and verdicts.asked


def test_masks_are_understood_by_what_they_do():
    def pairs(q, k, v, mask):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~mask)

    def added(q, k, v, attn_mask=None):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)

    for f in (pairs, added):
        verdicts = regard.check(f, draws=8)
        kept = {v.law for v in verdicts.having("holds")}
        assert verdicts.ok and {"looks-ahead", "hidden", "batch"} <= kept, str(verdicts)


def test_rows_that_see_nothing_are_noted_of_strangers_only():
    verdicts = regard.check(regard.plugin(f"{MUTANTS}:lets_nan_through"), only=["blind"])
    assert verdicts.ok and verdicts[0].status == "noted"


def test_what_attends_both_ways_by_design_is_not_accused_of_looking_ahead():
    verdicts = regard.check(over_batches, draws=4)
    assert verdicts.ok and "attends in both directions" in str(verdicts)
    assert not regard.check(over_batches, causal=True, only=["looks-ahead"], draws=8).ok


def test_like_on_the_command_line_and_what_is_not_asked_without_it():
    unscaled = f"{MUTANTS}:unscaled"
    without = run("--plugin", unscaled)
    assert without.exit_code == 0 and "--like softmax" in without.output
    result = run("--plugin", unscaled, "--like", "softmax", "--only", "same")
    assert result.exit_code == 1 and "is the factor 1/√K missing?" in " ".join(result.output.split())


def test_the_weights_of_anybodys_attention_are_seen_through_one_hot_values():
    q, k = torch.randn(2, 4, 9, 6), torch.randn(2, 2, 9, 6)
    exact = regard.mechanism("softmax").weights(q, k, regard.Mask(causal=True))

    def grouped(q, k, v, causal):
        times = q.shape[1] // k.shape[1]
        return softmax_in_float32(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1), causal)

    assert torch.allclose(regard.weights_of(grouped, q, k, causal=True), exact, atol=1e-6)
    assert torch.allclose(regard.weights_of(regard.attend, q, k, causal=True), exact, atol=1e-6)
    with pytest.raises(RegardError, match=r"f gave \[2, 9, 24\]"):
        regard.weights_of(lambda q, k, v: regard.attend(q, k, v).transpose(1, 2).flatten(2), q, k)


def test_the_laws_are_adopted_in_one_line():
    from regard.testing import assert_lawful

    assert_lawful(softmax_in_float32, like="softmax", draws=4)
    with pytest.raises(AssertionError) as failure:
        assert_lawful(regard.plugin(f"{MUTANTS}:sees_next"), only=["looks-ahead"])
    assert "breaks 'looks-ahead'" in str(failure.value) and "print(LAWS['looks-ahead'](thing, case))" in str(
        failure.value
    )
    with pytest.raises(AssertionError, match="raised"):
        assert_lawful(lambda q, k, v: q @ k)


def test_what_a_query_gets_that_sees_nothing_is_everybodys_own_affair():
    def average(q, k, v, causal=True, visible=None):
        raw = q @ k.mT / q.shape[-1] ** 0.5
        may = torch.ones(raw.shape[-2:], dtype=torch.bool)
        if causal:
            may = may.tril()
        if visible is not None:
            may = may & visible[:, None, None, :]
        return raw.masked_fill(~may, -1e9).softmax(-1) @ v

    assert regard.check(average, like="softmax", draws=8).ok
    broken = regard.check(average, like="softmax", draws=8, blind_zeros=True).broken
    assert {v.law for v in broken} == {"blind", "same"}


def test_a_sum_over_all_keys_is_a_leak_though_nobody_said_causal():
    def scan(q, k, v):
        q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
        sums = torch.cumsum(k[..., :, None] * v[..., None, :], dim=2)
        return torch.einsum("bhtf,bhtfv->bhtv", q, sums) / (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)

    assert [v.law for v in regard.check(scan, draws=4, only=["looks-ahead"]).broken] == ["looks-ahead"]
