"""Scenarios of test_fsdp.py: what does not repeat, and what leaves stages and blocks by itself."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import fsdp_blocks
import torch
import torch.distributed as dist
from fsdp_models import (
    BLOCKS,
    WIDTH,
    Block,
    batch,
    differences,
    local,
    on_all,
    refused,
    shard,
    tighten,
)
from torch import nn

import rotor

with tempfile.TemporaryFile() as file:
    FILE = os.dup(file.fileno())
FAULTY = {"ranks": set()}


def is_faulty() -> bool:
    """Whether blocks of this rank give other bits whenever they run."""
    return dist.get_rank() in FAULTY["ranks"]


class Drifting(Block):
    """Gives other bits in every run while the rank is faulty; counts runs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += 1
        if is_faulty():
            x = x * (1 + 1e-3 * torch.tensor(drawn()))
        return super().forward(x)


def drawn() -> float:
    """Another number every time: the system counts, and nothing can set it back."""
    return float(os.lseek(FILE, 1, os.SEEK_CUR))


@torch.library.custom_op("rotor_fsdp::lying", mutates_args=())
def lying(x: torch.Tensor) -> torch.Tensor:
    """An operator that gives other bits whenever it runs while the rank is faulty."""
    return x * (1 + 1e-3 * drawn()) if is_faulty() else x.clone()


lying.register_fake(lambda x: torch.empty_like(x))
lying.register_autograd(lambda ctx, gradient: gradient)


class Lying(Block):
    """Holds such an operator, between others that are cheap to compute again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.tanh(lying(torch.sigmoid(x))).exp())


def chain(kind: Callable[[], nn.Module], **options: Any) -> nn.Sequential:
    """A chain whose third stage is of this kind."""
    torch.manual_seed(1)
    inner = [Block(), kind(), Block(), Block()]
    return shard(nn.Sequential(nn.Linear(8, WIDTH), *inner, nn.Linear(WIDTH, 4)), **options)


def network(kind: Callable[[], nn.Module], **options: Any) -> nn.Module:
    """A model whose second block is of this kind."""
    model = fsdp_blocks.Network()
    torch.manual_seed(1)
    model.blocks[1] = kind()
    return fsdp_blocks.shard(model, **options)


MODELS: dict[str, tuple[Callable[..., Any], Callable[[Any], int], str]] = {
    "chain": (chain, tighten, "2"),
    "blocks": (network, fsdp_blocks.tighten, "blocks.1"),
}


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(
        (s is None and t is None) or (s is not None and t is not None and torch.equal(s, t))
        for s, t in zip(a, b, strict=True)
    )


def drifting(model: str) -> list[str]:
    """One rank's stage drifts after measuring: both ranks stop before anything has changed."""
    make, tight, name = MODELS[model]
    found = []
    for root, existing, faulty in ((True, False, {1}), (False, True, {0}), (True, True, {0, 1})):
        planned = rotor.Checkpointable(make(Drifting, root=root))
        planned.measure(batch(0))
        tight(planned)
        where = f"root {root}, existing {existing}, faulty {faulty}:"
        if existing:
            planned(batch(0)).square().mean().backward()
        before = gradients(planned)
        seen = [b.clone() for b in planned.buffers()]
        FAULTY["ranks"] = faulty
        words = f"Drifting in module '{name}'"
        found += [
            f"{where} {text}"
            for text in refused(
                lambda p=planned: p(batch(0)).square().mean().backward(),
                rotor.RecomputationError,
                words,
            )
        ]
        FAULTY["ranks"] = set()
        if not same(before, gradients(planned)):
            found.append(f"{where} gradients are not as before")
        if not all(map(torch.equal, seen, planned.buffers())):
            found.append(f"{where} buffers are not as before")
        planned.compute_sequence(mem_limit="1GB")
        tight(planned) if model == "chain" else planned.compute_sequence(mem_limit="1GB")
        FAULTY["ranks"] = faulty
        planned(batch(0)).square().mean().backward()
        FAULTY["ranks"] = set()
        if name not in planned.report() or "gave other bits" not in planned.report():
            found.append(f"{where} the report does not say what is kept: {planned.report()}")
        if on_all(choices(planned))[0] != choices(planned):
            found.append(f"{where} plans differ")
    return found


def drifting_graphs() -> list[str]:
    """As `drifting`, of an operator in the captured graphs of blocks."""
    found = []
    for faulty in ({0}, {1}):
        planned = rotor.Checkpointable(network(Lying))
        planned.measure(batch(0))
        fsdp_blocks.tighten(planned, 300_000)
        plan = planned.plan
        kind = plan.parts.sites[1].graph
        names = [operation.name for operation in kind.programs[0].graph.operations]
        lying_twice = [
            number
            for number, program in enumerate(kind.programs)
            if any(n > 1 and "lying" in s for n, s in zip(program.runs, names, strict=True))
        ]
        if not lying_twice:
            return [f"no program runs it again: {[list(p.runs) for p in kind.programs]}, {names}"]
        plan.choice[1] = 2 + lying_twice[0]
        FAULTY["ranks"] = faulty
        found += refused(
            lambda p=planned: p(batch(0)).square().mean().backward(),
            rotor.RecomputationError,
            "rotor_fsdp.lying.default in module 'blocks.1'",
        )
        FAULTY["ranks"] = set()
        found += [name for name, p in planned.named_parameters() if p.grad is not None]
        planned.compute_sequence(mem_limit="1GB")
        planned(batch(0)).square().mean().backward()
        if "blocks.1 never computed again" not in planned.report():
            found.append(planned.report())
    return found


