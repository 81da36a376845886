"""`--set key=value`: one field of a recipe's plain data replaced, before it is validated."""

from typing import Any

from qspec.errors import RecipeError
from qspec.schema.text import parse_yaml


def set_value(data: dict[str, Any], override: str) -> None:
    """Set `dotted.key=yaml value` in plain data; a missing mapping on the way is made, a list takes a number."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise RecipeError(f"--set {override!r}", "must be dotted.key=value", "for example --set speculation.top_k=50")
    value = parse_yaml(text, f"--set {override!r}")
    node: Any = data
    for part in parts[:-1]:
        slot = _slot(node, part, override)
        child = node.get(slot) if isinstance(node, dict) else node[slot]
        if child is None:
            child = node[slot] = {}
        node = child
    node[_slot(node, parts[-1], override)] = value


def _slot(node: Any, part: str, override: str) -> Any:
    """The key or index that `part` means in `node`."""
    if isinstance(node, dict):
        return part
    if isinstance(node, list) and part in map(str, range(len(node))):
        return int(part)
    what = f"a list of {len(node)}" if isinstance(node, list) else f"{node!r}"
    raise RecipeError(f"--set {override!r}", f"{part!r} leads into {what}", "set the whole value above it instead")
