"""Writing a model as one file: the parts of plain.py, memory.py and layers.py that it needs, and how it is built."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from regard.data.tokenizers import Characters
from regard.errors import DataError, OptionError, printable
from regard.mechanisms import Mechanism, Recurrence
from regard.mechanisms.argmax import Argmax
from regard.mechanisms.features import AnyFeatures, Elu, Polynomial, Quadratic
from regard.mechanisms.random_features import Fourier, Performer
from regard.mechanisms.similarity import AnySimilarity, Gaussian, cauchy
from regard.mechanisms.softmax import Softmax
from regard.mechanisms.synthesizer import RandomSynthesizer, Synthesizer
from regard.models.base import Model
from regard.models.eject import layers, memory, plain
from regard.models.eject.gates import write_gates, write_memory
from regard.models.gpt import GPT
from regard.models.stack import Stack
from regard.nn import Attention, Block
from regard.nn.block import GatedMLP
from regard.nn.norms import UnitLength
from regard.nn.positions import Alibi, Learned, Positions, Rotary, Sinusoidal
from regard.storage import check_new_folder, new_folder, write_tensors
from regard.version import __version__

MODEL = "model.py"
WEIGHTS = "model.safetensors"
EXAMPLE = "Once upon a time"
_ACTIVATIONS = {"gelu": "F.gelu", "gelu_tanh": 'lambda x: F.gelu(x, approximate="tanh")', "relu": "torch.relu"}
_MERGES = {"concatenate": None, "shuffle": None, "reweight": "reweight", "reweight-sequence": "reweight_sequence"}
_MERGES["shift"] = "lambda heads: heads.roll(1, 1)"


def eject(model: Model[Any], folder: str | Path, name: str = "a model") -> Path:
    """Writes model.py, its weights and its tokenizer into a new folder, and returns the path of model.py.

    The file needs torch and safetensors, and nothing of regard. Existing files are never overwritten.
    """
    folder = Path(folder)
    check_new_folder(folder, DataError)
    source = write_source(model, name)
    with new_folder(folder, DataError) as staged:
        (staged / MODEL).write_text(source, encoding="utf-8")
        write_tensors(staged / WEIGHTS, {key: x.cpu() for key, x in model.state_dict().items()})
        if model.tokenizer is not None:
            model.tokenizer.save(staged / "tokenizer.json")
    return folder / MODEL


def write_source(model: Model[Any], name: str = "a model") -> str:
    """Returns the source of model.py for a model; `name` is what its docstring calls the model."""
    if not isinstance(model, GPT):
        raise OptionError(
            f"{name} is of the class {type(model).__name__}; expected a GPT. A model with an encoder is exported to "
            "transformers instead: regard export"
        )
    stack = model.stack
    _refuse_parts(stack)
    written = [_write_layer(stack, block.attention) for block in stack.layers]
    positions = _build_positions(stack)
    merge = _merge(stack)
    parts = _needed_parts(stack, written, positions, merge)
    text = example_text(model)
    pieces = [
        *(inspect.getsource(part).rstrip() for part in parts),
        _write_build(model, stack, written, positions, merge),
        _write_text(model, text, stack.limit),
    ]
    body = "\n\n\n".join(pieces) + "\n"
    return f"{_head(model, name, stack, text, body)}\n\n\n{body}"


def example_text(model: Model[Any]) -> str:
    """Returns a text that a model can read: of its own characters, or a token's number where it has no tokenizer."""
    if model.tokenizer is None:
        return "0"
    if not isinstance(model.tokenizer, Characters):
        return EXAMPLE
    characters = model.tokenizer.tokens[len(model.tokenizer.special) :]
    return "".join(c for c in EXAMPLE if c in characters) or "".join(characters[:1])


def _refuse_parts(stack: Stack) -> None:
    """Raises an OptionError if the layers have a part that cannot be written yet."""
    if stack.config.attention.by_mechanism:
        raise OptionError(
            "layers whose attention differs (model.attention.by_mechanism) are not written yet; expected one section "
            "for all"
        )
    attention = stack.layers[0].attention
    parts = {
        "convolution": attention.convolution is not None,
        "output.norm": attention.head_norm is not None,
        "output.gate": attention.gate is not None,
        "output.skip": attention.skip is not None,
        "positions": not attention.positions,
    }
    unknown = [f"model.attention.{name}" for name, has in parts.items() if has]
    if unknown:
        raise OptionError(
            f"{', '.join(unknown)}: this part of the layer is not written yet; take regard/nn/attention.py into a file "
            "of your own, or train a model without it"
        )


