"""Every mechanism at the edges of its inputs: nothing to attend to, numbers that are none, other dtypes and modes."""

import math

import pytest
import torch
from torch.autograd import forward_ad

import regard
from regard.errors import LengthError, NegativeSimilarityError
from regard.kernels import fast, plain
from regard.mechanisms import AnyFeatures, Elu, Linear, fitted, mechanism
from regard.shapes import Mask, Size

# What needs an order of tokens has a file of its own, test_recurrence.py.
NAMES = [name for name, cls in regard.mechanisms().items() if not cls.causal_only]
LINEAR = [name for name, cls in regard.mechanisms().items() if issubclass(cls, Linear)]
PAIRWISE = [name for name in NAMES if name not in LINEAR]
RANDOM = ["performer", "fourier"]
NAN = float("nan")


def build(name, length=16, **options):
    torch.manual_seed(0)
    if name in RANDOM:
        options.setdefault("features", 16)
    return fitted(name, Size(T=length, S=length, H=4, G=2, K=8, V=5), **options)


def inputs(m, T=6, B=2, S=None, dtype=torch.float32, device="cpu"):
    """Returns q, k and v, None for what the mechanism does without."""
    torch.manual_seed(1)
    S = T if S is None else S
    q = torch.randn(B, 4, T, 8, dtype=torch.float64).to(device, dtype)
    k = torch.randn(B, 2, S, 8, dtype=torch.float64).to(device, dtype)
    v = torch.randn(B, 2, S, 5, dtype=torch.float64).to(device, dtype)
    return q if "q" in m.needs else None, k if "k" in m.needs else None, v


def size(B=2, S=16, **changes):
    return Size(B=B, S=S, H=4, G=2, K=8, V=5, **changes)


class TestNothingToAttendTo:
    @pytest.mark.parametrize("how", [plain, fast])
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize(("B", "T"), [(0, 6), (2, 0)])
    def test_a_whole_sequence_has_an_empty_output_and_empty_gradients(self, name, how, B, T):
        m = how(build(name))
        documents = torch.zeros(B, T, dtype=torch.long)
        visible = torch.ones(B, T, dtype=torch.bool)
        masks = (Mask(), Mask(causal=True), Mask(causal=True, window=2), Mask(True, visible, documents=documents))
        for mask in masks:
            given = inputs(m, T, B)
            learned = [x.requires_grad_() for x in given if x is not None]
            out = m(*given, mask)
            assert out.shape == (B, 4, T, 5)
            out.sum().backward()
            assert all(x.grad is None or x.grad.shape == x.shape for x in learned)

    @pytest.mark.parametrize("how", [plain, fast])
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize(("B", "T"), [(0, 6), (2, 0)])
    def test_a_state_and_the_weights_are_empty_too(self, name, how, B, T):
        m = how(build(name))
        out, state = m.extend(*inputs(m, T, B), m.empty(size(B)))
        assert out.shape == (B, 4, T, 5)
        out, state = m.extend(*inputs(m, 1, B), state)
        assert out.shape == (B, 4, 1, 5)
        q = torch.randn(B, 4, T, 8)
        k = torch.randn(B, 2, T, 8)
        assert m.weights(q, k, Mask(causal=True)).shape == (B, 4, T, T)
        if m.crosses:
            assert m.read(q, state).shape == (B, 4, T, 5)

    @pytest.mark.parametrize("how", [plain, fast])
    @pytest.mark.parametrize("name", ["softmax", "argmax", *LINEAR])
    def test_queries_without_keys_get_zeros(self, name, how):
        m = how(build(name))
        out = m(*inputs(m, 3, S=0))
        assert out.shape == (2, 4, 3, 5) and not out.any()

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize(("B", "T"), [(0, 6), (2, 0)])
    def test_so_are_layers_and_functions(self, name, B, T):
        layer = regard.nn.Attention(16, 4, G=2, causal=True, mechanism=name, length=8)
        assert layer(torch.randn(B, T, 16)).shape == (B, T, 16)
        out, _ = layer.extend(torch.randn(B, T, 16), layer.empty(B, 8))
        assert out.shape == (B, T, 16)
        q = torch.randn(B, 4, T, 8)
        k = torch.randn(B, 2, T, 8)
        assert regard.attend(q, k, k, name, causal=True).shape == (B, 4, T, 8)
        if name == "softmax":
            assert regard.weights_of(regard.attend, q, k).shape == (B, 4, T, T)


