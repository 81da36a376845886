"""A speed study in the report of its pair: found, shown in all forms, refused where it is none."""

import csv
import json
from pathlib import Path

import pytest

from qspec import cli
from qspec.eval_files import eval_dir
from qspec.report.files import read_study, study_file
from qspec.report.page import document
from qspec.report.pairs import comparison
from qspec.schema.speed_rows import SpeedRows
from scripts.speed.study import Timed, largest_batches, row
from tests.example_results import example
from tests.report.test_pairs import pairs

Capture = pytest.CaptureFixture[str]
HEADING = "Speed by lengths and batch"


def study(target: str = "m") -> SpeedRows:
    """Three arms in two batches, three repeats each; one arm is synthetic."""
    rows = []
    for batch in (1, 4):
        base = {i: Timed((0.1 * batch,), (0.03,), 10, 0.3 + i / 100) for i in range(3)}
        arms = {"original": (base, None), "INT8": ({i: _faster(run, 2) for i, run in base.items()}, None)}
        arms["free"] = ({i: _faster(run, 3) for i, run in base.items()}, 0.8)
        for arm, (runs, synthetic) in arms.items():
            head = {"model": "tiny", "arm": arm, "shape": "9-9", "batch": batch, "prompt": 9, "new": 9}
            head |= {"engine": "qspec", "weights_mb": 100.0, "draft_mb": 5.0, "synthetic": synthetic, "target": target}
            rows.append(head | row(runs, base, 0.2))
    told = {"environment": {"cpu": "x"}, "rows": [*rows, *largest_batches(rows, 0.2)]}
    return SpeedRows.model_validate_json(json.dumps(told))


def _faster(run: Timed, factor: float) -> Timed:
    ttft, tpot = ((time / factor,) for time in (run.ttft[0], run.tpot[0]))
    return Timed(ttft, tpot, run.tokens, run.seconds / factor, grown=7_000_000)


def test_the_study_beside_a_pair_is_shown_in_all_forms(tmp_path: Path, capsys: Capture):
    """Would catch a study that is not found, forms that differ, and a free draft that passes for a real one."""
    (tmp_path / "report").mkdir()
    (tmp_path / "report/results.json").write_text(example().dump(), encoding="utf-8")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert HEADING not in capsys.readouterr().out
    (tmp_path / "report/speed.json").write_text(study().model_dump_json(), encoding="utf-8")
    assert cli.main(["report", str(tmp_path), "--full", "--out", str(tmp_path / "out")]) == 0
    assert HEADING in capsys.readouterr().out
    page = json.loads((tmp_path / "out/report.json").read_text(encoding="utf-8"))
    (table,) = [t for t in page["tables"] if "peak memory, MB" in t["columns"]]
    cells = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert [(c["arm"]["text"], c["at once"]["value"]) for c in cells[2:4]] == [("free (no draft)", 1), ("original", 4)]
    assert cells[1]["peak memory, MB"]["value"] == 112.0
    assert cells[1]["TTFT, s"]["value"] == 0.05
    with (tmp_path / "out/report.csv").open(encoding="utf-8") as file:
        found = [r for r in csv.DictReader(file) if r["table"] == table["caption"] and r["column"] == "TTFT, s"]
    assert [float(r["value"]) for r in found] == [c["TTFT, s"]["value"] for c in cells]
    text = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    assert "tiny: INT8 against original: faster at 9-9 x 1 (2.00×), 9-9 x 4 (2.00×)" in text
    assert "Speed was measured with one request at a time" not in text
    largest = text[text.index("Largest batch") :]
    assert "| original | 1 |" in largest
    assert "| free (no draft) | 4 |" in largest


def test_a_study_can_be_given(tmp_path: Path, capsys: Capture):
    """Would catch a given study that the one beside the pair wins over, one file said of two pairs, another model's."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(example().dump(), encoding="utf-8")
    (tmp_path / "a/speed.json").write_text("{}", encoding="utf-8")
    (tmp_path / "given.json").write_text(study("another").model_dump_json(), encoding="utf-8")
    given = ["--speed", str(tmp_path / "given.json")]
    assert cli.main(["report", str(tmp_path / "a"), *given]) == 0
    assert "this study is of another, the pair of" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["report", str(tmp_path / "a")]) == 2
    assert "is no speed study" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "a"), str(tmp_path / "b"), *given]) == 2
    assert "is of one pair" in capsys.readouterr().err


def test_a_study_of_a_pair_lies_outside_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Would catch a file in a pair that its manifest does not list, and a study that two pairs share."""
    pair = tmp_path / "pair"
    pair.mkdir()
    (pair / "pair.json").write_text("{}", encoding="utf-8")
    assert study_file(pair) == tmp_path / "pair.speed.json"
    monkeypatch.chdir(pair)
    assert study_file(Path(".")) == tmp_path / "pair.speed.json"
    (tmp_path / "pair.speed.json").write_text(study().model_dump_json(), encoding="utf-8")
    assert read_study(pair) == study()


def test_studies_of_several_pairs_are_told_apart():
    """Would catch the numbers of one pair under the name of another."""
    page = comparison(pairs(2), {"close": study()})
    assert f"{HEADING}: close" in [block.text for block in page.blocks if hasattr(block, "text")]


def test_the_kept_baseline_is_a_study():
    """Would catch a schema that left the script's rows behind."""
    found = SpeedRows.read(eval_dir() / "baselines/speed_cpu.json")
    assert HEADING in [block.text for block in document(example(), found).blocks if hasattr(block, "text")]
