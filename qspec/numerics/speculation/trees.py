"""Trees of draft tokens: several continuations that share what they have in common.

K nodes in topological order; `parents_K[i]` is the node before node i, -1 where that is the root: the sequence that
the tree continues, itself no node. A chain has the parents -1, 0, 1, …
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

Parents = Sequence[int]


class Tree(NamedTuple):
    """Tokens and parents of K nodes."""

    tokens_K: list[int]
    parents_K: list[int]


def depths(parents_K: Parents) -> list[int]:
    """How many nodes stand before each one; 0 for the root's children."""
    depths_K: list[int] = []
    for parent in parents_K:
        depths_K.append(depths_K[parent] + 1 if parent >= 0 else 0)
    return depths_K


def check_path(parents_K: Parents, path: Sequence[int]) -> None:
    """Asserts that `path` leads from the root down, each node the parent of the next."""
    edges = zip((-1, *path), path, strict=False)
    assert all(parents_K[node] == parent for parent, node in edges), f"{path} is no path from the root"


def path_to(parents_K: Parents, node: int) -> list[int]:
    """The nodes from the root's child down to `node`; none for the root, -1."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents_K[node]
    return path[::-1]


def children(parents_K: Parents) -> list[list[int]]:
    """Children of the root, then of every node, in their order: K + 1 lists."""
    children_K1: list[list[int]] = [[] for _ in range(len(parents_K) + 1)]
    for node, parent in enumerate(parents_K):
        children_K1[parent + 1].append(node)
    return children_K1


def branches(parents_K: Parents) -> list[tuple[list[int], int]]:
    """The path to every leaf, and how many of its leading nodes an earlier branch has had."""
    inner, paths, had = set(parents_K), list[tuple[list[int], int]](), set[int]()
    for leaf in range(len(parents_K)):
        if leaf not in inner:
            path = path_to(parents_K, leaf)
            paths.append((path, sum(node in had for node in path)))
            had.update(path)
    return paths


def under_root(parents_K: Parents) -> list[int]:
    """The same tree below one more node, which comes first."""
    return [-1, *(parent + 1 for parent in parents_K)]


def likeliest(path_probs_K: Sequence[float], budget: int) -> list[int]:
    """The `budget` nodes of largest path probability, in their order.

    No path is likelier than its beginning, and of equals the first stays: what stays is a tree again.
    Source: EAGLE-2, arXiv 2406.16858, section 4.2.
    """
    return sorted(sorted(range(len(path_probs_K)), key=lambda node: -path_probs_K[node])[:budget])


def subtree(tree: Tree, nodes: Sequence[int]) -> Tree:
    """Some nodes of a tree, parents first and no parent missing, numbered in this order."""
    renumbered = {-1: -1} | {node: i for i, node in enumerate(nodes)}
    return Tree([tree.tokens_K[node] for node in nodes], [renumbered[tree.parents_K[node]] for node in nodes])


def spelled(tree: Tree, tokens: Sequence[int]) -> list[int]:
    """The path from the root that spells as many of the leading `tokens` as any; the first of equal siblings."""
    children_K1, path = children(tree.parents_K), list[int]()
    for token in tokens:
        node = path[-1] if path else -1
        match = next((child for child in children_K1[node + 1] if tree.tokens_K[child] == token), None)
        if match is None:
            break
        path.append(match)
    return path


def merged_chains(chains: Iterable[Iterable[int]]) -> Tree:
    """One tree of several chains: what begins alike is drafted once. Its nodes are chosen, not drawn: certain."""
    tree, known = Tree([], []), dict[tuple[int, int], int]()
    for chain in chains:
        parent = -1
        for token in chain:
            if (parent, token) not in known:
                known[parent, token] = len(tree.tokens_K)
                tree.tokens_K.append(token)
                tree.parents_K.append(parent)
            parent = known[parent, token]
    return tree
