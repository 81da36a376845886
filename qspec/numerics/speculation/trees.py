"""Trees of draft tokens: several continuations that share what they have in common.

K nodes in topological order; `parents_K[i]` is the node before node i, -1 where that is the root: the sequence that
the tree continues, itself no node. A chain has the parents -1, 0, 1, …
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor

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


def attention_mask(parents_K: Parents) -> Tensor:
    """Boolean `[K, K]`: whether the node of the row sees that of the column, an ancestor or itself."""
    mask_KK = torch.zeros(len(parents_K), len(parents_K), dtype=torch.bool)
    for node in range(len(parents_K)):
        mask_KK[node, path_to(parents_K, node)] = True
    return mask_KK


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


def product_tree(tokens_DW: Sequence[Sequence[int]], probs_DW: Sequence[Sequence[float]], budget: int) -> Tree:
    """The `budget` likeliest paths where D levels offer candidates by position alone, likeliest first in each.

    For heads that predict every position at once: a path's probability is the product of its candidates'.
    """
    tree, reach_K = Tree([], []), list[float]()
    waiting: list[tuple[float, int, int, int]] = []  # -path probability, parent, level, candidate

    def offer(parent: int, level: int, candidate: int) -> None:
        if level < len(probs_DW) and candidate < len(probs_DW[level]):
            before = reach_K[parent] if parent >= 0 else 1.0
            heappush(waiting, (-before * probs_DW[level][candidate], parent, level, candidate))

    offer(-1, 0, 0)
    while waiting and len(reach_K) < budget:
        negative, parent, level, candidate = heappop(waiting)
        tree.tokens_K.append(tokens_DW[level][candidate])
        tree.parents_K.append(parent)
        reach_K.append(-negative)
        offer(len(reach_K) - 1, level + 1, 0)
        offer(parent, level, candidate + 1)
    return tree


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
