"""Random chains for property tests: seeded, and by hypothesis. Generators that vary.

Sizes are small integers so that ties, equal sizes and exact fits are common; each size has a range
of its own, drawn per chain, so that any of them may be zero throughout, or dwarf all others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from rotor.chain import Chain

NS = 1e-9

Draw = Callable[[int, int], int]
"""``draw(low, high)``: a whole number, both ends included."""


def _fields(draw: Draw, n: int, published: bool, scale: int) -> dict[str, Any]:
    tops = (0, 1, 3, 8, 40)

    def top() -> int:
        return scale * tops[draw(0, len(tops) - 1)]

    def values(count: int) -> list[int]:
        high = top()
        style = draw(0, 4)
        if style == 0:
            return [draw(0, high)] * count
        if style == 1:
            return [high if draw(0, 3) == 0 else 0 for _ in range(count)]
        return [draw(0, high) for _ in range(count)]

    x = values(n + 1)
    extra = values(n)
    grad = x if published or draw(0, 1) == 0 else values(n + 1)
    forward_tmp = values(n)
    backward_tmp = values(n)
    loss_tmp = draw(0, top())
    signed = not published and draw(0, 1) == 1
    fields: dict[str, Any] = {
        "forward_time": [t * NS for t in values(n)],
        "backward_time": [t * NS for t in values(n)],
        "x_bytes": x,
        "xbar_bytes": [x[i + 1] + extra[i] for i in range(n)],
        "forward_tmp_bytes": forward_tmp,
        "backward_tmp_bytes": [
            draw(-grad[i], backward_tmp[i]) if signed else backward_tmp[i] for i in range(n)
        ],
        "loss_tmp_bytes": draw(-grad[n], loss_tmp) if signed else loss_tmp,
        "hold_output": False if published else draw(0, 1) == 1,
    }
    if not published:
        if draw(0, 1) == 1:
            fields["forward_nograd_tmp_bytes"] = values(n)
        if draw(0, 2) > 0:
            fields["pgrad_bytes"] = values(n)
        fields["grad_bytes"] = grad
    return fields


def random_chain(
    rng: random.Random, n_min: int = 1, n_max: int = 4, *, published: bool = False, scale: int = 1
) -> Chain:
    """A chain of n_min to n_max stages.

    `published` keeps to the model of Beaumont et al.: gradients as large as activations, no
    parameter gradients, backward temporaries not negative, the output not held. `scale`
    multiplies every range: with a large one, ties are rare.
    """
    n = rng.randint(n_min, n_max)
    return Chain(**_fields(rng.randint, n, published, scale))


@st.composite
def chains(
    draw: st.DrawFn, n_min: int = 1, n_max: int = 4, *, published: bool = False, scale: int = 1
) -> Chain:
    """`random_chain` as a hypothesis strategy, which shrinks."""
    n = draw(st.integers(n_min, n_max))
    return Chain(**_fields(lambda low, high: draw(st.integers(low, high)), n, published, scale))


def large_temporaries(rng: random.Random, n: int) -> Chain:
    """A chain of n stages in the published model whose forwards need much beside small tensors."""
    x = [rng.randint(1, 3) for _ in range(n + 1)]
    return Chain(
        [rng.randint(1, 4) * NS for _ in range(n)],
        [rng.randint(1, 4) * NS for _ in range(n)],
        x,
        [x[i + 1] + rng.randint(0, 4) for i in range(n)],
        [rng.randint(0, 14) for _ in range(n)],
        [rng.randint(0, 3) for _ in range(n)],
        hold_output=False,
    )


def realistic_chain(rng: random.Random, n: int) -> Chain:
    """A chain of n stages with the sizes and times of a network: megabytes and milliseconds."""

    def mb(low: float, high: float) -> int:
        return int(rng.uniform(low, high) * 2**20)

    x = [mb(1, 30) for _ in range(n + 1)]
    return Chain(
        [rng.uniform(1e-3, 2e-2) for _ in range(n)],
        [rng.uniform(2e-3, 4e-2) for _ in range(n)],
        x,
        [x[i + 1] + mb(0, 90) for i in range(n)],
        [mb(0, 10) for _ in range(n)],
        [mb(0, 20) for _ in range(n)],
        forward_nograd_tmp_bytes=[mb(0, 20) for _ in range(n)],
        pgrad_bytes=[mb(0, 4) for _ in range(n)],
        loss_tmp_bytes=mb(0, 2),
    )


def budgets(rng: random.Random, chain: Chain, count: int = 3) -> list[int]:
    """Budgets from hopeless to generous."""
    generous = 2 * (
        sum(chain.x_bytes)
        + sum(chain.xbar_bytes)
        + sum(chain.grad_bytes)
        + sum(chain.pgrad_bytes)
        + max(chain.forward_tmp_bytes + chain.forward_nograd_tmp_bytes)
        + max(0, chain.loss_tmp_bytes, *chain.backward_tmp_bytes)
        + 1
    )
    return [rng.randint(1, generous) for _ in range(count)]
