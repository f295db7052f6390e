"""What judges the exercises of notebook 7 · Seeing heads."""

import copy

import torch

import regard


def lengths(draw):
    for T in (2, 8, 32, 100):
        yield (T,)


def uniform_previous(T):
    nothing = torch.zeros(1, 1, T, 4, dtype=torch.float64)
    weights = regard.mechanism("softmax").weights(nothing, nothing, regard.Mask(causal=True))[0, 0]
    return float(weights.diagonal(-1).mean())


def one_of_all(T):
    return 1 / T


def maps(draw):
    for p in (5, 8):
        yield draw.normal(24, 24).tril().softmax(-1), p


def after_the_last(weights, p):
    return float(weights.diagonal(1 - p)[1:].mean())


def at_the_last(weights, p):
    return float(weights.diagonal(-p).mean())


def heads(draw):
    yield 0, 1
    yield 1, 0


def head_is_gone(f, layer, head):
    """Returns what is wrong where the copy's logits are not those with the head's output set to zero."""
    torch.manual_seed(0)
    model = regard.GPT(vocabulary=11, width=16, layers=2, attention={"heads": 2}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    before = copy.deepcopy(model.state_dict())
    tokens = torch.arange(11)[None]

    def silence(module, given, out):
        out[:, head] = 0
        return out

    with torch.no_grad():
        made = f(model, layer, head)(tokens)
        hook = model.stack.layers[layer].attention.mechanism.register_forward_hook(silence)
        wanted = model(tokens)
        hook.remove()
    if any(not torch.equal(x, before[name]) for name, x in model.state_dict().items()):
        return "the model that was given has changed: change a copy"
    if torch.allclose(made, wanted, atol=1e-4):
        return None
    gap = float((made - wanted).abs().max())
    return f"the logits are off by up to {gap:.2g} from those with the head's output set to zero"