class TestNotANumber:
    """A token that holds NaN or infinity reaches no row that may not see it."""

    @pytest.mark.parametrize("bad", [NAN, math.inf])
    @pytest.mark.parametrize("which", [1, 2])
    @pytest.mark.parametrize("name", NAMES)
    def test_a_later_token_reaches_no_earlier_row_of_the_reference(self, name, which, bad):
        m = plain(build(name, 300))
        for T, at in ((7, 4), (300, 200)):  # within one chunk of linear attention, and past it
            given = inputs(m, T)
            if given[which] is None:
                continue
            wanted = m(*given, Mask(causal=True))
            given[which][1, :, at] = bad
            learned = [x.requires_grad_() for x in given if x is not None]
            for mask in (Mask(causal=True), Mask(causal=True, window=3)):
                out = m(*given, mask)
                if mask.window is None:
                    torch.testing.assert_close(out[1, :, :at], wanted[1, :, :at])
                    assert not out[1, :, at:].isfinite().any()
                assert out[0].isfinite().all() and out[1, :, :at].isfinite().all()
                if name == "argmax":
                    continue
                out[1, :, :at].sum().backward()
                for x in learned:
                    assert x.grad is None or x.grad[1, :, :at].isfinite().all()
                    x.grad = None

    @pytest.mark.parametrize("name", LINEAR)
    def test_a_state_keeps_it_for_all_tokens_to_come(self, name):
        m = plain(build(name))
        q, k, v = inputs(m, 6)
        v[0, :, 2] = NAN
        state = m.empty(size())
        outs = []
        for part in (slice(0, 4), slice(4, 6)):
            out, state = m.extend(q[:, :, part], k[:, :, part], v[:, :, part], state)
            outs.append(out)
        out = torch.cat(outs, 2)
        assert out[0, :, :2].isfinite().all() and out[0, :, 2:].isnan().all() and out[1].isfinite().all()

    @pytest.mark.parametrize("how", [plain, fast])
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("name", NAMES)
    def test_it_stays_within_its_document(self, name, causal, how):
        m = how(build(name))
        documents = torch.tensor([[0] * 5 + [1] * 4 + [2] * 7] * 2)
        mask = Mask(causal, documents=documents)
        wanted = m(*inputs(m, 16), mask)
        for which in (1, 2):
            given = inputs(m, 16)
            if given[which] is None:
                continue
            given[which][0, :, 6] = NAN
            out = m(*given, mask)
            others = [*range(5), *range(9, 16)]
            torch.testing.assert_close(out[0][:, others], wanted[0][:, others])
            torch.testing.assert_close(out[1], wanted[1])
            assert out[0, :, 6:9].isnan().all()
            if causal:
                torch.testing.assert_close(out[0, :, 5], wanted[0, :, 5])

    @pytest.mark.parametrize("name", LINEAR)
    def test_documents_that_cross_a_chunk_are_kept_apart(self, name):
        m = plain(build(name, 300))
        documents = (torch.arange(300) >= 140).long().expand(2, 300)
        wanted = m(*inputs(m, 300), Mask(True, documents=documents))
        q, k, v = inputs(m, 300)
        v[0, :, 100] = NAN
        out = m(q, k, v, Mask(True, documents=documents))
        torch.testing.assert_close(out[0, :, 140:], wanted[0, :, 140:])
        assert out[0, :, 100:140].isnan().all()

    @pytest.mark.parametrize("name", LINEAR)
    def test_weights_of_earlier_rows_are_those_without_it(self, name):
        m = build(name)
        q, k, _ = inputs(m)
        wanted = m.weights(q, k, Mask(causal=True))
        k[:, :, 4] = NAN
        torch.testing.assert_close(m.weights(q, k, Mask(causal=True))[:, :, :4], wanted[:, :, :4])


