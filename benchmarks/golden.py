"""Plans that a change of the house must not change: engine, predicted peak and time of each case.

    python benchmarks/golden.py [WORD ...]   # compare with golden.json; fails where one is worse
    python benchmarks/golden.py --update     # write golden.json anew

Models are measured on the simulated device, whose clock follows from the bytes that its kernels
touch, so that costs are the same on every machine; the file holds for one version of PyTorch, and
its plans are those after all searches. A plan is worse where it passes its limit, takes longer, is
the dynamic engine's (which has no time before it runs) and was not, or is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from card_models import Llama
from torch import nn

import rotor

FILE = Path(__file__).with_name("golden.json")
FORMAT, VERSION = "rotor.golden", 1
ROOM = 1e-6
"""Share by which a time may be longer: sums of floats are made in some order."""
LARGE = 1 << 31
ORDER = ("planned", "dynamic", "refused")


class Block(nn.Module):
    """Residual perceptron of a transformer."""

    def __init__(self, width: int, *, is_fence: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.is_fence = is_fence

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block; a fence reads a number, for which no graph is captured."""
        scale = 1.0 if not self.is_fence or float(x.detach().abs().max()) < 1e6 else 0.5
        return x + scale * self.down(nn.functional.gelu(self.up(self.norm(x))))


class Loop(nn.Module):
    """Blocks that the model's own code calls."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def blocks(fences: tuple[int, ...] = ()) -> list[nn.Module]:
    """Six blocks, some of them fences."""
    return [Block(64, is_fence=k in fences) for k in range(6)]


def uneven() -> nn.Module:
    """Convolutions whose outputs shrink."""
    sizes = ((3, 16), (16, 32), (32, 64))
    stages = [
        nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in sizes
    ]
    return nn.Sequential(*stages, nn.Flatten(), nn.Linear(64 * 16, 10))


def gpt() -> nn.Module:
    """A language model of four layers with dropout."""
    return rotor.models.gpt.gpt(vocab_size=64, context_length=64, layers=4, heads=4, width=64)


def rows() -> torch.Tensor:
    return torch.randn(512, 64)


def images() -> torch.Tensor:
    return torch.randn(16, 3, 32, 32)


def tokens() -> torch.Tensor:
    return torch.randint(64, (16, 64))


class Case(NamedTuple):
    """Model and batch, engines and shares of the peak without recomputation, and options."""

    make: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    engines: tuple[str, ...] = ("auto",)
    shares: tuple[float, ...] = (0.4, 0.6, 0.8)
    options: Mapping[str, Any] = MappingProxyType({})
    autocast: bool = False
    accumulates: bool = False


ALL = ("auto", "chain", "graph")
CASES = {
    "stack": Case(lambda: nn.Sequential(*blocks()), rows, ALL),
    "stack, gradients exist": Case(
        lambda: nn.Sequential(*blocks()), rows, ALL, (0.6,), accumulates=True
    ),
    "stack, autocast": Case(lambda: nn.Sequential(*blocks()), rows, ALL, (0.6,), autocast=True),
    "loop": Case(lambda: Loop(blocks()), rows, ("graph",)),
    "uneven": Case(uneven, images, ALL, (0.6, 0.8)),
    "gpt": Case(gpt, tokens, ("graph",), (0.3, 0.5, 0.7, 0.9)),
    "gpt, tier": Case(gpt, tokens, ("graph",), (0.3, 0.5), {"offload": "host"}),
    "gpt, reserved": Case(gpt, tokens, ("graph",), (0.5, 0.7), {"counts": "reserved"}),
    "gpt, not verified": Case(gpt, tokens, ("graph",), (0.5,), {"verify": "off"}),
    "llama": Case(lambda: Llama(64, 4, 64, 4, 2), tokens, ("graph",), (0.4, 0.7)),
    "mixed": Case(lambda: nn.Sequential(*blocks((2,))), rows),
    "mixed at its ends": Case(lambda: nn.Sequential(*blocks((0, 5))), rows, shares=(0.6, 0.8)),
    "parts": Case(lambda: Loop(blocks((2,))), rows),
    "parts of two": Case(lambda: Loop(blocks((1, 4))), rows, shares=(0.5, 0.8)),
}


def mean_square(model: nn.Module, case: Case, batch: torch.Tensor) -> torch.Tensor:
    """A step's loss, and its backward."""
    with torch.autocast("sim", torch.bfloat16, enabled=case.autocast):
        output = model(batch)
    loss = output.float().square().mean()
    loss.backward()
    return loss


