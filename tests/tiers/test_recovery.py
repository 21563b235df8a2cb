"""Homes on a disk: damaged bytes, forked processes, and the last finished step after a kill."""

from __future__ import annotations

import os

import torch
from torch import nn, optim

import rotor


class Pair(nn.Module):
    """Two layers, a normalisation with buffers, and parameters that stay in memory."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))).square().mean()


def made(tier) -> tuple[rotor.Checkpointable, optim.Optimizer]:
    torch.manual_seed(0)
    model = Pair()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"mem_limit": "1MiB", "offload": tier, "offload_state": optimizer}
    return rotor.Checkpointable(model, **settings, planning="before"), optimizer


def in_a_child(act) -> str:
    """Return what a forked process says."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(act())
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return said


def test_a_forked_process_reads_parameters_and_changes_none():
    chk, _ = made("disk")
    weight = chk.module.first.weight
    values = weight.detach().clone()
    known = str(values.sum().item())
    assert in_a_child(lambda: weight.sum().item()) == known

    def doubled():
        with torch.no_grad():
            weight.mul_(2)

    assert "was forked from, which alone writes to it" in in_a_child(doubled)
    assert torch.equal(weight, values)
    reader, writer = os.pipe()

    def late():
        os.read(reader, 1)
        return weight.sum().item()

    def changed():
        doubled()
        os.write(writer, b"x")
        return in_a_child(lambda: weight.sum().item())

    # A process that reads after the other one has written sees no mixture of the two.
    child_reader, child_writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(late())
        except OSError as error:
            said = str(error)
        os.write(child_writer, said.encode())
        os._exit(0)
    assert changed() == str((2 * values).sum().item())
    os.close(child_writer)
    with os.fdopen(child_reader) as file:
        assert "was forked from has written there since" in file.read()
    assert os.waitpid(child, 0)[1] == 0


def test_a_worker_of_a_data_loader_reads_parameters():
    chk, _ = made("disk")
    weight = chk.module.first.weight
    rows = torch.utils.data.DataLoader(
        [0, 1, 2, 3],
        batch_size=2,
        num_workers=1,
        collate_fn=lambda indices: weight.detach()[indices].clone(),
    )
    assert torch.equal(torch.cat(list(rows)), weight[:4].detach())
