"""An inspection as a document: one line per kind of layer, every layer on demand, bars for the page."""

from collections.abc import Iterable

from qspec.stages import inspect_model_page, inspect_pair_page
from qspec.stages.document import Block, Details, Document, Heading, Table, size
from qspec.stages.inspect_model import ModelView
from qspec.stages.inspect_pair import PairView
from qspec.stages.report_text import table_lines


def document(view: ModelView | PairView, layers: bool = False, page: bool = False) -> Document:
    """`layers`: a line for every layer too. `page`: bars, and every layer folded away, as a web page can."""
    summary, charts, every = _parts(view)
    blocks = [*summary, *charts] if page else summary
    if page:
        blocks += [Heading("Every layer"), *map(_folded, every)]
    elif layers:
        blocks = [*blocks, Heading("Every layer"), *every]
    title = view.model if isinstance(view, ModelView) else view.name
    return Document(title, _about(view), tuple(blocks))


def _parts(view: ModelView | PairView) -> tuple[list[Block], list[Block], Iterable[Table]]:
    if isinstance(view, ModelView):
        page = inspect_model_page
        return page.summary(view), page.charts(view), page.every_layer(view)
    return inspect_pair_page.summary(view), inspect_pair_page.charts(view), inspect_pair_page.every_layer(view)


def _about(view: ModelView | PairView) -> str:
    if isinstance(view, PairView):
        parts = [f"{half.name} {size(half.bytes)}" for half in view.halves]
        if view.draft is not None and len(view.halves) == 1:
            parts.append(f"draft {view.draft}" if view.draft == "mlp_speculator" else f"draft {view.draft}: no weights")
    else:
        parts = [
            f"{view.model_type}, {view.decoder_layers} decoder layers",
            f"hidden size {view.hidden_size:,}",
            f"{view.heads} heads and {view.kv_heads} KV heads of {view.head_dim}",
            f"vocabulary {view.vocabulary:,}{', head tied to the embedding' if view.tied else ''}",
        ]
    if view.calibration is not None:
        seen = view.calibration
        parts.append(f"measured on {seen.tokens:,} tokens of {seen.data} ({seen.texts} texts)")
    return " · ".join(parts)


def _folded(table: Table) -> Details:
    return Details(table.caption, tuple(table_lines(table)), code=True)