def _turn(stack: Stack) -> str:
    """Returns the name of the function that rotates queries and keys; "None" without rotary positions."""
    if not isinstance(stack.positions, Rotary):
        return "None"
    if stack.positions.width < stack.layers[0].attention.size.K:
        return "rotate_part"
    return "rotate"


def _block_name(stack: Stack) -> str:
    """Returns the name of the class of the blocks."""
    if stack.layers[0].mlp is None:
        return "AttentionBlock"
    return "Block" if stack.config.block.before else "NormAfterBlock"


def _head(model: GPT, name: str, stack: Stack, text: str, body: str) -> str:
    """Returns the docstring of the file and the imports that its body needs."""
    config = model.config
    parameters = sum(x.numel() for x in model.parameters())
    names = ", ".join(dict.fromkeys(config.per_layer))
    imports = [f"import {module}" for module in ("json", "math", "sys") if f"{module}." in body]
    imports += ["from collections.abc import Callable", "from pathlib import Path"]
    imports += ["from typing import Any", "", "import torch", "from safetensors.torch import load_file"]
    sizes = f"{config.layers} layers, {config.width} wide, {parameters:,} parameters"
    # A name is that of a folder, which may have quotation marks and backslashes, and must not end the docstring.
    shown = json.dumps(printable(name), ensure_ascii=False)[1:-1]
    return f'''"""{shown}: a GPT with {names} attention, {sizes}.

Plain PyTorch, written by regard {__version__} (`regard eject`); it needs torch and safetensors. The weights are in
{WEIGHTS} beside this file. To generate text:   python {MODEL} {json.dumps(text)}
"""

from __future__ import annotations

''' + "\n".join([*imports, "from torch import Tensor, nn", "from torch.nn import functional as F"])


def _build_mechanism(mechanism: Mechanism, attention: Attention) -> str:
    """Returns the expression that builds the plain version of a mechanism."""
    size = attention.size
    cls = type(mechanism)
    if isinstance(mechanism, Softmax) and cls is Softmax:
        return "Softmax()" if mechanism.scale is None else f"Softmax({mechanism.scale!r})"
    if isinstance(mechanism, Argmax):
        return f"Argmax(straight_through={mechanism.learns})"
    if isinstance(mechanism, Gaussian):
        return f"Gaussian({mechanism.sigma!r})"
    if cls is Elu:
        return "Elu()"
    if isinstance(mechanism, Quadratic | Polynomial):
        return f"Polynomial(degree={mechanism.degree}, offset={mechanism.offset!r})"
    if isinstance(mechanism, AnyFeatures) and mechanism.phi is nn.functional.softplus:
        return "Softplus()"
    if isinstance(mechanism, Performer | Fourier):
        return f"{cls.__name__}(features={mechanism.count}, width={size.K})"
    if isinstance(mechanism, Synthesizer):
        return f"Synthesizer({mechanism.heads}, {mechanism.width}, {mechanism.length})"
    if isinstance(mechanism, RandomSynthesizer):
        return f"RandomSynthesizer({mechanism.heads}, {mechanism.length}, {mechanism.rank})"
    if isinstance(mechanism, Recurrence):
        return write_memory(mechanism, attention)
    if isinstance(mechanism, AnySimilarity) and mechanism.sim is cauchy:
        return "Similarity()"
    raise OptionError(
        f"the mechanism '{mechanism.name}' has no plain version that regard could write: it is your own, or has a "
        "function of yours; copy its class into the file by hand"
    )


def _build_positions(stack: Stack) -> str:
    """Returns the expression that builds the plain version of the positions."""
    positions = stack.positions
    if isinstance(positions, Learned):
        return f"Learned({positions.table.num_embeddings}, {stack.config.width})"
    if isinstance(positions, Sinusoidal):
        return f"Sinusoidal({positions.width})"
    if isinstance(positions, Rotary):
        if positions.original is not None:  # by Llama 3's rule, which is longer to write than its numbers
            return f"Rotary({positions.frequencies().tolist()!r})"
        powers = f"-torch.arange(0, {positions.width}, 2, dtype=torch.float64) / {positions.width}"
        return f"Rotary(({positions.base!r} ** ({powers}) / {positions.factor!r}).tolist())"
    if isinstance(positions, Alibi) or type(positions) is Positions:
        return "NoPositions()"
    raise OptionError(f"positions '{stack.config.position}' have no plain version that regard could write")


