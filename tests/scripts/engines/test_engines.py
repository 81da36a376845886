"""The comparison of engines: what its processes say to each other, what rounds come to, and the form of its rows."""

import json
import os
from pathlib import Path
import sys

import pytest

from qspec.errors import QspecError, RecipeError
from scripts.common import write_baseline
from scripts.engines.client import Worker
from scripts.engines.matrix import read_engine_matrix
from scripts.engines.rows import Answer, agreement, speed_row, table

ROOT = Path(__file__).resolve().parents[3]
PEERS = ROOT / "scripts/engines/peers"
MATRIX = ROOT / "eval/matrices/cpu_engines.yaml"
FAKE = """
import os, sys, struct
sys.path.insert(0, PEERS)
from wire import serve

class Fake:
    def __init__(self, options):
        print("noise of a library")
        self.facts = {"version": "1", "weight_bytes": 10, "threads": os.environ["OMP_NUM_THREADS"]}

    def generate(self, prompts, new, speculation, clock):
        if speculation.get("die"):
            os._exit(3)
        if speculation.get("hang"):
            import time
            time.sleep(60)
        for i in range(len(prompts)):
            clock.add(1, i)
        return [[prompt[-1]] * (new - speculation.get("short", 0)) for prompt in prompts]

    def write_logits(self, ids, path):
        open(path, "wb").write(struct.pack(f"{len(ids)}f", *ids))

serve(Fake)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    script = tmp_path / "fake.py"
    script.write_text(FAKE.replace("PEERS)", f"{str(PEERS)!r})"), encoding="utf-8")
    return Worker("fake", [sys.executable, script], 1, tmp_path / "log")


def test_a_worker_answers_in_order_whatever_its_library_prints(worker: Worker, tmp_path: Path) -> None:
    """Catches a library's own output read as an answer, and threads that are not the comparison's."""
    with worker:
        assert worker.ask("load")["threads"] == "1"
        reply = worker.ask("generate", prompts=[[1, 2], [3, 4]], new=3, speculation={})
        assert reply["ids"] == [[2, 2, 2], [4, 4, 4]]
        assert reply["first"] == 2
        assert 0 < reply["ttft_s"] <= reply["seconds"]
        assert worker.ask("logits", ids=[5, 6], path=str(tmp_path / "l")) == {}
    assert (tmp_path / "l").stat().st_size == 8
    assert "noise" in (tmp_path / "log").read_text(encoding="utf-8")


def test_an_answer_of_another_length_is_an_error_and_the_worker_goes_on(worker: Worker) -> None:
    """Catches an engine that stops at its stop token and is timed on fewer tokens than the others."""
    with worker:
        worker.ask("load")
        with pytest.raises(QspecError, match="3 were asked for"):
            worker.ask("generate", prompts=[[1]], new=3, speculation={"short": 1})
        assert worker.ask("generate", prompts=[[1]], new=1, speculation={})["ids"] == [[1]]


def test_a_worker_that_dies_is_named(worker: Worker) -> None:
    """Catches a comparison that waits for ever, or ends, when one engine crashes."""
    with worker:
        worker.ask("load")
        with pytest.raises(QspecError, match="fake: ended with 3 at generate"):
            worker.ask("generate", prompts=[[1]], new=1, speculation={"die": True})
        with pytest.raises(QspecError, match="ended with 3"):
            worker.ask("generate", prompts=[[1]], new=1, speculation={})


def test_a_worker_that_hangs_is_given_up(worker: Worker) -> None:
    """Catches a hung engine that holds the whole comparison."""
    with worker:
        worker.ask("load")
        with pytest.raises(QspecError, match="did not answer in time"):
            worker.ask("generate", patience=0.2, prompts=[[1]], new=1, speculation={"hang": True})


def test_a_worker_sleeps_between_questions(worker: Worker) -> None:
    """Catches threads of one engine that spin while another is timed."""
    with worker:
        worker.ask("load")
        pid = worker._process.pid
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        assert Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"


def rounds(*seconds: float, tokens: int = 11, first: int = 1) -> dict[int, Answer]:
    return {r: Answer(1.0, 1.0 + s, first, [list(range(tokens))]) for r, s in enumerate(seconds)}


HEAD = {"engine": "a", "precision": "p", "speculation": "none", "shape": "chat", "batch": 1, "prompt": 7, "gen": 11}


def test_medians_and_ratios_by_round() -> None:
    """Catches means that one slow round moves, and ratios of medians of different rounds."""
    row = speed_row(HEAD, rounds(1, 2, 10), rounds(2, 6, 10), {}, 20.0)
    assert row["tok_s"] == 5.0
    assert row["spread"]["tok_s"] == [1.0, 10.0]
    assert row["ratio_to_transformers_bf16"] == 2.0
    assert row["ratio_spread"] == [1.0, 3.0]
    assert row["ceiling_tok_s"] == 20.0
    assert row["repeats"] == 3
    assert row["ratio_to_plain"] is None


def test_tokens_of_a_first_draft_are_not_counted_twice() -> None:
    """Catches a speed that counts tokens which came with the first one."""
    assert Answer(1.0, 2.0, 4, [list(range(10))]).tok_s(7) == 6.0


def test_one_token_measures_the_prompt() -> None:
    """Catches a division by zero, or a decoding speed of nothing."""
    assert Answer(2.0, 2.0, 2, [[1], [2]]).tok_s(8) == 8.0


def test_agreement_ends_where_answers_part() -> None:
    """Catches tokens counted as equal behind a difference, where they are equal by chance."""
    assert agreement(Answer(1, 2, 1, [[1, 2, 3, 4]]), Answer(1, 2, 1, [[1, 9, 3, 4]])) == 0.25


def test_the_baseline_file_holds_a_row_a_line(tmp_path: Path) -> None:
    """Catches a baseline that is no JSON, or whose rows lack what is compared."""
    rows = [speed_row(HEAD, rounds(1), rounds(1), {}, None), {"engine": "b", "precision": "p", "refused": "why"}]
    write_baseline(tmp_path / "b.json", {"cpu": "x"}, rows)
    read = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    assert read["environment"].items() >= {"cpu": "x"}.items()
    wanted = {"engine", "precision", "speculation", "batch", "prompt", "gen", "tok_s", "ttft_s", "repeats", "spread"}
    assert wanted <= read["rows"][0].keys()
    assert [*table(read["rows"])][-1] == "b p: refused, why"


def test_every_engine_of_the_matrix_has_its_worker() -> None:
    """Catches an engine that cannot be started: its file, its weights or its environment has another name."""
    matrix = read_engine_matrix(MATRIX)
    assert matrix.baseline in matrix.engines
    for engine in matrix.engines.values():
        assert (PEERS / f"run_{engine.worker}.py").is_file()
        assert "none" in engine.speculations


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("baseline: transformers bf16", "baseline: nobody", "baseline names 'nobody'"),
        ("peer: llama_cpp, precision: Q8_0", "peer: nobody, precision: Q8_0", "peer names 'nobody'"),
        ("{kind: gguf, format: Q8_0}", "{kind: gguf}", "need a format"),
    ],
)
def test_a_wrong_name_in_the_matrix_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    """Catches a misspelt name that is found out after an hour of measuring."""
    text = MATRIX.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "m.yaml").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(RecipeError, match=said):
        read_engine_matrix(tmp_path / "m.yaml")
