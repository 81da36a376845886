"""The layers of docs/architecture.md, read from the source: every import counts, also one inside a function."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
import subprocess
import sys

import qspec

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES = 17
"""Files that a room may hold beside its `__init__.py`."""
LAYERS = (
    ("errors", "limited", "plain_files", "provenance", "kept", "progress", "eval_files", "readable", "memory"),
    ("numerics",),
    ("ops", "schema", "plan", "scheme_table"),
    ("nn", "records"),
    ("speculation", "bridges"),
    ("models", "schemes"),
    ("quantization", "pair"),
    ("planning", "train", "serving"),
    ("measure",),
    ("report",),
    ("inspection", "tune"),
    ("pipeline", "remeasure", "publish", ""),  # "" is qspec/__init__.py, the public face
    ("cli", "__main__"),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
HOMES = {
    "transformers": "bridges.hf",
    "tokenizers": "bridges.hf",
    "gguf": "bridges.gguf",
    "safetensors": "bridges.tensors",
    "compressed_tensors": "bridges.compressed",
    "llmcompressor": "bridges.oneshot",
    "lm_eval": "bridges.harness",
    "optimum": "bridges.optimum",
    "datasets": "bridges.text",
    "huggingface_hub": "bridges.hub",
    "fsspec": "bridges.remote",
    "httpx": "bridges.openai_api",
    "starlette": "serving.server",
    "uvicorn": "serving.server",
    "h11": "serving.server",
    "vllm": "bridges.vllm.heads",
    "numpy": "bridges",
    "scipy": "numerics",
    "jinja2": "report.render",
    "matplotlib": "report.render",
    "triton": "ops.cuda",
    "pydantic": "schema",
    "pydantic_core": "schema",
    "yaml": "schema",
    "typer": "cli",
    "tqdm": "progress",
}

VAGUE = {"told", "said", "asked", "found", "stood", "law", "laws"}
"""Words that no name is made of: a value is called by the noun that it is."""
STORED = {("schema.results", "found")}
"""Fields of files that are out: another name would make them unreadable."""


def module_of(path: Path) -> str:
    """`qspec/speculation/drafters/__init__.py` -> `speculation.drafters`."""
    return ".".join(path.relative_to(ROOT / "qspec").with_suffix("").parts).removesuffix("__init__").rstrip(".")


FILES = {module_of(path): path for path in sorted((ROOT / "qspec").rglob("*.py"))}


def imports(module: str) -> set[str]:
    """Full names of the modules that `module` imports, anywhere in its text."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name.removeprefix("qspec.") in FILES else node.module for name in names}
    return found


def own(module: str) -> set[str]:
    """Modules of qspec that `module` imports, as keys of `FILES`."""
    return {name.removeprefix("qspec").removeprefix(".") for name in imports(module) if room(name) == "qspec"}


def room(module: str) -> str:
    return module.partition(".")[0]


def test_imports_go_down_or_sideways():
    """Would catch numerics that know of models, an engine that knows of a library, a stage that calls the pipeline."""
    assert {room(module) for module in FILES} <= LEVEL.keys(), "a new room: give it a layer here and in the docs"
    edges = [(module, name) for module in FILES for name in own(module)]
    assert [edge for edge in edges if LEVEL[room(edge[0])] < LEVEL[room(edge[1])]] == []
    assert [edge for edge in edges if room(edge[0]) == "speculation" and room(edge[1]) == "bridges"] == []


def test_rooms_are_small_and_named():
    """Would catch a room that becomes a hall again, and one that does not say what it is for."""
    files = Counter(path.parent for path in FILES.values() if path.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): n for folder, n in files.items() if n > MOST_FILES} == {}
    assert [folder for folder in files if not ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))] == []


def test_no_room_hides_a_public_function():
    """Would catch a room named as a function of `import qspec`, which its first import puts a module in place of."""
    assert LEVEL.keys().isdisjoint(qspec.__all__)


def test_no_cycles():
    """Would catch a cycle that a function-level import hides; `prepare` raises and names it."""
    TopologicalSorter({module: own(module) - {module} for module in FILES}).prepare()


def test_each_library_has_one_home():
    """Would catch a second file that must change when a library does; only torch may be used everywhere."""
    everywhere = {"qspec", "torch", *sys.stdlib_module_names}
    uses = {(module, room(name)) for module in FILES for name in imports(module) if room(name) not in everywhere}
    assert {library for _, library in uses} <= HOMES.keys(), "a new library: give it a home here and in the docs"
    assert [use for use in sorted(uses) if not f"{use[0]}.".startswith(f"{HOMES[use[1]]}.")] == []


def test_command_line_starts_without_heavy_libraries():
    """Would catch a module-level import that makes `qspec --help` take seconds."""
    heavy = sorted({"transformers", "llmcompressor", "lm_eval", "datasets", "optimum", "compressed_tensors"})
    code = f"import sys, qspec.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def syntax(modules: Iterable[str]) -> Iterator[tuple[str, ast.AST]]:
    """Every node of these modules, with the module's name."""
    for module in modules:
        for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
            yield module, node


def studies() -> Iterator[tuple[str, ast.AST]]:
    """Every part of the text of every script, with the script's path."""
    for path in sorted((ROOT / "scripts").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield str(path.relative_to(ROOT)), node


def bound(node: ast.AST) -> str:
    """The name that a node gives to a variable, an argument, a function, a class or an attribute; else nothing."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
    return ""


def test_names_are_nouns_and_docstrings_have_subjects():
    """Would catch a value named for how it came (`found`, `told`), and a docstring that begins in mid-sentence."""
    vague, headless = set[tuple[str, str]](), set[tuple[str, str]]()
    for module, node in syntax(FILES):
        if VAGUE & set(bound(node).lower().split("_")):
            vague.add((module, bound(node)))
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if text.split()[:1] in (["Of"], ["What"], ["Whose"]):
                headless.add((module, text.partition("\n")[0]))
    assert (vague, headless) == (STORED, set())
    assert [(path, bound(node)) for path, node in studies() if VAGUE & set(bound(node).lower().split("_"))] == []


def test_each_public_class_has_a_name_of_its_own():
    """Would catch two `Answer`s, of which a reader must find out which one a signature means."""
    names = Counter(node.name for _, node in syntax(FILES) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1 and not name.startswith("_")] == []