def _merge(stack: Stack) -> str | None:
    """Returns the expression of the function that merges heads; None if they stand side by side."""
    name = stack.config.attention.merge
    if name not in _MERGES:
        raise OptionError(f"the merge '{name}' has no plain version that regard could write")
    if name == "reweight-sequence" and not stack.config.attention.merge_options.get("at_inference", True):
        return None
    return _MERGES[name]


def _needed_parts(stack: Stack, written: list[dict[str, str]], positions: str, merge: str | None) -> list[Any]:
    """Returns the classes and functions that the file needs, in their order in it."""
    used = {layer["mechanism"].split("(")[0] for layer in written}
    by_scores = used & {"Softmax", "Argmax", "Gaussian", "Synthesizer", "RandomSynthesizer"}
    wanted = {positions.split("(")[0], "Attention", _block_name(stack), _turn(stack), "Stack", "GPT"}
    wanted |= {name for layer in written for expression in layer.values() for name in re.findall(r"\w+", expression)}
    wanted.add("visible_keys")
    if by_scores:
        wanted |= {"mix", "visible_scores"}
    if used & {"Softmax", "Argmax", "Gaussian"}:
        wanted.add("compare")
    if "Similarity" in used:
        wanted.add("mix")
    if used - by_scores - {"Similarity", "Memory"}:
        wanted.add("Linear")
    if _turn(stack) == "rotate_part":
        wanted.add("rotate")
    if isinstance(stack.positions, Alibi):
        wanted.add("alibi_slopes")
    if merge is not None:
        wanted.add(merge)
    if stack.layers[0].mlp is not None:
        wanted.add("SwiGLU" if isinstance(stack.layers[0].mlp, GatedMLP) else "MLP")
    return [part for module in (plain, memory, layers) for name, part in _parts(module) if name in wanted]


def _parts(module: Any) -> Iterable[tuple[str, Any]]:
    """Yields the classes and functions that a module defines, in its order."""
    for name, part in vars(module).items():
        if getattr(part, "__module__", None) == module.__name__:
            yield name, part


def _norm(stack: Stack, width: int, eps: float, name: str | None = None) -> str:
    """Returns the expression that builds a norm of this width: that of `name`, by default the block's."""
    block = stack.config.block
    bias = block.bias or name is not None  # norms of queries and keys have one in any case
    name = name or block.norm
    if name == "rms":
        return f"nn.RMSNorm({width}, {eps!r})"
    if name == "layer":
        return f"nn.LayerNorm({width}, {eps!r}, bias={bias})"
    raise OptionError(f"the norm '{name}' has no plain version that regard could write")


def _write_layer(stack: Stack, attention: Attention) -> dict[str, str]:
    """Returns the expressions of what may differ from layer to layer, by the names of the variables they become."""
    norms = "[]"
    if attention.query_norm is not None:
        norms = f"[{_write_qk_norm(stack, attention)} for _ in range(2)]"
    return {
        "mechanism": _build_mechanism(attention.mechanism, attention),
        "query_key_norms": norms,
        "gates": write_gates(attention, stack.config.width),
    }


def _write_loop(written: list[dict[str, str]]) -> tuple[list[str], dict[str, str]]:
    """Returns the lines that begin the loop over the layers, and the expression of each part of a layer within it."""
    called = dict(written[0])
    differing = [name for name in called if len({layer[name] for layer in written}) > 1]
    if not differing:
        return [f"    for _ in range({len(written)}):"], called
    called |= {name: name for name in differing}
    rows = [", ".join(layer[name] for name in differing) for layer in written]
    if len(differing) > 1:
        rows = [f"({row})" for row in rows]
    return [f"    for {', '.join(differing)} in [", *(f"        {row}," for row in rows), "    ]:"], called


