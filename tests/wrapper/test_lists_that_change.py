"""Lists that an item changes while the C extension reads them: read as they are, or refused."""

from __future__ import annotations

import subprocess
import sys

import children
import pytest
import torch

from rotor import _core, dtr
from rotor.dtr.operators import Operator

aten = torch.ops.aten


class Clears:
    """Number of a list that empties the list when it is read, and fills the freed memory."""

    def __init__(self, number, count=200):
        self.number, self.items, self.filled = number, [self] + [number] * count, []

    def __index__(self):
        self.items.clear()
        self.filled = [bytearray(8 * k) for k in range(400)]
        return self.number

    def __float__(self):
        return float(self.__index__())


class Pops(list):
    """Orders of events that lose their last one whenever one is handed over."""

    def __iter__(self):
        while self:
            yield self[0]
            self.pop()


class Name(str):
    """Name of an argument that removes all arguments when its hash is asked for."""

    arguments: dict

    def __hash__(self):
        if getattr(self, "arguments", None):
            arguments, self.arguments = self.arguments, {}
            arguments.clear()
        return str.__hash__(self)


def recorder():
    return _core.Recorder("DTR", 10**9)


def median():
    assert _core.stable_median(Clears(5).items, 0.1) == (5, True)


def median_with_a_tolerance_that_clears():
    numbers = Clears(5)
    numbers.items[0] = 5
    with pytest.raises(ValueError, match="at least one"):
        _core.stable_median(numbers.items, numbers)


def begin():
    book = recorder()
    with pytest.raises(TypeError, match="expected an int"):
        book.begin(Clears(book.source(10, False, None)).items)
    book.begin([book.source(10, False, None)])


def begin_by_nodes_that_begin():
    book = recorder()
    node = book.source(10, False, None)

    def nodes():
        book.begin([node])
        yield node

    with pytest.raises(RuntimeError):
        book.begin(nodes())


def finish():
    for nbytes, origins in ((5, [-1] * 201), ([8] * 201, -1)):
        book = recorder()
        book.begin([book.source(10, False, None)])
        book.next()
        book.make_room(100, 0)
        lists = [Clears(x).items if isinstance(x, int) else x for x in (nbytes, origins)]
        with pytest.raises(TypeError, match="expected an int"):
            book.finish(0, *lists, 1, 0, 0, [None] * 201, None)
        book.abort()


def written_log():
    writer = _core.LogWriter()
    writer.constant("a")
    writer.memory("a", 8)
    inputs = Clears(0)
    writer.mutate("f", ["a"], inputs.items, 1)


def arguments_by_name():
    with dtr.budget(None) as session:
        kernel = Operator(aten.add.Tensor).kernel
        name = Name("alpha")
        arguments = {name: 10**30, "other": torch.ones(3)}
        name.arguments = arguments
        session._handler.signature(kernel, (torch.ones(3), torch.ones(3)), arguments)


ATTACKS = [
    median,
    median_with_a_tolerance_that_clears,
    begin,
    begin_by_nodes_that_begin,
    finish,
    written_log,
    arguments_by_name,
]


@pytest.fixture(scope="module")
def child():
    """Return the end of a process that runs all attacks, and says which it has survived."""
    return subprocess.run(
        [sys.executable, __file__],
        capture_output=True, text=True, timeout=240, env=children.environment(),
    )  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_list_that_changes_is_read_as_it_is_or_refused(attack, child):
    assert attack.__name__ in child.stdout.splitlines(), child.stderr


def test_the_process_of_the_attacks_ends_well(child):
    assert child.returncode == 0, child.stderr


if __name__ == "__main__":
    for attack in ATTACKS:
        attack()
        print(attack.__name__, flush=True)
