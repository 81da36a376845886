"""From a recipe's draft to a drafter: what drafters of one target share."""

from pathlib import Path

import torch

from qspec.bridges.heads import speculator
from qspec.bridges.hf import load_folder
from qspec.nn.engines import open_decoder
from qspec.nn.mlp_speculator import MLPSpeculator, initialize
from qspec.pair.drafters.registry import Drafters, draft_lm
from qspec.pair.head import shape_of, target_rows
from qspec.schema.drafts import MlpDraft, NgramDraft, SelfDraft
from qspec.speculation.drafters.combined import CombinedDrafter
from qspec.speculation.drafters.mlp import MlpDrafter
from qspec.speculation.drafters.ngram import NgramDrafter
from tests.tiny import tiny_model


def test_drafts_of_equal_weights_share_their_model_and_no_cache(tmp_path: Path) -> None:
    """Would catch a model in memory per arm, one draft's weights for another's, and two drafters on one cache."""
    target, opened = load_folder(tiny_model("llama", tmp_path / "model")), list[int]()

    def open_draft():
        opened.append(1)
        return open_decoder(target, max_length=32)

    drafters, two_layers = Drafters(target), SelfDraft(kind="self", layers=2)
    first = drafters.new(two_layers, open_draft)
    second = drafters.new(two_layers.model_copy(update={"lookup": "suffix"}), open_draft)
    assert len(opened) == 1
    one, other = draft_lm(first), draft_lm(second)
    assert one is not None
    assert other is not None
    one.forward(torch.tensor([5, 6]))
    assert other.length == 0
    drafters.new(SelfDraft(kind="self", layers=1), open_draft)
    assert len(opened) == 2
    assert isinstance(drafters.new(NgramDraft(kind="ngram"), open_draft), NgramDrafter)
    assert len(opened) == 2


def test_heads_of_equal_weights_are_read_once(tmp_path: Path) -> None:
    """Would catch a head that every request of a batch reads and packs anew, and a tree's head served as a chain's."""
    target = load_folder(tiny_model("llama", tmp_path / "model"))
    draft = MlpDraft(kind="mlp_speculator", model=str(tmp_path / "head"), n_predict=2, shared=True)
    head = MLPSpeculator(shape_of(draft, target.arch), None, *target_rows(target))
    initialize(head, torch.Generator().manual_seed(0))
    speculator.write(head, tmp_path / "head")
    drafters = Drafters(target)

    def open_draft():
        raise AssertionError("a head is no draft model")

    chain = drafters.new(draft, open_draft)
    tree = drafters.new(draft.model_copy(update={"lookup": "suffix", "candidates": 3}), open_draft)
    assert isinstance(chain, MlpDrafter)
    assert isinstance(tree, CombinedDrafter)
    assert isinstance(tree.model, MlpDrafter)
    assert chain.head is tree.model.head
