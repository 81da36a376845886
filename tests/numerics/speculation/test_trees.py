"""Token trees: shapes that are easy to draw, and their algebra."""

import math

from hypothesis import given, strategies as st

from qspec.numerics.speculation.trees import (
    Tree,
    branches,
    children,
    depths,
    likeliest,
    merged_chains,
    path_to,
    spelled,
    subtree,
    under_root,
)

# 0 ─┬─ 1 ─── 4
#    └─ 2
# 3 ─── 5
PARENTS = (-1, 0, 0, -1, 1, 3)

any_tree = st.lists(st.integers(0, 9), max_size=12).map(
    lambda picks: [pick % (i + 1) - 1 for i, pick in enumerate(picks)]
)


def test_shape_of_a_small_tree() -> None:
    """Catches depths, paths or children that are off by one, and a root that counts as a node."""
    assert depths(PARENTS) == [0, 1, 1, 0, 2, 1]
    assert [path_to(PARENTS, node) for node in (-1, 4, 5)] == [[], [0, 1, 4], [3, 5]]
    assert children(PARENTS) == [[0, 3], [1, 2], [4], [], [5], [], []]
    assert under_root(PARENTS) == [-1, 0, 1, 1, 0, 2, 4]
    assert branches(PARENTS) == [([0, 2], 0), ([0, 1, 4], 1), ([3, 5], 0)]


@given(any_tree)
def test_branches_have_every_node_once(parents: list[int]) -> None:
    """Catches nodes that attention computes twice or never."""
    nodes = [node for path, seen in branches(parents) for node in path[seen:]]
    assert sorted(nodes) == list(range(len(parents)))
    assert all(path == path_to(parents, path[-1]) for path, _ in branches(parents))


@given(any_tree, st.data())
def test_the_likeliest_nodes_are_a_tree(parents: list[int], data: st.DataObject) -> None:
    """Catches a node kept without its parent (equal probabilities, zeros), or a likelier one that was dropped."""
    steps = data.draw(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=len(parents), max_size=len(parents)))
    reach = [math.prod(steps[i] for i in path_to(parents, node)) for node in range(len(parents))]
    budget = data.draw(st.integers(0, len(parents)))
    kept = likeliest(reach, budget)
    assert len(kept) == budget
    assert min((reach[i] for i in kept), default=1) >= max(
        (reach[i] for i in set(range(len(reach))) - set(kept)), default=0
    )
    small = subtree(Tree(list(range(len(parents))), parents), kept)
    assert small.tokens_K == kept
    assert [kept[p] if p >= 0 else -1 for p in small.parents_K] == [parents[i] for i in kept]


def test_chains_share_what_they_have_in_common() -> None:
    """Catches a prefix drafted twice, or equal tokens behind different parents merged into one."""
    tree = merged_chains([[1, 2, 3], [1, 2, 4], [2, 2, 3], [1, 2], []])
    assert tree == Tree([1, 2, 3, 4, 2, 2, 3], [-1, 0, 1, 1, -1, 4, 5])


def test_spelling_stops_where_the_tree_does() -> None:
    """Catches a walk that goes on behind a token the tree does not have."""
    tree = Tree([1, 2, 3, 2, 4], [-1, 0, 0, -1, 3])
    assert [spelled(tree, tokens) for tokens in ([], [1, 3, 9], [2, 4], [2, 3], [9, 1])] == [
        [],
        [0, 2],
        [3, 4],
        [3],
        [],
    ]