def plans(name: str, device: torch.device) -> Iterator[tuple[str, list[Any]]]:
    """Plans of a case: their engine, limit, predicted peak in bytes, and step in ns."""
    case = CASES[name]
    for engine in case.engines:
        torch.manual_seed(0)
        model, batch = case.make().to(device).train(), case.batch().to(device)
        effort = {} if engine == "chain" else {"effort": "fast"}
        limited = rotor.Checkpointable(
            model, mem_limit=LARGE, engine=engine, verbosity=-1, **effort, **case.options
        )
        mean_square(limited, case, batch)
        if case.accumulates:
            mean_square(limited, case, batch)
        limited.wait_for_planning()
        most = limited.plan.unlimited_bytes
        for share in case.shares:
            if not case.accumulates:
                limited.zero_grad()
            limited.mem_limit = limit = int(share * most)
            title = f"{name}, {engine}, {share}"
            try:
                mean_square(limited, case, batch)
            except rotor.InfeasibleError as error:
                yield title, ["refused", limit, error.minimum_bytes, 0]
                continue
            limited.wait_for_planning()
            plan = limited.plan
            time_ns = 0 if plan.engine == "dynamic" else round(plan.makespan * 1e9)
            yield title, [plan.engine, limit, plan.predicted_bytes, time_ns]


def find(words: list[str]) -> dict[str, list[Any]]:
    """All plans of the cases whose names hold one of these words."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    import accelerator

    sim = accelerator.load()
    sim.set_capacity(4 << 30)
    sim.set_clock("model")
    sim.set_compute(gb_per_s=100.0, launch_ns=20_000)
    found = {}
    for name in CASES:
        if not words or any(word in name for word in words):
            found |= dict(plans(name, torch.device("sim", 0)))
            torch._dynamo.reset()
    return found


def is_worse(before: list[Any], now: list[Any]) -> bool:
    """Whether a plan is one that must not replace another."""
    kinds = [ORDER.index(one) if (one := p[0]) in ORDER else 0 for p in (before, now)]
    if kinds[0] != kinds[1]:
        return kinds[1] > kinds[0]
    if now[0] == "refused":
        return bool(now[2] > before[2])
    return bool(now[2] > now[1] or now[3] > before[3] * (1 + ROOM))


def compare(known: dict[str, list[Any]], found: dict[str, list[Any]]) -> tuple[list[str], int]:
    """What is different, as text, and how many of these are worse."""
    lines, worse = [], 0
    for name, now in found.items():
        before = known.get(name)
        if before != now:
            lines.append(f"{name}: {before} before, {now} now")
            worse += before is not None and is_worse(before, now)
    return lines, worse


def version() -> str:
    """The version of PyTorch, without its patches."""
    return ".".join(torch.__version__.split(".")[:2])


def read() -> dict[str, list[Any]]:
    """The plans of the file; none if it is of another version of PyTorch, or missing."""
    if not FILE.exists():
        return {}
    data = json.loads(FILE.read_text(encoding="utf-8"))
    if (data["format"], data["version"]) != (FORMAT, VERSION):
        raise ValueError(f"{FILE} holds {data['format']!r}, version {data['version']!r}")
    return data["plans"] if data["torch"] == version() else {}


def main() -> None:
    """Compare, or write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("words", nargs="*", help="parts of names; all by default")
    parser.add_argument("--update", action="store_true", help=f"write {FILE.name} anew")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found = find(given.words)
    known = read()
    lines, worse = compare(known, found)
    print("\n".join([*lines, f"{len(found)} plans, {len(lines)} different, {worse} worse"]))
    if given.update:
        rows = [f"  {json.dumps(n)}: {json.dumps(p)}" for n, p in (known | found).items()]
        head = f'{{\n "format": "{FORMAT}",\n "version": {VERSION},\n "torch": "{version()}",\n'
        head += ' "plans": {\n'
        FILE.write_text(head + ",\n".join(rows) + "\n }\n}\n", encoding="utf-8")
    elif worse:
        sys.exit(1)


if __name__ == "__main__":
    main()
