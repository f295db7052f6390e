"""PyTorch's habits: its layer into ours and back, its calls, and what its arguments are called here."""

import inspect
import re

import pytest
import torch
from torch import nn

import regard
from regard.errors import OptionError, RegardError, ShapeError, TokenError
from regard.lens.recording.maps import attention_maps
from regard.mechanisms import Softmax, register
from regard.mechanisms.base import MECHANISMS
from regard.nn import Attention
from regard.registry import call_with_options

B, T, S, D, H = 2, 7, 5, 12, 3
CASES = [
    pytest.param({"batch_first": first, "bias": bias, **sizes}, id=f"first={first} bias={bias} {sizes}")
    for first in (True, False)
    for bias in (True, False)
    for sizes in ({}, {"kdim": 10, "vdim": 10})
]


def theirs(**options):
    torch.manual_seed(1)
    made = nn.MultiheadAttention(D, H, **options).eval()
    for x in made.parameters():  # its biases begin at zero, which would hide what is done with them
        x.data = torch.randn_like(x) / 2
    return made


def call(module, q, k, v, **options):
    """PyTorch's outputs and weights of each head, batch first."""
    if not module.batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out, weights = module(q, k, v, average_attn_weights=False, **options)
    if not module.batch_first:
        out = out.transpose(0, 1)
    return out, weights


def near(a, b):
    assert a.shape == b.shape and float((a - b).detach().abs().max()) <= 1e-6 * max(1.0, float(b.detach().abs().max()))


@pytest.mark.parametrize("options", CASES)
def test_a_layer_of_pytorch_is_ours_and_again_its_own(options):
    module = theirs(**options)
    layer = Attention.from_torch(module)
    x = torch.randn(B, T, D)
    other = torch.randn(B, S, module.kdim)
    separate = (x, other, torch.randn(B, S, module.vdim))
    hidden = torch.zeros(B, S, dtype=torch.bool)
    hidden[0, 3:] = True
    again = layer.to_torch(batch_first=module.batch_first)
    assert isinstance(again, nn.MultiheadAttention) and again.batch_first == module.batch_first
    for name, weight in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    for tokens in ((x, other, other), separate):
        out, weights = layer(*tokens, need_weights=True, source_visible=~hidden)
        for other_layer in (module, again):
            want, want_weights = call(other_layer, *tokens, key_padding_mask=hidden)
            near(out, want)
            near(weights, want_weights)
    if layer.source is None:
        near(layer(x), call(module, x, x, x)[0])
        near(layer(x, x, x), layer(x))
        out, weights = layer(x, need_weights=True)
        near(out, layer(x))
        near(weights, call(module, x, x, x)[1])
    else:
        near(layer(x, source=other), call(module, x, other, other)[0])


def test_a_causal_layer_is_pytorchs_with_its_mask():
    module = theirs(batch_first=True, dtype=torch.float32)
    layer = Attention.from_torch(module, causal=True)
    x = torch.randn(B, T, D)
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    near(layer(x), module(x, x, x, attn_mask=mask, is_causal=True)[0])
    out, weights = layer(x, x, x, need_weights=True)
    near(out, layer(x))
    assert not weights.triu(1).any()


def test_hidden_tokens_of_a_call_with_weights_are_as_in_one_without():
    layer = Attention(D, H, G=1, mechanism="elu", causal=True).eval()
    x = torch.randn(B, T, D)
    visible = torch.ones(B, T, dtype=torch.bool)
    visible[1, :2] = False
    out, weights = layer(x, visible, need_weights=True)
    near(out, layer(x, visible))
    assert weights.shape == (B, H, T, T) and not weights[1, :, :, :2].any()


def test_what_pytorch_has_and_we_have_not_is_refused_and_the_other_way_round():
    for options, fragment in [
        ({"add_bias_kv": True}, "add_bias_kv"),
        ({"add_zero_attn": True}, "add_zero_attn"),
        ({"kdim": 10, "vdim": 8}, "kdim = 10, vdim = 8"),
    ]:
        with pytest.raises(OptionError, match=fragment):
            Attention.from_torch(theirs(**options))
    with pytest.raises(OptionError, match="given a Linear"):
        Attention.from_torch(nn.Linear(2, 2))
    for options, fragment in [
        ({"G": 1}, "1 key/value heads for 3"),
        ({"mechanism": "elu"}, "the mechanism elu"),
        ({"scale": 1.0}, "another scale"),
        ({"K": 2}, "heads of width 2 and 2"),
        ({"qk_norm": "rms"}, "qk_norm"),
        ({"merge": "shift"}, "merge"),
        ({"rules": regard.Mask(window=3)}, "window"),
        ({"residual_dropout": 0.1}, "residual_dropout"),
    ]:
        with pytest.raises(OptionError, match=fragment):
            Attention(D, H, causal=True, **options).to_torch()
    # A bias of its own for the output has PyTorch's not: zeros take the place of what is missing.
    layer = Attention(D, H, causal=False, bias=False, out_bias=True).eval()
    nn.init.normal_(layer.out.bias)
    x = torch.randn(B, T, D)
    near(layer.to_torch()(x, x, x)[0], layer(x))


