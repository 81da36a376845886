"""Validation errors in one line: where in the file, what was given, the rule, and the closest thing that is valid."""

import difflib
import json
import re
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from qspec.errors import QspecError, RecipeError

M = TypeVar("M", bound=BaseModel)

_FIX = {
    "int_type": "give a whole number",
    "float_type": "give a number",
    "bool_type": "give true or false",
    "string_type": "give text (in quotes if it looks like a number)",
    "tuple_type": "give a list: [..]",
    "list_type": "give a list: [..]",
    "model_type": "give a mapping of fields",
    "dict_type": "give a mapping of fields",
    "greater_than": "give a larger number",
    "greater_than_equal": "give a larger number",
    "less_than": "give a smaller number",
    "less_than_equal": "give a smaller number",
    "finite_number": "give a finite number",
    "string_too_short": "give a name",
    "string_too_long": "shorten it",
    "string_pattern_mismatch": "use lower-case letters, digits and . _ -, starting with a letter or digit",
}
_READ, _SHOWN = 50, 5
"""Failures that are looked at, and further wrong fields that a message names."""
_COUNT = {1: "one", 2: "two"}
_HINT = {"fp8_e5m2": "vLLM refuses E5M2 KV beside FP8 weights, use 'fp8_e4m3'"}


def validate(model: type[M], data: Any, where: str, error: type[QspecError] = RecipeError) -> M:
    """`model` from plain data, with no silent conversion ("64" is no number); one line for whatever is wrong."""
    try:
        return model.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as e:
        raise explain(e, model, where, error) from None
    except (ValueError, TypeError, RecursionError) as e:
        raise error(where, f"is not plain data ({e})", "remove the self-referring alias") from None


def explain(failure: ValidationError, root: type[BaseModel], where: str, error: type[QspecError]) -> QspecError:
    """The first failure, in the file's own terms; the paths of the others are listed behind it."""
    problems = [(*_locate(p["loc"], p["type"], root), p) for p in failure.errors(include_url=False)[:_READ]]
    path, holder, first = problems[0]
    rule, fix = _rule(first), _fix(first, holder)
    for other in (p for at, _, p in problems[1:] if at == path):
        rule += " or " + _rule(other).removeprefix("must be ")
    others = list(dict.fromkeys(at for at, _, _ in problems if not path.startswith(at)))  # a parent repeats its item
    more = f" (also wrong: {', '.join(others[:_SHOWN])}{', …' * (len(others) > _SHOWN)})" if others else ""
    return error(f"{where}: {path or 'the whole file'}{_given(first)}", rule, fix + more)


def closest(name: str, valid: list[str]) -> str:
    """`did you mean 'x'? ` when something valid is near `name`, else nothing."""
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}? " if near else ""


def _locate(loc: tuple[int | str, ...], kind: str, root: type[BaseModel]) -> tuple[str, type[BaseModel]]:
    """Dotted path as the file spells it, and the model whose field it is. Union tags in `loc` are no part of it."""
    path, models, holder = "", [root], root
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif len(models) > 1:
            models = [m for m in models if _tag(m) == part] or models
            holder = models[0]
        elif models and part in models[0].model_fields:
            holder = models[0]
            path += f".{part}"
            models = _models_in(holder.model_fields[part].annotation)
        elif models and kind == "extra_forbidden":
            path, holder = f"{path}.{_cut(part)}", models[0]
    if kind.startswith("union_tag"):
        path += ".kind"
    return path.removeprefix("."), holder


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        choices = getattr(annotation, "choices", None)  # a draft's class follows from its kind
        return [annotation] if choices is None else list(choices())
    return [m for arg in get_args(annotation) for m in _models_in(arg)]


def _tag(model: type[BaseModel]) -> Any:
    kind = model.model_fields.get("kind")
    return get_args(kind.annotation)[0] if kind else None


def _rule(problem: Any) -> str:
    match problem["type"]:
        case "extra_forbidden":
            return "is not a field here"
        case "missing" | "union_tag_not_found":
            return "is required"
        case "literal_error":
            return f"must be {problem['ctx']['expected']}"
        case "union_tag_invalid":
            return f"must be one of {problem['ctx']['expected_tags']}"
        case "value_error":
            return str(problem["ctx"]["error"]).partition("; ")[0]
    message = str(problem["msg"])
    message = re.sub(r"^(Input|String|Value|Tuple) should ", "must ", message).replace("valid ", "")
    message = re.sub(r" after validation, not \d+$", "", message)
    return message.replace("a integer", "an integer").replace("a array", "a list").replace("an object", "a mapping")


def _fix(problem: Any, holder: type[BaseModel]) -> str:
    name = str(problem["loc"][-1]) if problem["loc"] else ""
    match problem["type"]:
        case "extra_forbidden":
            return f"{closest(name, list(holder.model_fields))}valid fields: {', '.join(holder.model_fields)}"
        case "missing":
            return f"add it; fields here: {', '.join(holder.model_fields)}"
        case "union_tag_not_found":
            return "add it, for example kind: self"
        case "literal_error" | "union_tag_invalid":
            valid = re.findall(r"'([^']*)'", " ".join(str(v) for v in problem["ctx"].values()))
            given = problem["input"]
            given = str(given.get("kind", "") if isinstance(given, dict) else given)
            return _HINT.get(given) or (closest(given, [v for v in valid if v != given]) or "pick one of them").strip()
        case "string_pattern_mismatch" if "http" in problem["ctx"]["pattern"]:
            return "give an address, such as http://localhost:8000/v1"
        case "too_short":
            return f"give at least {_COUNT.get(problem['ctx']['min_length'], 'as many')}, or remove the field"
        case "value_error":
            return str(problem["ctx"]["error"]).partition("; ")[2] or "change one of them"
    return _FIX.get(problem["type"], "change the value")


def _given(problem: Any) -> str:
    """The offending value, where showing it helps."""
    if problem["type"] in ("missing", "extra_forbidden", "value_error", "union_tag_not_found"):
        return ""
    return f" {short(problem['ctx']['tag'] if problem['type'] == 'union_tag_invalid' else problem['input'])}"


def short(value: Any) -> str:
    """A value as a message shows it."""
    return _cut(" ".join(repr(value).split()))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