class TestElu:
    @pytest.mark.parametrize("at", [-5.0, -10.0, -17.0, -50.0, -200.0, -5000.0])
    @pytest.mark.parametrize("causal", [True, False])
    def test_inputs_far_below_zero_keep_their_digits(self, at, causal):
        m = plain(mechanism("elu"))
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 3, 150, 6, dtype=torch.float64) for _ in range(3))
        q, k = (x - x.amax(-1, keepdim=True) + at for x in (q, k))
        # Differences between keys are as large as they are; all of them are shifted, which cancels in the ratio.
        similarities = (q - at).exp() @ (k - at).exp().mT
        if causal:
            similarities = similarities.tril()
        wanted = similarities / similarities.sum(-1, keepdim=True) @ v
        q, k, v = (x.float().requires_grad_() for x in (q, k, v))
        out = m(q, k, v, Mask(causal=causal))
        assert (out - wanted).abs().max() < 3e-6 * (1 + abs(at) / 10)
        out.square().sum().backward()
        assert all(x.grad.isfinite().all() and x.grad.any() for x in (q, k, v))

    def test_it_is_elu_plus_one(self):
        x = torch.linspace(-12, 5, 300, dtype=torch.float64).view(1, 1, 100, 3).requires_grad_()
        psi, c = mechanism("elu").features(x)
        wanted = torch.nn.functional.elu(x) + 1
        torch.testing.assert_close(psi * c.exp()[..., None], wanted)
        slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (psi * c.exp()[..., None], wanted)]
        torch.testing.assert_close(*slopes)

    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which forward mode itself uses
    def test_its_derivatives_are_those_of_the_formula_to_any_order_and_both_ways(self):
        torch.manual_seed(0)
        x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
        x[0] -= 30  # negative throughout: scaled
        x.requires_grad_()
        m = mechanism("elu")

        def formula(x):
            c = x.detach().amax(-1, keepdim=True).clamp(max=0)
            return x.relu() + torch.exp(x.clamp(max=0) - c)

        found = []
        for psi in (formula(x), m.features(x)[0]):
            first = torch.autograd.grad(psi.sin().sum(), x, create_graph=True)[0]
            found.append([psi, first, torch.autograd.grad(first.square().sum(), x)[0]])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
            tangents = [forward_ad.unpack_dual(psi).tangent for psi in (formula(dual), m.features(dual)[0])]
        torch.testing.assert_close(*tangents)


