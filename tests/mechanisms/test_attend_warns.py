"""`regard.attend` says when random features cannot follow softmax: once, with what to do, and only if it may read."""

import importlib
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import regard
from regard.lab.approximate import relative_variance

reach = importlib.import_module("regard.mechanisms.reach")  # regard.mechanisms is a function, too
NAMES = ("performer", "fourier")
random_features = pytest.mark.parametrize("name", NAMES)


def inputs(size, K=64, N=48, seed=0):
    """q, k and v of one head, q and k of the standard deviation `size`."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 2, N, K, generator=draw)
    return size * q, size * k, v


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No mechanism has been judged yet, whatever tests ran before."""
    monkeypatch.setattr(reach, "_SETTLED", set())


def told(run):
    """The warnings that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in caught]


def attend(name, size, **options):
    return lambda: regard.attend(*inputs(size), name, **options)


@random_features
def test_it_warns_exactly_once_for_each_mechanism_and_says_what_to_do(name):
    (said,) = told(attend(name, 1.0))
    assert name in said and "\n" not in said
    assert all(way in said for way in ("smaller", "more features", "softmax"))
    assert told(attend(name, 1.0)) == []
    (other,) = set(NAMES) - {name}
    assert len(told(attend(other, 1.0))) == 1


def test_the_warning_points_at_the_line_that_attends():
    with pytest.warns(UserWarning, match="performer") as caught:
        attend("performer", 1.0)()
    assert Path(caught[0].filename) == Path(__file__)


@random_features
def test_small_inputs_are_no_news_and_do_not_use_up_the_warning(name):
    assert told(attend(name, 0.3)) == []
    assert len(told(attend(name, 1.0))) == 1


@random_features
def test_more_features_follow_further(name):
    assert told(attend(name, 0.55, features=4096)) == []
    assert len(told(attend(name, 0.55, features=64))) == 1


@random_features
def test_one_already_built_is_judged_too_and_others_never(name):
    assert told(lambda: regard.attend(*inputs(5.0), "elu")) == []
    assert told(lambda: regard.attend(*inputs(5.0))) == []
    assert len(told(lambda: regard.attend(*inputs(1.0), regard.mechanism(name)))) == 1


@random_features
def test_mechanisms_and_models_do_not_warn(name):
    q, k, v = inputs(1.0)
    assert told(lambda: regard.mechanism(name)(q, k, v)) == []
    assert told(lambda: regard.GPT.preset("nano", vocabulary=12, mechanism=name)(torch.zeros(1, 8).long())) == []


@random_features
def test_hidden_keys_and_undefined_queries_do_not_count(name):
    q, k, v = inputs(0.3)
    visible = torch.ones(1, k.shape[2], dtype=torch.bool)
    visible[:, :40] = False
    k[:, :, :40] = 100.0
    q[:, :, :8] = math.nan
    assert told(lambda: regard.attend(q, k, v, name, visible=visible)) == []
    assert len(told(lambda: regard.attend(q, k, v, name))) == 1


@pytest.mark.parametrize(("name", "sign"), [("performer", -1), ("fourier", 1)])
def test_a_part_that_all_share_counts_as_the_law_says(name, sign):
    """‖x+y‖² of performer is small where q and k lie opposite, ‖x−y‖² of fourier where they lie together."""
    q, k, v = inputs(0.3)
    assert told(lambda: regard.attend(q + 1, k + sign, v, name)) == []
    assert len(told(lambda: regard.attend(q + 1, k - sign, v, name))) == 1


@random_features
def test_nothing_to_attend_is_no_news(name):
    q, k, v = inputs(1.0)
    assert told(lambda: regard.attend(q[:, :, :0], k, v, name)) == []
    assert told(lambda: regard.attend(q, k[:, :, :0], v[:, :, :0], name)) == []


@random_features
def test_grouped_and_half_precision_inputs_are_judged(name):
    q, k, v = (x.bfloat16() for x in inputs(1.0))
    assert len(told(lambda: regard.attend(q, k[:, :1], v[:, :1], name))) == 1


# Where nothing may be read


@random_features
def test_it_is_silent_under_compile_and_breaks_no_graph(name):
    one = regard.mechanism(name, width=64)
    compiled = torch.compile(lambda q, k, v: regard.attend(q, k, v, one), backend="eager", fullgraph=True)
    assert told(lambda: compiled(*inputs(1.0))) == []


@random_features
def test_it_is_silent_for_meta_and_fake_tensors(name):
    one = regard.mechanism(name, width=64)
    q, k, _ = (x.to("meta") for x in inputs(1.0))  # no linear mechanism runs there, so the judgement is asked alone
    assert told(lambda: reach.warn_if_inaccurate(one, q, k, None)) == []
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) for x in inputs(1.0)]
        assert told(lambda: regard.attend(*fake, regard.mechanism(name, width=64))) == []
    assert told(lambda: regard.attend(*fake, one)) == []


@random_features
def test_it_is_silent_under_functional_transforms_and_tracing(name):
    one = regard.mechanism(name, width=64)
    run = lambda q, k, v: regard.attend(q, k, v, one)  # noqa: E731
    stacked = [torch.stack([x, x]) for x in inputs(1.0)]
    assert told(lambda: torch.func.vmap(run)(*stacked)) == []
    assert told(lambda: torch.func.grad(lambda q, k, v: run(q, k, v).sum())(*inputs(1.0))) == []
    assert told(lambda: make_fx(run)(*inputs(1.0))) == []


@random_features
def test_gradients_do_not_pass_through_the_judgement(name):
    q, k, v = (x.requires_grad_() for x in inputs(0.3))
    one = regard.mechanism(name, width=64)
    (regard.attend(q, k, v, one).sum() - one(q, k, v).sum()).backward()
    assert all(float(x.grad.abs().max()) == 0 for x in (q, k, v))


# The criterion


def median_error(name, size, K, F, draws=4):
    """‖estimate − softmax‖ / ‖softmax‖, median over queries and draws."""
    found = []
    for seed in range(draws):
        q, k, v = inputs(size, K, 128, seed)
        exact = regard.attend(q, k, v)
        out = regard.mechanism(name, features=F, width=K, seed=seed)(q, k, v)
        found.append(((out - exact).norm(dim=-1) / exact.norm(dim=-1)).flatten())
    return float(torch.cat(found).median())


@random_features
@pytest.mark.parametrize("K", [4, 16, 64, 128])
@pytest.mark.parametrize("F", [64, 256, 1024])
def test_it_warns_where_the_error_is_large_and_not_where_it_is_small(name, K, F, monkeypatch):
    kinds = set()
    for size in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.4, 2.0):
        monkeypatch.setattr(reach, "_SETTLED", set())
        q, k, v = inputs(size, K, 128)
        warned = bool(told(lambda q=q, k=k, v=v: regard.attend(q, k, v, name, features=F)))
        error = median_error(name, size, K, F)
        assert not (warned and error <= 0.15), f"a warning at σ = {size}, where the error is {error:.0%}"
        assert warned or error < 0.5, f"silence at σ = {size}, where the error is {error:.0%}"
        kinds.add(warned)
    assert kinds == {False, True}


def test_the_table_shown_is_what_is_measured_and_bold_where_it_warns(monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "mechanisms.md").read_text()
    sizes = [float(x) for x in re.findall(r"σ = ([\d.]+)", re.search(r"^\| \| F \|.*$", text, re.M)[0])]
    rows = re.findall(r"^\| `(\w+)`, K = (\d+) \| ([\d,]+) \| (.*) \|$", text, re.M)
    assert len(rows) == 12
    for name, K, F, cells in rows:
        K, F = int(K), int(F.replace(",", ""))
        for size, cell in zip(sizes, cells.split(" | "), strict=True):
            monkeypatch.setattr(reach, "_SETTLED", set())
            q, k, v = inputs(size, K, 128)
            warned = bool(told(lambda q=q, k=k, v=v, name=name, F=F: regard.attend(q, k, v, name, features=F)))
            assert warned == cell.startswith("**"), (name, K, F, size)
            assert float(cell.strip("*")) == pytest.approx(median_error(name, size, K, F), rel=0.1), (name, K, F, size)


@random_features
@pytest.mark.parametrize("F", [1, 64, 1024])
def test_the_limit_is_where_the_law_of_the_variance_reaches_it(name, F):
    """The law of independent directions: with blocks of K = 1 none is orthogonal to another."""
    s = torch.tensor(reach.largest_distance(regard.mechanism(name, features=F)), dtype=torch.float64)
    deviation = relative_variance(name, s, F, 1).sqrt()
    assert math.isclose(deviation, reach.DEVIATION, rel_tol=1e-9)