def test_shapes_of_a_separate_call_are_checked():
    layer = Attention(D, H, causal=False)
    x = torch.randn(B, T, D)
    for tokens in ((x, x[:, :3], x), (x, x[:1], x[:1]), (x, x[0], x[0])):
        with pytest.raises(ShapeError, match="query, key and value"):
            layer(*tokens)


# Names


def test_causal_has_to_be_said_of_self_attention():
    with pytest.raises(OptionError, match="say causal=True"):
        Attention(D, H)
    assert not Attention(D, H, source=4).size.causal


@pytest.mark.parametrize("name", ["is_causal", "attn_mask", "mask", "key_padding_mask", "enable_gqa", "dropout_p"])
def test_a_foreign_name_gets_ours(name):
    q = torch.randn(B, H, T, 4)
    calls = (
        lambda: regard.attend(q, q, q, **{name: True}),
        lambda: Attention(D, H, causal=True, **{name: True}),
        lambda: Attention(D, H, causal=True)(torch.randn(B, T, D), **{name: True}),
    )
    for made in calls:
        with pytest.raises(OptionError, match=f"no argument '{name}'. Here it is"):
            made()
    with pytest.raises(OptionError, match="no argument 'mesk'"):
        Attention(D, H, causal=True)(torch.randn(B, T, D), mesk=None)
    with pytest.raises(OptionError, match="where the layer is made"):
        Attention(D, H, causal=True)(torch.randn(B, T, D), causal=True)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("softmax_scale", "scale="),
        ("window_size", "window="),
        ("alibi_slopes", "slopes="),
        ("cu_seqlens", "documents="),
        ("score_mod", "a mechanism of your own"),
        ("dropout", "dropout=0.1"),
        ("num_kv_heads", "G="),
    ],
)
def test_a_name_of_another_library_gets_ours(name, here):
    q = torch.randn(B, H, T, 4)
    with pytest.raises(OptionError, match=f"Here '{name}' is .*{re.escape(here)}"):
        regard.attend(q, q, q, **{name: 1})
    if name != "dropout":  # which layers have
        with pytest.raises(OptionError, match=f"Here '{name}' is .*{re.escape(here)}"):
            Attention(D, H, causal=True, **{name: 1})


def test_an_option_of_a_mechanism_may_be_called_as_another_library_calls_its_own():
    class Sized(Softmax):
        def __init__(self, window_size: int = 1) -> None:
            super().__init__()
            self.window_size = window_size

    q = torch.randn(B, H, T, 4)
    register("sized-for-a-test")(Sized)
    try:
        assert regard.attend(q, q, q, "sized-for-a-test", window_size=2).shape == q.shape
        assert Attention(D, H, causal=True, mechanism="sized-for-a-test", window_size=2).mechanism.window_size == 2
    finally:
        del MECHANISMS["sized-for-a-test"]


def test_a_rule_given_to_a_layer_is_told_where_it_belongs():
    with pytest.raises(OptionError, match=r"Did you mean rules=regard.Mask\(window=…\)"):
        Attention(D, H, causal=True, window=3)


def test_a_representation_shows_options():
    assert repr(regard.mechanism("performer", features=32, seed=4)) == "Performer(features=32, seed=4)"
    assert "degree=3, offset=0.5" in repr(regard.mechanism("polynomial", degree=3, offset=0.5))
    shown = repr(Attention(D, H, causal=True, rules=regard.Mask(window=3), residual_dropout=0.5))
    assert "causal=True, residual_dropout=0.5, window=3" in shown


@pytest.mark.parametrize("cls", [regard.GPT, regard.Encoder, regard.Seq2Seq])
def test_a_models_constructor_has_the_keys_of_its_config(cls):
    parameters = inspect.signature(cls).parameters
    assert list(parameters) == ["config", *cls.Config().as_dict()]
    assert parameters["vocabulary"].default == cls.Config().vocabulary