class TestSynthesizerLengths:
    """A synthesizer built for four tokens takes documents and rows of up to four visible tokens, and no longer ones."""

    @pytest.mark.parametrize("B", [1, 2])
    @pytest.mark.parametrize("how", [plain, fast])
    @pytest.mark.parametrize("name", ["synthesizer", "synthesizer-random"])
    def test_documents_are_measured_one_by_one(self, name, how, B):
        m = how(build(name, 4))
        two = torch.tensor([[0, 0, 0, 1, 1, 1]] * B)
        given = inputs(m, 6, B)
        out = m(*given, Mask(True, documents=two))
        for part in (slice(0, 3), slice(3, 6)):
            alone = m(*(None if x is None else x[:, :, part] for x in given), Mask(True))
            torch.testing.assert_close(out[:, :, part], alone)
        with pytest.raises(LengthError, match="6 visible tokens"):
            m(*given, Mask(True, documents=torch.zeros_like(two)))
        with pytest.raises(LengthError, match="5 visible tokens"):
            m(*given, Mask(True, documents=torch.tensor([[0, 1, 1, 1, 1, 1]] * B)))

    @pytest.mark.parametrize("how", [plain, fast])
    @pytest.mark.parametrize("name", ["synthesizer", "synthesizer-random"])
    def test_padded_pieces_are_the_whole_sequence(self, name, how):
        m = how(build(name, 4))
        visible = torch.tensor([[0, 1, 1, 0, 0, 1, 1], [1, 0, 0, 1, 0, 0, 1]], dtype=torch.bool)
        given = inputs(m, 7)
        wanted = m(*given, Mask(True, visible))
        for pieces in ((3, 4), (6, 1), (1,) * 7):
            state = m.empty(size(S=4))
            outs = []
            at = 0
            for T in pieces:
                part = slice(at, at + T)
                at += T
                piece = [None if x is None else x[:, :, part] for x in given]
                with torch.no_grad():  # where the step has a kernel of its own
                    out, state = m.extend(*piece, state, None if visible[:, part].all() else visible[:, part])
                outs.append(out)
            torch.testing.assert_close(
                torch.cat(outs, 2)[visible[:, None].expand(-1, 4, -1)], wanted[visible[:, None].expand(-1, 4, -1)]
            )
        with pytest.raises(LengthError, match="5 visible tokens"), torch.no_grad():
            m.extend(*inputs(m, 1), state)

    @pytest.mark.parametrize("how", [plain, fast])
    def test_what_is_added_to_scores_has_a_number_for_each_query_head(self, how):
        m = how(build("synthesizer-random"))
        v = torch.randn(2, 2, 6, 5)  # two heads of values for four of scores
        q = torch.randn(2, 4, 6, 8)
        for mask in (Mask(True, slopes=torch.rand(4)), Mask(True, bias=torch.randn(1, 4, 6, 6))):
            wanted = m.weights(q, None, mask) @ v.repeat_interleave(2, 1)
            torch.testing.assert_close(m(None, None, v, mask), wanted)

    @pytest.mark.parametrize("name", NAMES)
    def test_weights_of_the_last_queries_are_those_of_the_whole(self, name):
        m = build(name)
        q = torch.randn(2, 4, 6, 8)
        k = torch.randn(2, 2, 6, 8)
        whole = m.weights(q, k, Mask(causal=True))
        last = m.weights(q[:, :, 3:], k, Mask(causal=True))
        assert last.shape == (2, 4, 3, 6)
        torch.testing.assert_close(last, whole[:, :, 3:])


