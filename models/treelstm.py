"""LSTM over trees: the operations that run depend on the tree.

Tai, Socher and Manning, "Improved semantic representations from tree-structured long short-term
memory networks", arXiv:1503.00075: the N-ary cell (section 3.2, here with two children), the
child-sum cell (section 3.1), and the model of semantic relatedness (section 4.2).

A tree is a tuple of nodes; each node is the tuple of its children's numbers. Children come before
their parents, the root is last.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "BinaryCell",
    "ChildSumCell",
    "Relatedness",
    "Tree",
    "TreeLSTM",
    "complete_tree",
    "random_parse_tree",
]

Tree = tuple[tuple[int, ...], ...]
State = tuple[Tensor, Tensor]


def complete_tree(depth: int) -> Tree:
    """Build the binary tree of ``2 ** (depth + 1) - 1`` nodes, numbered depth first.

    Parameters
    ----------
    depth
        Edges from the root to each leaf, 0 or more.

    Returns
    -------
    Tree
        The children of each node, by number.

    Raises
    ------
    ValueError
        `depth` is negative.
    """
    if depth < 0:
        raise ValueError(f"the depth of a tree is 0 or more, not {depth}")
    nodes: list[tuple[int, ...]] = []

    def grow(below: int) -> int:
        children = (grow(below - 1), grow(below - 1)) if below else ()
        nodes.append(children)
        return len(nodes) - 1

    grow(depth)
    return tuple(nodes)


def random_parse_tree(words: int, seed: int) -> Tree:
    """Draw a dependency tree without crossing edges over a sentence.

    The head of a span of words is uniform; each side of it is cut into the spans of its dependents,
    between two words with probability 1/4.

    Parameters
    ----------
    words
        Number of words, which are the nodes; 1 or more.
    seed
        The same seed gives the same tree.

    Returns
    -------
    Tree
        The children of each node, by number.

    Raises
    ------
    ValueError
        `words` is not positive.
    """
    if words < 1:
        raise ValueError(f"a sentence has at least one word, not {words}")
    draw = random.Random(seed)
    nodes: list[tuple[int, ...]] = []
    finished: list[int] = []
    todo: list[tuple[int, int]] = [(words, -1)]
    while todo:
        length, dependents = todo.pop()
        if dependents >= 0:
            split = len(finished) - dependents
            nodes.append(tuple(finished[split:]))
            finished[split:] = [len(nodes) - 1]
            continue
        head = draw.randrange(length)
        spans = [*_cut(head, draw), *_cut(length - 1 - head, draw)]
        todo.append((length, len(spans)))
        todo.extend((span, -1) for span in reversed(spans))
    return tuple(nodes)


def _cut(length: int, draw: random.Random) -> list[int]:
    """Return the lengths of the pieces of a side."""
    pieces: list[int] = []
    for position in range(length):
        if position == 0 or draw.random() < 0.25:
            pieces.append(0)
        pieces[-1] += 1
    return pieces


class BinaryCell(nn.Module):
    """The N-ary cell for two children, each with its own weights.

    Parameters
    ----------
    in_dim, mem_dim
        Features of a node's input, and of its state.
    """

    def __init__(self, in_dim: int, mem_dim: int) -> None:
        super().__init__()
        self.mem_dim = mem_dim
        self.gates_of_input = nn.Linear(in_dim, 3 * mem_dim)
        self.gates_of_children = nn.Linear(2 * mem_dim, 3 * mem_dim, bias=False)
        self.forget_of_input = nn.Linear(in_dim, mem_dim)
        self.forget_of_children = nn.Linear(2 * mem_dim, 2 * mem_dim, bias=False)

    def forward(self, x: Tensor, children: Sequence[State]) -> State:
        """Return hidden and cell state [batch, mem_dim] of a node.

        Parameters
        ----------
        x
            The node's input, [batch, in_dim].
        children
            Their states: none, or two.

        Returns
        -------
        State
            Hidden and cell state, [batch, mem_dim] each.

        Raises
        ------
        ValueError
            The node has another number of children.
        """
        if len(children) not in (0, 2):
            raise ValueError(
                f"a node has {len(children)} children, but the binary cell takes none or two; "
                "use ChildSumCell for other trees"
            )
        gates = self.gates_of_input(x)
        if not children:
            return _states(gates, None)
        hidden = torch.cat([hidden for hidden, _ in children], dim=1)
        gates = gates + self.gates_of_children(hidden)
        shared = self.forget_of_input(x)
        kept = None
        for forget, (_, cell) in zip(
            self.forget_of_children(hidden).chunk(2, dim=1), children, strict=True
        ):
            part = torch.sigmoid(shared + forget) * cell
            kept = part if kept is None else kept + part
        return _states(gates, kept)


class ChildSumCell(nn.Module):
    """The cell for any number of children, whose hidden states are summed.

    Parameters
    ----------
    in_dim, mem_dim
        Features of a node's input, and of its state.
    """

    def __init__(self, in_dim: int, mem_dim: int) -> None:
        super().__init__()
        self.mem_dim = mem_dim
        self.gates_of_input = nn.Linear(in_dim, 3 * mem_dim)
        self.gates_of_children = nn.Linear(mem_dim, 3 * mem_dim, bias=False)
        self.forget_of_input = nn.Linear(in_dim, mem_dim)
        self.forget_of_children = nn.Linear(mem_dim, mem_dim, bias=False)

    def forward(self, x: Tensor, children: Sequence[State]) -> State:
        """Return hidden and cell state [batch, mem_dim] of a node.

        Parameters
        ----------
        x
            The node's input, [batch, in_dim].
        children
            Their states.

        Returns
        -------
        State
            Hidden and cell state, [batch, mem_dim] each.
        """
        gates = self.gates_of_input(x)
        if not children:
            return _states(gates, None)
        shared = self.forget_of_input(x)
        total = kept = None
        for hidden, cell in children:
            part = torch.sigmoid(shared + self.forget_of_children(hidden)) * cell
            total = hidden if total is None else total + hidden
            kept = part if kept is None else kept + part
        return _states(gates + self.gates_of_children(total), kept)


def _states(gates: Tensor, kept: Tensor | None) -> State:
    enter, leave, new = gates.chunk(3, dim=1)
    cell = torch.sigmoid(enter) * torch.tanh(new)
    if kept is not None:
        cell = cell + kept
    return torch.sigmoid(leave) * torch.tanh(cell), cell


class TreeLSTM(nn.Module):
    """LSTM over a tree that returns the state of its root.

    Parameters
    ----------
    cell
        `BinaryCell` or `ChildSumCell`.
    classes
        If given, a linear layer and a log-softmax follow the root's hidden state.
    """

    def __init__(self, cell: BinaryCell | ChildSumCell, classes: int | None = None) -> None:
        super().__init__()
        self.cell = cell
        self.classify = None if classes is None else nn.Linear(cell.mem_dim, classes)

    def forward(self, inputs: Tensor, tree: Tree) -> Tensor:
        """Return the root's hidden state [batch, mem_dim], or log-probabilities [batch, classes].

        Parameters
        ----------
        inputs
            [nodes, batch, in_dim]
        tree
            One tree for the whole batch.

        Returns
        -------
        torch.Tensor
            [batch, mem_dim], or with classes [batch, classes].

        Raises
        ------
        ValueError
            The inputs are not one for each node.
        """
        if len(inputs) != len(tree):
            raise ValueError(f"{len(inputs)} inputs for a tree of {len(tree)} nodes; give one each")
        states: dict[int, State] = {}
        for node, (x, children) in enumerate(zip(inputs.unbind(0), tree, strict=True)):
            states[node] = self.cell(x, [states.pop(child) for child in children])
        hidden, _ = states.pop(len(tree) - 1)
        if self.classify is None:
            return hidden
        return F.log_softmax(self.classify(hidden), dim=1)


class Relatedness(nn.Module):
    """Relatedness of two sentences, from their trees: log-probabilities of the scores 1 to n.

    Parameters
    ----------
    vocab_size
        Number of words.
    in_dim, mem_dim
        Features of a word, and of a state.
    hidden_dim
        Features of the comparison.
    scores
        Number of scores.
    """

    def __init__(
        self, vocab_size: int, in_dim: int, mem_dim: int, hidden_dim: int = 50, scores: int = 5
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, in_dim)
        self.encode = TreeLSTM(ChildSumCell(in_dim, mem_dim))
        self.compare_products = nn.Linear(mem_dim, hidden_dim)
        self.compare_distances = nn.Linear(mem_dim, hidden_dim, bias=False)
        self.score = nn.Linear(hidden_dim, scores)

    def forward(self, left: tuple[Tensor, Tree], right: tuple[Tensor, Tree]) -> Tensor:
        """Return log-probabilities [1, scores] of two sentences: words [nodes] and tree of each."""
        first, second = (
            self.encode(self.embed(words).unsqueeze(1), tree) for words, tree in (left, right)
        )
        compared = self.compare_products(first * second)
        compared = compared + self.compare_distances((first - second).abs())
        return F.log_softmax(self.score(torch.sigmoid(compared)), dim=1)