def _write_build(model: GPT, stack: Stack, written: list[dict[str, str]], positions: str, merge: str | None) -> str:
    """Returns the function that builds the model and loads its weights."""
    config = model.config
    first: Block = stack.layers[0]
    attention = first.attention
    size = attention.size
    sizes = {"q": size.K, "k": size.K, "v": size.V}
    widths = [(n, sizes[letter]) for n, letter in zip(attention.heads, attention.needs, strict=True)]
    if len({tuple(zip(b.attention.needs, b.attention.heads, strict=True)) for b in stack.layers}) > 1:
        raise OptionError("layers whose mechanisms need different projections are not written yet")
    window = config.attention.window
    if window is not None and stack.limit is not None and window >= stack.limit:
        window = None  # it hides nothing that the model can read
    slopes = "None"
    if isinstance(stack.positions, Alibi):
        slopes = f"alibi_slopes({size.H})"
    loop, called = _write_loop(written)
    lines = ["def build(folder: Path) -> GPT:", '    """Returns the model with the weights of a folder."""']
    lines += ["    blocks = []", *loop]
    arguments = [str(config.width), repr(widths), called["mechanism"], called["query_key_norms"]]
    bias, out_bias = attention.project.bias is not None, attention.out.bias is not None
    lines.append("        attention = Attention(")
    lines.append(f"            {', '.join(arguments)},")
    lines.append(f"            bias={bias}, out_bias={out_bias}, merge={merge}, heads={size.H},")
    lines.append(f"            turn={_turn(stack)},")
    if called["gates"] != "None":
        lines.append(f"            gates={called['gates']},")
    lines.append("        )")
    block_norm = _norm(stack, config.width, config.block.eps)
    if first.mlp is None:
        lines.append(f"        blocks.append(AttentionBlock(attention, {block_norm}, before={config.block.before}))")
    else:
        lines.append(f"        mlp = {_write_mlp(first, config.width, config.block.mlp)}")
        lines.append(f"        norms = [{block_norm} for _ in range(2)]")
        lines.append(f"        blocks.append({_block_name(stack)}(attention, mlp, norms))")
    norms = []
    for norm in (stack.embedding_norm, stack.final_norm):
        norms.append("None" if norm is None else _norm(stack, config.width, config.block.eps))
    lines.append(f'    rules = {{"window": {window}, "slopes": {slopes}}}')
    lines.append(f"    stack = Stack(blocks, {positions}, rules, [{', '.join(norms)}])")
    lines.append(f"    model = GPT({config.vocabulary}, {config.width}, stack, tied={config.tied})")
    lines.append(f'    model.load_state_dict(load_file(folder / "{WEIGHTS}"))')
    lines.append("    return model.eval()")
    return "\n".join(lines)


def _write_qk_norm(stack: Stack, attention: Attention) -> str:
    """Returns the expression that builds the norm of queries or keys."""
    said = stack.config.attention.qk_norm
    if isinstance(attention.query_norm, UnitLength):
        return "UnitLength()"
    eps = float(getattr(attention.query_norm, "eps", None) or stack.config.block.eps)
    return _norm(stack, attention.size.K, eps, said if isinstance(said, str) else stack.config.block.norm)


def _write_mlp(block: Block, width: int, name: str) -> str:
    """Returns the expression that builds the MLP of a block."""
    mlp: Any = block.mlp
    hidden = mlp.out.in_features
    bias = mlp.into.bias is not None
    if isinstance(mlp, GatedMLP):
        return f"SwiGLU({width}, {hidden}, bias={bias})"
    if name not in _ACTIVATIONS:
        raise OptionError(f"the MLP '{name}' has no plain version that regard could write")
    return f"MLP({width}, {hidden}, {_ACTIVATIONS[name]}, bias={bias})"


def _write_text(model: GPT, text: str, limit: int | None) -> str:
    """Returns the function `main` of the file: it continues the text of the command line, by default `text`."""
    tokenizer = type(model.tokenizer).__name__
    if tokenizer == "Characters":
        read = [
            '    known = json.loads((here / "tokenizer.json").read_text("utf-8"))',
            '    tokens = [*known["special"], *known["characters"]]',
            "    if unknown := sorted(set(text) - set(tokens)):",
            '        sys.exit(f"the model does not know {unknown}")',
            "    ids = [tokens.index(c) for c in text]",
            '    write = lambda row: "".join(tokens[i] for i in row)',
        ]
    elif tokenizer == "Bytes":
        read = [
            "    ids = list(text.encode())",
            '    write = lambda row: bytes(i for i in row if i < 256).decode(errors="replace")',
        ]
    elif model.tokenizer is None:
        read = ["    ids = [int(word) for word in text.split()]  # it was saved without a tokenizer", "    write = str"]
    else:
        read = [
            "    from tokenizers import Tokenizer",
            "",
            '    tokenizer = Tokenizer.from_file(str(here / "tokenizer.json"))',
            "    ids = tokenizer.encode(text).ids",
            "    write = tokenizer.decode",
        ]
    return "\n".join(
        [
            "def main() -> None:",
            '    """Continues the text that the command line gives by 200 tokens."""',
            "    here = Path(__file__).parent",
            "    model = build(here)",
            f"    text = sys.argv[1] if len(sys.argv) > 1 else {text!r}",
            *read,
            f"    out = model.generate(torch.tensor([ids]), 200, {limit}, temperature=0.8)",
            "    print(write(out[0].tolist()))",
            "",
            "",
            'if __name__ == "__main__":',
            "    main()",
        ]
    )