class TestGradients:
    @pytest.mark.parametrize("learned", ["q", "k", "v", "qk", "kv", ""])
    @pytest.mark.parametrize("name", [*NAMES, "argmax-straight"])
    def test_states_have_the_gradients_of_the_whole_sequence(self, name, learned):
        options = {"gradient": "straight_through"} if name == "argmax-straight" else {}
        m = build(name.removesuffix("-straight"), **options)
        results = []
        for pieces in ((7,), (3, 1, 1, 2), (1,) * 7):
            given = inputs(m, 7, dtype=torch.float64)
            m = m.double()
            leaves = [x for letter, x in zip("qkv", given, strict=True) if letter in learned and x is not None]
            leaves = [x.requires_grad_() for x in leaves] + list(m.parameters())
            if not leaves:
                return
            state = m.empty(size(dtype=torch.float64))
            outs = []
            at = 0
            for T in pieces:
                piece = [None if x is None else x[:, :, at : at + T] for x in given]
                out, state = m.extend(*piece, state)
                outs.append(out)
                at += T
            out = torch.cat(outs, 2)
            if not out.requires_grad:
                assert name == "argmax" and "v" not in learned
                return
            results.append(torch.autograd.grad(out.square().sum(), leaves, allow_unused=True))
        for got in results[1:]:
            for a, b in zip(got, results[0], strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("name", ["softmax", "argmax", *LINEAR])
    def test_reading_between_two_writings_keeps_its_gradient(self, name):
        m = build(name)
        q, k, v = inputs(m, 6)
        q.requires_grad_()
        state = m.write(m.empty(size()), k[:, :, :3], v[:, :, :3])
        before = m.read(q, state)
        state = m.write(state, k[:, :, 3:], v[:, :, 3:])
        out = before.sum() + m.read(q, state).sum()
        if out.requires_grad:
            out.backward()
            assert q.grad.isfinite().all()

    @pytest.mark.parametrize("name", RANDOM)
    def test_directions_drawn_in_inference_mode_can_train_afterwards(self, name):
        m = mechanism(name, features=16)
        with torch.inference_mode():
            m(*inputs(m))
        q, k, v = (x.requires_grad_() for x in inputs(m))
        m(q, k, v, Mask(causal=True)).sum().backward()
        assert q.grad.isfinite().all()
        with torch.inference_mode():
            m.redraw(3)
        m(q, k, v).sum().backward()
        other = mechanism(name, features=16)
        with torch.inference_mode():
            other.load_state_dict(m.state_dict())
        other(q, k, v).sum().backward()
        assert not any(x.is_inference() for x in (m.w, other.w))


class TestOwnFeatures:
    def test_strict_refuses_negative_similarities_in_every_face(self):
        m = AnyFeatures(torch.nn.Identity(), strict=True)
        q, k, v = inputs(m)
        calls = [lambda mask: m(q, k, v, mask), lambda mask: m.weights(q, k, mask)]
        for mask in (Mask(), Mask(causal=True), Mask(causal=True, window=3)):
            for call in calls:
                with pytest.raises(NegativeSimilarityError, match=r"linear.*negative.*strict=False"):
                    call(mask)
        with pytest.raises(NegativeSimilarityError):
            m.extend(q, k, v, m.empty(size()))

    def test_strict_takes_signed_features_whose_similarities_are_not_negative(self):
        """(q·k)² by signed features, some of it zero up to rounding; and negative pairs that nobody sees."""
        m = AnyFeatures(lambda x: (x[..., :, None] * x[..., None, :]).flatten(-2), strict=True)
        q, k, v = inputs(m)
        q[..., 0, 1:] = 0
        k[..., 0, 0] = 0  # at right angles to the first query, which sees the second key beside it
        assert m(q, k, v).isfinite().all()
        positive = AnyFeatures(torch.nn.Identity(), strict=True)
        q, k, v = inputs(m)
        q, k = q.abs(), k.abs()
        k[:, :, 5] = -1
        q[:, :, 5] = -1
        assert positive(q[:, :, :5], k[:, :, :5], v[:, :, :5], Mask(causal=True)).isfinite().all()
        visible = torch.arange(6).expand(2, 6) < 5
        assert positive(q.abs(), k, v, Mask(visible=visible)).isfinite().all()

    def test_without_strict_they_are_taken_as_they_are(self):
        m = AnyFeatures(torch.nn.Identity())
        assert m(*inputs(m)).isfinite().all()


class TestDtypesAndDevices:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", [*NAMES, "low-rank"])
    def test_weights_are_float32_under_autocast(self, name, dtype):
        m = build("synthesizer-random", rank=2) if name == "low-rank" else build(name)
        q = torch.randn(2, 4, 6, 8).to(dtype)
        k = torch.randn(2, 2, 6, 8).to(dtype)
        wanted = m.weights(q, k, Mask(causal=True))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = m.weights(q, k, Mask(causal=True))
        assert got.dtype == torch.float32 and torch.equal(got, wanted)

    @pytest.mark.parametrize("rule", ["bias", "slopes", "relative", "softcap"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_what_is_added_to_scores_is_not_rounded_to_half_precision(self, rule, dtype):
        """The fused call errs by no more than twice what the reference does in the same precision."""
        torch.manual_seed(0)
        added = {
            "bias": {"bias": 30 * torch.randn(1, 4, 33, 33) + 300},
            "slopes": {"slopes": torch.tensor([3.0, 1.0, 0.5, 0.1])},
            "relative": {"relative": lambda d: (1.37 * d)[:, None].expand(-1, 4, -1, -1)},
            "softcap": {"softcap": 20.0, "bias": 30 * torch.randn(33, 33)},
        }
        mask = Mask(causal=True, **added[rule])
        q, k, v = (torch.randn(2, 4, 33, 16).to(dtype) for _ in range(3))
        wanted = plain(mechanism("softmax"))(q.double(), k.double(), v.double(), mask)

        def error(out):
            return float((out.double() - wanted).norm() / wanted.norm())

        limit = 2 * error(plain(mechanism("softmax"))(q, k, v, mask))
        m = fast(mechanism("softmax"))
        assert error(m(q, k, v, mask)) <= limit
        with torch.autocast("cpu", dtype=dtype):
            assert error(m(q.float(), k.float(), v.float(), mask)) <= max(limit, 0.003)
        if rule == "slopes":
            state = m.empty(Size(B=2, S=33, H=4, G=4, K=16, V=16, dtype=dtype), mask.but(causal=False))
            outs = []
            for t in range(33):
                out, state = m.extend(*(x[:, :, t : t + 1] for x in (q, k, v)), state)
                outs.append(out)
            assert error(torch.cat(outs, 2)) <= limit

    @pytest.mark.parametrize("kept", [torch.float64, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.float16])
    @pytest.mark.parametrize("name", NAMES)
    def test_a_state_may_have_another_dtype_than_the_tokens(self, name, kept, given):
        m = build(name)
        tokens = inputs(m, 6, dtype=given)
        wanted = m(*tokens, Mask(causal=True)).double()
        state = m.empty(size(dtype=kept))
        outs = []
        for part in (slice(0, 4), slice(4, 5), slice(5, 6)):
            out, state = m.extend(*(None if x is None else x[:, :, part] for x in tokens), state)
            outs.append(out)
        out = torch.cat(outs, 2)
        assert out.dtype == given
        if name != "argmax":  # which may choose another key
            assert (out - wanted).abs().max() <= 0.02 * wanted.abs().max()
        if m.crosses:
            assert m.read(tokens[0], state).dtype == given

    @pytest.mark.parametrize("name", NAMES)
    def test_meta_tensors_have_the_shapes_of_real_ones(self, name):
        m = build(name).to("meta")
        visible = torch.ones(2, 6, dtype=torch.bool, device="meta")
        documents = torch.zeros(2, 6, dtype=torch.long, device="meta")
        for mask in (Mask(), Mask(True), Mask(True, visible, documents=documents), Mask(True, window=2)):
            out = m(*inputs(m, device="meta"), mask)
            assert out.is_meta and out.shape == (2, 4, 6, 5)
        state = m.empty(size(device="meta"))
        for T in (3, 1):
            out, state = m.extend(*inputs(m, T, device="meta"), state, visible[:, :T])
            assert out.is_meta and out.shape == (2, 4, T, 5)
        q, k = torch.randn(2, 4, 6, 8, device="meta"), torch.randn(2, 2, 6, 8, device="meta")
        assert m.weights(q, k, Mask(True)).shape == (2, 4, 6, 6)
        if m.crosses:
            assert m.read(q, state).shape == (2, 4, 6, 5)


@pytest.mark.parametrize("name", ["softmax", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_one_compiled_graph_serves_every_length(name):
    m = build(name, 64)
    compiled = torch.compile(m, fullgraph=True, backend="eager")
    for T in (5, 7, 33):
        given = inputs(m, T)
        torch.testing.assert_close(compiled(*given, Mask(causal=True)), m(*given, Mask(causal=True)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own, in jvp
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_has_second_derivatives_forward_mode_and_vmap(name):
    m = plain(build(name)).double()
    given = inputs(m, dtype=torch.float64)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    for mask in (Mask(True), Mask(True, documents=documents), Mask(True, window=2)):

        def of_values(v, mask=mask):
            return m(given[0], given[1], v, mask)

        v = given[2]
        out, tangent = torch.func.jvp(of_values, (v,), (v,))
        torch.testing.assert_close(tangent, out)  # attention is linear in its values
        torch.testing.assert_close(torch.func.vmap(of_values)(v[None])[0], out)
        x = given[0] if given[0] is not None else v
        x = x.clone().requires_grad_()
        y = m(x, given[1], v, mask) if given[0] is not None else of_values(x)
        if y.requires_grad:
            (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            first.square().sum().backward()
            assert x.grad.isfinite().all()


def test_features_that_ask_for_the_head_are_mapped_apart_from_token_to_token():
    """A subclass may scale each head by itself; queries and keys must not be put side by side for it."""

    class ByHead(Elu):
        def features(self, x):
            heads = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None, None]
            return super().features(x * heads)

    m = ByHead()
    q, k, v = (torch.randn(2, n, 7, 5) for n in (4, 2, 2))
    state, outs = m.empty(Size(B=2, H=4, G=2, K=5, V=5)), []
    for t in range(7):
        out, state = m.extend(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state)
        outs.append(out)
    assert (torch.cat(outs, 2) - m(q, k, v, Mask(causal=True))).abs().max() < 1e-5
