"""The matrix of comparisons: it reads, arms of a contest share what they are compared by, mistakes are named."""

from pathlib import Path

import pytest

from qspec.errors import RecipeError
from qspec.eval_files import eval_dir
from scripts.accuracy.matrix import Subject, read_matrix

FILES = [eval_dir() / "matrices" / f"{name}.yaml" for name in ("ablation", "fidelity")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_matrices_read_and_our_arms_are_valid(path: Path) -> None:
    """Catches a setting of ours that the schema has outgrown: it would be reported as a refusal."""
    for subject in read_matrix(path).values():
        for contest in subject.contests.values():
            assert contest.ours or contest.peers
            for method in contest.ours:
                assert contest.quantization("qspec", method).engine == "qspec"


def test_an_arm_is_its_base_and_its_own() -> None:
    """Catches an arm that loses the scheme of its contest, or runs in the other engine."""
    contest = {
        "base": {"scheme": "FP8", "kv": {"format": "fp8_e4m3"}},
        "peers": {"rtn": {}},
        "ours": {"best": {"method": "gptq"}},
    }
    fields = {"model": "org/m", "calibration": {}, "corpora": ["code"], "windows": 2, "length": 16}
    subject = Subject.model_validate({**fields, "contests": {"FP8": contest}})
    peer, ours = (subject.contests["FP8"].quantization(*arm) for arm in (("llmcompressor", "rtn"), ("qspec", "best")))
    assert (peer.engine, peer.method, ours.engine, ours.method) == ("llmcompressor", "rtn", "qspec", "gptq")
    assert peer.scheme == ours.scheme == "FP8"
    assert peer.kv == ours.kv


def test_what_the_schema_refuses_is_refused_when_the_arm_is_read() -> None:
    """Catches a refusal of one arm that stops all others."""
    contest = {"base": {"scheme": "W8A8"}, "peers": {"awq": {"method": "awq"}}}
    fields = {"model": "org/m", "calibration": {}, "corpora": ["code"], "windows": 2, "length": 16}
    subject = Subject.model_validate({**fields, "contests": {"W8A8": contest}})
    with pytest.raises(RecipeError, match="awq is for 4-bit weights"):
        subject.contests["W8A8"].quantization("llmcompressor", "awq")


def test_a_mistyped_field_is_named(tmp_path: Path) -> None:
    """Catches a setting that is ignored because its name is wrong."""
    path = tmp_path / "matrix.yaml"
    path.write_text("m: {model: org/m, calibration: {}, corpus: [code], windows: 2, length: 16, contests: {}}")
    with pytest.raises(RecipeError, match="corpora"):
        read_matrix(path)