# Errors


def test_tokens_that_a_model_cannot_read_are_told():
    models = [
        regard.GPT.preset("nano", vocabulary=9),
        regard.Encoder(vocabulary=9, width=8, layers=1, attention={"heads": 2}),
    ]
    for model in models:
        for tokens, error, fragment in [
            ([[1, 9]], TokenError, "tokens from 1 to 9: this model's vocabulary is 0 to 8"),
            ([[-1, 3]], TokenError, "tokens from -1 to 3"),
            ([1, 2], ShapeError, r"torch.int64 \[2\], expected whole numbers \[B,T\]"),
            ([[1.0]], ShapeError, "torch.float32"),
        ]:
            with pytest.raises(error, match=fragment):
                model(torch.tensor(tokens))


def test_options_that_are_no_numbers_are_told():
    with pytest.raises(OptionError, match="mechanism 'performer': features = 'many', expected a whole number"):
        regard.mechanism("performer", features="many")
    with pytest.raises(OptionError, match="expected a number or None"):
        regard.mechanism("softmax", scale="large")
    assert call_with_options(lambda text: text, "a function", {}, {"text": "many"}) == "many"


def test_inputs_of_another_kind_are_told():
    q = torch.randn(2, 4, 6, 8)
    layer = Attention(D, H, causal=True)
    gpt = regard.GPT.preset("nano", vocabulary=50)
    ids = torch.zeros(1, 3, dtype=torch.long)
    for call_it, fragment in [
        (lambda: regard.attend(q.numpy(), q.numpy(), q.numpy()), "q is of type ndarray, expected a tensor"),
        (
            lambda: regard.attend(q, q.half(), q),
            "q torch.float32, k torch.float16, v torch.float32: expected all of one d",
        ),
        (lambda: regard.attend(q.to("meta"), q, q), "q meta, k cpu, v cpu: expected all of one device"),
        (lambda: regard.attend(q, q, q, visible=torch.ones(2, 6, dtype=torch.bool, device="meta")), "visible meta"),
        (lambda: regard.attend(q, q, q, torch.ones(6, 6)), "after q, k and v is the mechanism, given a Tensor"),
        (lambda: regard.attend(q, q, q, True), "causal=True"),
        (lambda: regard.attend(q, q, q, cauasl=True), "Did you mean causal= of regard.attend?"),
        (lambda: regard.attend(q, q, q, causal=True, window=2.5), "window = 2.5, expected a whole number"),
        (lambda: regard.attend(q, q, q, "performer", features=2.5), "features = 2.5, expected a whole number"),
        (lambda: layer(torch.randn(5, D)), f"x is torch.float32 [5, {D}], expected vectors [B,T,D]"),
        (lambda: layer(torch.randn(2, 5, D + 1)), f"D = {D}, the layer's width"),
        (lambda: layer(torch.ones(2, 5, D).long()), "x is torch.int64"),
        (lambda: layer(torch.randn(2, 5, D), torch.ones(2, 5)), "visible has dtype torch.float32, expected bool"),
        (lambda: gpt(ids, ids), "visible has dtype torch.int64, expected bool"),
        (lambda: gpt(ids.to("meta")), "tokens are on meta, the model on cpu"),
        (lambda: gpt(ids, attention_mask=ids), "GPT has no argument 'attention_mask'. Here it is visible="),
        (lambda: gpt(ids, labels=ids), "Here it is model.loss(tokens, targets)"),
        (lambda: gpt(ids, cache=1), "GPT has no argument 'cache'"),
        (lambda: regard.Encoder.preset("nano", vocabulary=50)(ids, attention_mask=ids), "Encoder has no argument"),
    ]:
        with pytest.raises(RegardError) as told:
            call_it()
        assert fragment in str(told.value)


def test_whole_numbers_are_no_queries():
    x = torch.randn(1, 2, 5, 8)
    for name, given in {"q": (x.int(), x, x), "k": (x, x.long(), x), "v": (x, x, x.bool())}.items():
        with pytest.raises(ShapeError, match=rf"{name} is torch.*expected floating-point numbers .*{name}\.float\(\)"):
            regard.attend(*given)


def test_weights_are_of_regards_models():
    with pytest.raises(OptionError, match=r"given a Linear. regard.record\(model, text\)"):
        attention_maps(nn.Linear(2, 2), torch.tensor([[1]]))
    with pytest.raises(OptionError, match="given the class GPT"):
        attention_maps(regard.GPT, torch.tensor([[1]]))
