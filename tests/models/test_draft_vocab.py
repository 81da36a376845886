"""Which ids a draft may say, where that is refused, and that it survives the disk."""

from pathlib import Path

import pytest
import torch

from qspec.bridges import compressed
from qspec.errors import RecipeError, SourceError
from qspec.models.vocab import frequent, limited
from qspec.pair.drafters.registry import kind_of
from qspec.pair.open import open_pair
from qspec.pair.package import package
from qspec.planning.planned import resolve
from qspec.schema.devices import read_device
from qspec.schema.recipe import Recipe
from tests.jobs import job
from tests.pairs import halves, recipe
from tests.tiny import VOCAB_SIZE, tiny_model


def test_the_most_frequent_ids_are_kept() -> None:
    """Rare ids in place of frequent ones, an order by count, and a draft that can never end an answer."""
    rows = [[9, 9, 9, 7, 7], [7, 5, 5, 2]]
    assert frequent(rows, 3, 12, ()).tolist() == [5, 7, 9]
    assert frequent(rows, 3, 12, (11,)).tolist() == [7, 9, 11]
    assert frequent(rows, 6, 12, ()).tolist() == [0, 1, 2, 5, 7, 9]
    assert frequent([], 2, 12, ()).tolist() == [0, 1]


def test_a_pair_keeps_its_ids_and_says_who_obeys_them(tmp_path: Path) -> None:
    """Ids lost on disk, so that a pair drafts otherwise than it was measured; servers said to cut the head too."""
    target, draft = halves(tmp_path / "model")
    draft = limited(draft, 50, [[30, 31, 32] * 9])
    fields = recipe().as_dict()
    fields["draft"]["draft_vocab"] = 50
    pair = open_pair(package(target, draft, Recipe.model_validate(fields), tmp_path / "out"))
    assert pair.draft.model is not None
    assert pair.draft.model.head_ids is not None
    assert draft.head_ids is not None
    assert torch.equal(pair.draft.model.head_ids, draft.head_ids)
    assert {30, 31, 32} <= set(draft.head_ids.tolist())
    allowed, text = set(draft.head_ids.tolist()), "The quick brown fox"
    assert pair.generate(text, 12).generation.tokens == pair.generate(text, 12, speculative=False).generation.tokens
    drafted = pair.new_drafter().propose([1, 30, 31], 3, pair._sampling(1.0, None, None), torch.Generator())
    assert set(drafted.tokens_K.tolist()) <= allowed
    said = {(one.runtime, one.part): one for one in pair.manifest.served_by}
    assert all("whole head" in said[runtime, "draft"].detail for runtime in ("vllm", "transformers"))
    assert any("50 of" in note for note in pair.manifest.draft.notes)


@pytest.mark.parametrize("ids", [[3, 2], [0, VOCAB_SIZE], [-1, 2]])
def test_ids_that_are_no_draft_vocabulary_are_refused(tmp_path: Path, ids: list[int]) -> None:
    """Rows of the head taken twice or from nowhere, by a file that was edited."""
    _, draft = halves(tmp_path / "model")
    compressed.write(limited(draft, 2, [[1, 2]]), tmp_path / "draft", torch.float32)
    path = tmp_path / "draft" / "qspec.json"
    kept = path.read_text()
    at = kept.index('"head_ids": [')
    path.write_text(kept[:at] + f'"head_ids": {ids}\n}}\n')
    with pytest.raises(SourceError, match="head_ids"):
        compressed.read(tmp_path / "draft")


def test_what_cannot_be_cut_is_refused_before_compute(tmp_path: Path) -> None:
    """A vocabulary that leaves nothing out, tiles of rows taken apart, and a head that no server of a GPU cuts."""
    model = tiny_model("llama", tmp_path / "model")
    draft = {"kind": "self", "quantization": {"scheme": "W4A16", "group_size": 32}}
    found = resolve(job(tmp_path, model, draft={**draft, "draft_vocab": 50}))
    whole = resolve(job(tmp_path, model, draft=draft))
    assert found.calibrates
    assert found.draft is not None
    assert whole.draft is not None
    saved = whole.draft.bytes.cost.weight_bytes - found.draft.bytes.cost.weight_bytes
    arch = found.draft.arch
    assert saved == (arch.vocab_size - 50) * arch.hidden_size * 4
    with pytest.raises(RecipeError, match="ids; give fewer"):
        resolve(job(tmp_path, model, draft={**draft, "draft_vocab": 100_000}))
    tiles = {"scheme": "FP8_BLOCK", "ignore": []}
    with pytest.raises(RecipeError, match="tiles"):
        resolve(job(tmp_path, model, draft={"kind": "self", "quantization": tiles, "draft_vocab": 50}))
    levels = [
        f.level
        for f in kind_of(found.recipe.draft).findings(read_device("h100"), found.recipe)
        if "draft_vocab" in f.value
    ]
    assert levels == ["refused"]
