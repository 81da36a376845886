"""YAML text in and out: the safe subset, read strictly. Duplicate or non-text keys are refused, `1e-3` is a number.

Aliases are read, as long as what all of them stand for stays small.
"""

from collections.abc import Hashable
from pathlib import Path
import re
from typing import Any

import yaml

from qspec.errors import RecipeError

_FLOAT = re.compile(r"^[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")
"""YAML 1.2's exponents: YAML 1.1 reads `1e-3` as text."""
MOST_BYTES = 1 << 18
"""Bytes of a file, and characters and values that its text stands for when every alias is written out."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._written = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node; counts what the text is without aliases, and stops at too much."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark: Any = event.start_mark
        before, node = self._written, super().compose_node(parent, index)
        assert node is not None
        if isinstance(event, yaml.AliasEvent) and node not in self._sizes:
            raise yaml.composer.ComposerError(None, None, "an alias stands inside of what it names", mark)
        if isinstance(event, yaml.AliasEvent):
            self._written += self._sizes[node]
        else:
            self._written += 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
            self._sizes[node] = self._written - before
        if self._written > MOST_BYTES:
            rule = f"aliases stand for more than {MOST_BYTES:,} characters"
            raise yaml.composer.ComposerError(None, None, rule, mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Quoted with escapes where a character does not print: PyYAML loses U+0085 otherwise."""
    node: yaml.ScalarNode = dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    )
    return node


class _Dumper(yaml.SafeDumper):  # type: ignore[misc, unused-ignore]
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, _represent_text)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def parse_yaml(text: str, where: str) -> Any:
    """Plain data of a YAML text; a syntax error names `where`, line and column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        rule = f"is not valid YAML ({_line(e.problem or e.context)})"
        raise RecipeError(f"{where}{at}", rule, "mend that line") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise RecipeError(where, f"is not valid YAML ({_line(str(e))})", "mend the file") from None


def dump_yaml(data: Any) -> str:
    """YAML text that `parse_yaml` reads back equal: no aliases, no tags, fields in the order given."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def read_text(path: Path, what: str) -> str:
    """Text of a file the user named, without its byte order mark.

    A missing file, a folder, bytes that are no text or too many of them are refused in one line.
    """
    if path.is_dir():
        raise RecipeError(str(path), f"is a folder, not a {what}", f"give the path of the {what} file")
    try:
        with path.open("rb") as file:  # a pipe is welcome: /dev/stdin
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            rule = f"is larger than {MOST_BYTES:,} bytes"
            raise RecipeError(str(path), rule, f"give the path of a {what} file")
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(str(path), "does not exist", f"give the path of a {what} file") from None
    except UnicodeDecodeError:
        raise RecipeError(str(path), "is not UTF-8 text", f"give the path of a {what} file") from None
    except OSError as e:
        rule = f"cannot be read ({e.strerror})"
        raise RecipeError(str(path), rule, "check the path and its permissions") from None


def _line(text: str | None) -> str:
    return " ".join((text or "unknown problem").split())
