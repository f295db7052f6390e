"""A trace in a notebook.

The default is a page in a sandboxed frame: it needs no extension, and a saved or exported notebook still shows it, also
offline. A widget also reports clicks to Python, but works only while the kernel runs, so it is opt-in (`linked=True`).
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from regard.errors import ExtraMissingError, OptionError
from regard.lens.pages.page import page
from regard.lens.recording.record import Text, record
from regard.lens.trace.format import encode, to_bytes
from regard.lens.trace.trace import Trace

MAX_PAGE_BYTES = 64 << 20  # largest page that is put into a notebook
_SANDBOX = "allow-scripts allow-downloads"  # no allow-same-origin: the page cannot reach the notebook
_RENDER = """
export default { render({ model, el }) {
  const view = model.get("trace");
  const file = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
  const box = document.createElement("div");
  box.style.cssText = `height:${model.get("height")}px;overflow:auto;border-radius:8px`;
  const root = document.createElement("div");
  root.dataset.theme = "auto";
  box.append(root);
  el.append(box);
  const app = regardLens.mount(root, regardLens.opened(file));
  const report = (state) => {
    const at = app.seen[state.r].attention(state.a);
    const place = { recording: state.r, side: at.side, kind: at.kind, layer: at.layer, head: state.h };
    const pair = state.fixed ? { query: state.i, key: state.j } : { query: -1, key: -1 };
    model.set("selected", { ...place, ...pair });
    model.save_changes();
  };
  app.store.listen((state, before) => {
    if (["r", "a", "h", "i", "j", "fixed"].some((key) => state[key] !== before[key])) report(state);
  });
  const first = model.get("opened") ?? {};
  if (Object.keys(first).length) app.store.set(first);
  report(app.store.state);
  return () => app.unmount();
} };
"""


class Frame:
    """A trace in a sandboxed frame, which a notebook also shows when it is saved, exported or offline."""

    def __init__(self, trace: Trace, height: int = 720, opened: Mapping[str, str | int] | None = None) -> None:
        self.trace = trace
        self.height = height
        self.opened = opened

    def _repr_html_(self) -> str:
        return frame_html(self.trace, self.height, self.opened)

    def __repr__(self) -> str:
        return repr(self.trace)


def frame_html(trace: Trace, height: int, opened: Mapping[str, str | int] | None = None) -> str:
    """Returns an iframe element that contains the page of a trace; raises OptionError if the trace is too large.

    `opened` says what the page shows first; see `page`.
    """
    encoded = encode(trace)
    if encoded.page_size > MAX_PAGE_BYTES:
        raise OptionError(
            f"the page of this trace has {encoded.page_size / 1e6:.0f} MB, a notebook takes "
            f"{MAX_PAGE_BYTES / 1e6:.0f}; write it to a file with regard.lens.pages.page.write_page, or record a "
            "shorter text"
        )
    document = html.escape("".join(page(encoded, "regard", opened)), quote=False).replace('"', "&quot;")
    return (
        f'<iframe title="What the model attends to" sandbox="{_SANDBOX}" width="100%" height="{int(height)}" '
        f'frameborder="0" srcdoc="{document}"></iframe>'
    )


def show(
    trace: Any,
    text: Text | None = None,
    *,
    layer: int | None = None,
    head: int | None = None,
    kind: str = "self",
    side: str | None = None,
    height: int = 720,
    linked: bool = False,
    **options: Any,
) -> Any:
    """Returns an object that shows a trace in a notebook: by default a frame, which saved notebooks keep.

    trace: a trace, or a model, which is then recorded while it reads `text`, with the options of `record`.
    layer, head: the head that is shown first (head 0 unless given); all heads unless a layer is given. `kind` and
        `side` are those of `Recording.attention`.
    height: of the frame, in pixels.

    With `linked=True` it is a widget (extra `notebook`). Its attribute `selected` is a dict of the selected recording,
    layer and head, and of the query and key that were clicked, −1 for none.
    """
    if not isinstance(trace, Trace):
        if text is None:
            raise OptionError("a model needs a text to read: show(model, text), or give a trace")
        trace = record(trace, text, **options)
    elif text is not None or options:
        raise OptionError("a trace has its text already: leave out the text and the options of record, or give a model")
    opened = _head_shown_first(trace, layer, head, kind, side)
    if not linked:
        return Frame(trace, height, opened)
    if find_spec("anywidget") is None:
        raise ExtraMissingError('a linked widget needs `anywidget`: pip install "regard[notebook]"')
    html_of_frame = frame_html(trace, height, opened)
    return _widget()(trace=to_bytes(encode(trace)), height=height, opened=opened, _html=html_of_frame)


def _head_shown_first(
    trace: Trace, layer: int | None, head: int | None, kind: str, side: str | None
) -> dict[str, str | int]:
    """Returns the part of the page's state that opens one head of the first recording; {} opens all heads."""
    if layer is None:
        if head is not None:
            raise OptionError(f"head {head} of which layer? Give layer= too")
        return {}
    recording = trace.recordings[0]
    attended = recording.attention(layer, kind, side)
    number = head or 0
    if not 0 <= number < attended.heads:
        raise OptionError(f"head {number}: layer {layer} has {attended.heads}, 0 to {attended.heads - 1}")
    at = next(n for n, other in enumerate(recording.attentions) if other is attended)
    return {"view": "head", "a": at, "h": number}


@cache
def _widget() -> type[Any]:
    """Returns the widget's class; defined on first use, since its base class comes from an optional package."""
    import anywidget
    import traitlets

    static = files("regard.lens").joinpath("static")
    base: Any = anywidget.AnyWidget  # Any, because the installed version may have no types

    class LensWidget(base):  # type: ignore[misc]
        """A widget that shows a trace and reports the selection to Python."""

        _esm = static.joinpath("lens.js").read_text("utf-8") + _RENDER
        _css = static.joinpath("lens.css").read_text("utf-8")
        trace = traitlets.Bytes().tag(sync=True)
        height = traitlets.Int(720).tag(sync=True)
        selected = traitlets.Dict().tag(sync=True)
        opened = traitlets.Dict().tag(sync=True)
        _html = traitlets.Unicode()

        def _repr_mimebundle_(self, **named: Any) -> Any:
            bundle = super()._repr_mimebundle_(**named)
            if not isinstance(bundle, tuple):  # older versions return the data alone, newer ones (data, metadata)
                return {**(bundle or {}), "text/html": self._html}
            data, *metadata = bundle
            return ({**(data or {}), "text/html": self._html}, *metadata)  # for viewers without widget support

    return LensWidget