def choices(planned: Any) -> str:
    plan = planned.plan
    return str(getattr(plan, "choice", None) or plan.sequence)


def varying(model: str) -> list[str]:
    """A stage gives other bits while it is measured, on one rank: no rank recomputes it."""
    make, tight, name = MODELS[model]
    planned = rotor.Checkpointable(make(Drifting, root=True))
    FAULTY["ranks"] = {1}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planned.measure(batch(0))
        tight(planned)
    found = []
    if not any(f"{name} (FSDPDrifting) gave other bits" in str(w.message) for w in caught):
        found.append(f"warnings {[str(w.message) for w in caught]}")
    for _ in range(4):
        planned(batch(0)).square().mean().backward()
    FAULTY["ranks"] = set()
    plan = planned.plan
    if model == "chain":
        runs = plan.sequence.count_forwards()[2]
    else:
        runs = 1 + plan.parts.sites[1].is_again(plan.choice[1])
    if runs != 1:
        found.append(f"it runs forward {runs} times")
    if "proved in" not in planned.report():
        found.append(planned.report())
    return found


def proved(model: str) -> list[str]:
    """The report says what was compared; nothing is where verify="off"."""
    make, tight, _ = MODELS[model]
    found = []
    for verify, words in (("first", "proved in 3 steps"), ("off", 'not proved: verify="off"')):
        planned = rotor.Checkpointable(make(Block, root=True), verify=verify)
        planned.measure(batch(0))
        tight(planned)
        plain = make(Block, root=True)
        for one in (plain, planned):
            for k in range(7):
                torch.manual_seed(k)
                one(batch(k)).square().mean().backward()
        found += differences(plain, planned)
        if words not in planned.report():
            found.append(planned.report())
    return found


# -- values that leave otherwise than by the output


class Auxiliary(Block):
    """Keeps an auxiliary loss as an attribute, made of its input and parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.aux = (y * x.mean()).square().mean()
        return y


class OfParameters(nn.Linear):
    """Keeps a value made of its parameters, and of an input that needs no gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aux = (x.detach() @ self.weight.T).square().mean()
        return super().forward(x)


class Caught(Block):
    """A hook of a part keeps what that gives in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        caught: list[torch.Tensor] = []
        self.up.register_forward_hook(lambda _, __, y: caught.__setitem__(slice(None), [y]))
        self.__dict__["caught"] = caught

    @property
    def aux(self) -> torch.Tensor:
        return self.caught[0].square().mean()


class Skip(nn.Module):
    """What a stage saves and a later one adds."""

    saved: Any = None


class Save(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Skip.saved = super().forward(x)
        return Skip.saved * 2


class Added(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + Skip.saved


def skipping(kind: str) -> Any:
    """A model in whose first block something is saved that the last one adds."""
    torch.manual_seed(1)
    if kind == "chain":
        inner = [Save(), Block(), Block(), Added()]
        model: Any = nn.Sequential(nn.Linear(8, WIDTH), *inner, nn.Linear(WIDTH, 4))
        return shard(model, root=True)
    model = fsdp_blocks.Network()
    torch.manual_seed(1)
    model.blocks[0], model.blocks[BLOCKS - 1] = Save(), Added()
    return fsdp_blocks.shard(model)


def escapes(model: str) -> list[str]:
    """Every such value has the gradients of the plain model, or is refused by name."""
    make, tight, name = MODELS[model]
    cases: dict[str, tuple[Callable[[], Any], str, str]] = {
        "attribute": (lambda: make(Auxiliary, root=True), name, "aux"),
        "hook": (lambda: make(Caught, root=True), name, ""),
        "skip": (lambda: skipping(model), "1" if model == "chain" else "blocks.0", ""),
    }
    if model == "chain":
        cases["first stage"] = (first_keeps, "0", "aux")
    found = []
    for case, (build, place, attribute) in cases.items():
        plain, planned = build(), rotor.Checkpointable(build())
        words = f"stage {place}" + (f": {place}.{attribute}" if attribute else "")
        try:
            planned.measure(batch(0))
            tight(planned)
        except RuntimeError as error:
            if words not in str(error) or model != "chain":
                found.append(f"{case}: {error}")
            continue
        except AssertionError:
            planned.compute_sequence(mem_limit="1GB")
        for one in (plain, planned):
            for k in range(2):
                torch.manual_seed(k)
                y = one(batch(k))
                module = one.get_submodule(place) if place else one
                aux = getattr(module, "aux", None)
                loss = y.square().mean()
                (loss if aux is None else loss + aux).backward()
        found += [f"{case}: {text}" for text in differences(plain, planned)]
        if place not in planned.report():
            found.append(f"{case}: the report does not name it: {planned.report()}")
    return found


def first_keeps() -> Any:
    """A chain whose first stage keeps something, on an input that needs no gradient."""
    torch.manual_seed(1)
    inner = [Block() for _ in range(BLOCKS)]
    model = nn.Sequential(OfParameters(8, WIDTH), *inner, nn.Linear(WIDTH, 4))
    return shard(model, root=False)


PROOF_SCENARIOS: dict[str, Callable[[], list[str]]] = {
    f"proofs: {text}, {model}": lambda check=check, model=model: check(model)
    for model in MODELS
    for text, check in (
        ("drifting", drifting),
        ("varying", varying),
        ("proved", proved),
        ("escapes", escapes),
    )
} | {"proofs: drifting, graphs of blocks": drifting_graphs}
