"""Validation errors, a line each: where in the file, what was given, the rule, and the closest thing that is valid."""

from collections.abc import Callable
import difflib
from functools import cache
import json
import re
from typing import Annotated, Any, TypeVar, cast, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from qspec.errors import Problems, QspecError, RecipeError

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
_READ = 20
"""Failures that are looked at."""
_MARK = "is_rule"
_COUNT = {1: "one", 2: "two"}


def validate(model: type[M], data: Any, where: str, error: type[QspecError] = RecipeError) -> M:
    """`model` from plain data, with no silent conversion ("64" is no number).

    All problems of a recipe are raised together, a line each; of other files the first one is enough.
    """
    try:
        return model.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as e:
        problems = Problems(explain(e, model, where, error))
        if error is not RecipeError:
            raise problems.errors[0] from None
        problems.errors += _beside(e, model, data, where, error)
        problems.tell()
        raise AssertionError("a failure has a reason") from e
    except (ValueError, TypeError, RecursionError) as e:
        raise error(where, f"is not plain data ({e})", "remove the self-referring alias") from None


def explain(failure: ValidationError, root: type[BaseModel], where: str, error: type[QspecError]) -> list[QspecError]:
    """The first failures in the file's own terms, one for each path and, of rules across fields, for each rule."""
    by_path: dict[str, list[tuple[type[BaseModel], Any]]] = {}
    for problem in failure.errors(include_url=False)[:_READ]:
        path, holder = _locate(problem["loc"], problem["type"], root)
        by_path.setdefault(path, []).append((holder, problem))
    errors, paths = list[QspecError](), list[str]()
    for path, failures in by_path.items():
        if any(_within(path, at) or _within(at, path) for at in paths):  # a list repeats its item, a choice its parts
            continue
        paths += [path] if path else []
        holder, first = failures[0]
        name = f"{where}: {path or 'the whole file'}{_given(first)}"
        if first["type"] == "value_error":
            errors += _broken(str(first["ctx"]["error"]), name, error)
            continue
        rule = " or ".join(dict.fromkeys(_rule(p).removeprefix("must be ") for _, p in failures[1:]))
        errors.append(error(name, _rule(first) + (f" or {rule}" if rule else ""), _fix(first, holder)))
    return errors


def _within(path: str, other: str) -> bool:
    return f"{path}.".startswith((f"{other}.", f"{other}["))


def _broken(rules: str, name: str, error: type[QspecError]) -> list[QspecError]:
    """Rules that were broken, a line each, as `what breaks which rule; fix`."""
    parts = (line.partition("; ") for line in rules.splitlines())
    return [error(name, rule, fix or "change one of them") for rule, _, fix in parts]


def _beside(
    failure: ValidationError, model: type[BaseModel], data: Any, where: str, error: type[QspecError]
) -> list[QspecError]:
    """Rules across those sections of a file that are sound, where others are not."""
    broken = {problem["loc"][0] for problem in failure.errors(include_url=False) if problem["loc"]}
    if not broken or not isinstance(data, dict):
        return []
    values: dict[str, Any] = {}
    for name in (name for name in data if name in model.model_fields and name not in broken):
        values[name] = _alone(model, name).validate_json(json.dumps(data[name], default=str))
    sound = model.model_construct(**values)
    for name in broken:
        sound.__dict__.pop(str(name), None)
    return [e for text in broken_rules(sound) for e in _broken(text, f"{where}: the whole file", error)]


@cache
def _alone(model: type[BaseModel], name: str) -> TypeAdapter[Any]:
    """Reads one field of a model by itself."""
    field = model.model_fields[name]
    return TypeAdapter(cast("Any", Annotated[field.annotation, field]))


F = TypeVar("F", bound=Callable[..., None])


def rule(check: F) -> F:
    """Mark a method as a rule across the fields of its model. It raises `ValueError`: `what breaks which rule; fix`."""
    setattr(check, _MARK, True)
    return check


def broken_rules(model: BaseModel) -> list[str]:
    """Rules that a model breaks; none of those for which it lacks a field."""
    members = {name: member for kind in reversed(type(model).__mro__) for name, member in vars(kind).items()}
    broken = []
    for check in (member for member in members.values() if getattr(member, _MARK, False)):
        try:
            check(model)
        except ValueError as e:
            broken.append(str(e))
        except AttributeError:
            if model.__dict__.keys() >= type(model).model_fields.keys():
                raise
    return broken


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
            return (closest(given, [v for v in valid if v != given]) or "pick one of them").strip()
        case "string_pattern_mismatch" if "http" in problem["ctx"]["pattern"]:
            return "give an address, such as http://localhost:8000/v1"
        case "too_short":
            return f"give at least {_COUNT.get(problem['ctx']['min_length'], 'as many')}, or remove the field"
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
