"""Homes on a disk: the last finished step after a kill, damaged bytes, and forked processes."""

from __future__ import annotations

import copy
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import killed_runs
import pytest
import torch
from killed_runs import PLACES, batch, wrapped
from torch import nn, optim

from rotor.commands.main import main
from rotor.tier import DiskTier, keep, recover, recovery, set_random
from rotor.tier.homes import Home
from rotor.tier.interface import TransferError
from rotor.tier.weights import weights_of


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """Folder with the folders of runs that were killed, by place."""
    folder = tmp_path_factory.mktemp("killed")
    script = Path(killed_runs.__file__)
    command = [sys.executable, "-W", "ignore", script, folder]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    expected = {place: 0 if place == "an error" else signal.SIGKILL for place in PLACES}
    expected |= {"the end": 0, "with others": signal.SIGKILL}
    said = [f"{place}: {int(number)}" for place, number in expected.items()]
    assert ran.stdout.splitlines() == said, ran.stderr[-2000:]
    return folder


def plain_run(steps: int) -> tuple[nn.Module, optim.Optimizer, list[float]]:
    """Return a plain training of so many steps."""
    model, optimizer = killed_runs.made()
    return model, optimizer, train(model, model, optimizer, range(steps))


def train(call, model, optimizer, numbers) -> list[float]:
    found = []
    for number in numbers:
        loss = call(batch(number))
        found.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_equal(one, other) -> None:
    """Assert that two nested values are equal, bit for bit, and of the same types."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, list | tuple):
        assert type(one) is type(other)
        assert len(one) == len(other)
        for value, known in zip(one, other, strict=True):
            assert_equal(value, known)
    else:
        assert one == other


@pytest.mark.parametrize("place", PLACES)
def test_the_last_finished_step_comes_back(killed, place):
    """The state is that of a plain run of as many steps, and so is what follows."""
    steps = PLACES[place]
    plain, known, _ = plain_run(steps)
    state = recover(killed / place)
    assert state["step"] == steps
    assert_equal(state["model"], plain.state_dict())
    assert_equal(state["optimizer"], known.state_dict())
    assert state["model"]._metadata == plain.state_dict()._metadata
    model, optimizer = killed_runs.made()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert train(model, model, optimizer, range(steps, 5)) == plain_run(5)[2][steps:]
    assert_equal(model.state_dict(), plain_run(5)[0].state_dict())


def test_schedulers_scalers_and_generators_come_back(killed, capsys):
    """They are as they were when the step returned; what the loop does after it comes again."""
    model, optimizer = killed_runs.made()
    plain = killed_runs.Random(model)
    others = killed_runs.objects_for(optimizer)
    killed_runs.seed_all()
    losses = killed_runs.random_steps(plain, optimizer, **others, count=5)
    state = recover(killed / "with others")
    assert state["step"] == 3
    model, known = killed_runs.made()
    again = killed_runs.Random(model)
    found = killed_runs.objects_for(known)
    again.load_state_dict(state["model"])
    known.load_state_dict(state["optimizer"])
    found["schedule"].load_state_dict(state["schedule"])
    found["scaler"].load_state_dict(state["scaler"])
    found["order"].set_state(state["order"])
    set_random(state["random"])
    found["schedule"].step()
    assert killed_runs.random_steps(again, known, **found, count=2) == losses[3:]
    assert_equal(again.state_dict(), plain.state_dict())
    for name in ("schedule", "scaler"):
        assert_equal(found[name].state_dict(), others[name].state_dict())
    assert found["scaler"].get_scale() == 64.0
    assert main(["recover", str(killed / "with others"), "--json"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)["others"]) == [
        "order",
        "random",
        "scaler",
        "schedule",
    ]


def test_what_cannot_be_kept_is_refused(tmp_path):
    model, optimizer = killed_runs.made()
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(ValueError, match="this optimizer has no record of its steps"):
        keep(optimizer, schedule=schedule)
    chk = wrapped(model, optimizer, f"disk:{tmp_path}")
    with pytest.raises(ValueError, match="random is in every record already"):
        keep(optimizer, random=schedule)
    with pytest.raises(TypeError, match="x is a int, expected an object with state_dict"):
        keep(optimizer, x=1)
    strange = types.SimpleNamespace(state_dict=lambda: {"value": strange})
    with pytest.raises(ValueError, match="cannot be recorded in the folder"):
        keep(optimizer, schedule=schedule, strange=strange)
    averaged = optim.swa_utils.AveragedModel(model)
    keep(optimizer, averaged=averaged)
    train(model, model, optimizer, range(1))
    averaged.update_parameters(model)
    expected = copy.deepcopy(averaged.state_dict())
    model(batch(1)).backward()
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert_equal(averaged.state_dict(), expected)
    del chk


def test_a_run_goes_on_in_its_folder(killed, tmp_path):
    folder = shutil.copytree(killed / "late write", tmp_path / "run")
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == dict.fromkeys((recovery.VALUES, *recovery.RECORDS), 0o600)
    model, optimizer = killed_runs.made()
    with pytest.raises(ValueError, match="holds step 2 of an earlier run that was killed"):
        wrapped(model, optimizer, f"disk:{folder}")
    assert type(model.first.weight) is nn.Parameter
    state = recover(folder)
    for path in folder.iterdir():
        path.unlink()
    chk = wrapped(model, optimizer, f"disk:{folder}")
    with pytest.raises(ValueError, match="is used by another model, of this process"):
        recover(folder)
    with pytest.raises(ValueError, match="is used by another model, of this process"):
        wrapped(*killed_runs.made(), f"disk:{folder}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    plain, known, losses = plain_run(5)
    assert train(chk, model, optimizer, range(2, 5)) == losses[2:]
    assert_equal(dict(model.state_dict()), dict(plain.state_dict()))
    assert_equal(optimizer.state_dict()["state"], known.state_dict()["state"])


def test_files_stay_until_a_normal_end(killed):
    assert list((killed / "the end").iterdir()) == []
    with pytest.raises(ValueError, match="holds no finished step"):
        recover(killed / "the end")


def test_the_command_writes_what_was_finished(killed, tmp_path, capsys):
    folder, out = killed / "after the step", tmp_path / "step.pt"
    plain, known, _ = plain_run(3)
    assert main(["recover", str(folder), "--out", str(out)]) == 0
    assert "steps finished  3" in capsys.readouterr().out
    state = torch.load(out, weights_only=True, mmap=True)
    assert_equal(state["model"], plain.state_dict())
    assert_equal(state["optimizer"], known.state_dict())
    weights = tmp_path / "model.safetensors"
    assert main(["recover", str(folder), "--out", str(weights), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3
    assert_equal({"x": weights_of(weights)("first.weight").read()}, {"x": plain.first.weight})
    assert main(["recover", str(folder)]) == 0
    (tmp_path / "linked").symlink_to(folder)
    for path in (tmp_path / "linked" / "rotor-values", folder / "rotor-step-1"):
        for option in ("--out", "--json"):
            assert main(["recover", str(folder), option, str(path)]) == 2
            assert "is a file of the run itself: name another one" in capsys.readouterr().err
    (tmp_path / "linked").unlink()
    assert main(["recover", str(folder)]) == 0
    assert main(["recover", str(tmp_path)]) == 2
    assert "holds no finished step" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "step.pt"]


def damaged(killed: Path, folder: Path, name: str, change) -> Path:
    shutil.copytree(killed / "after the step", folder)
    path = folder / name
    values = bytearray(path.read_bytes())
    path.write_bytes(change(values) or values)
    return folder


def test_damaged_folders(killed, tmp_path):
    record = recovery.newest(killed / "after the step")
    place = int(record.facts["places"][0][0])

    def flip(values):
        values[place + 1000] ^= 4

    folder = damaged(killed, tmp_path / "a", recovery.VALUES, flip)
    text = f"at byte {place} are not those that step 3 has written"
    with pytest.raises(TransferError, match=text):
        recover(folder)
    assert main(["recover", str(folder)]) == 2
    folder = damaged(killed, tmp_path / "b", recovery.VALUES, lambda v: v[: place + 1000])
    with pytest.raises(TransferError, match="the file ends before byte"):
        recover(folder)
    (folder / recovery.VALUES).unlink()
    with pytest.raises(FileNotFoundError):
        recover(folder)
    # A record that is not whole is not there: the one before it has other places.
    name = record.path.name
    for k, change in enumerate([lambda v: v[:-1], lambda v: v[:9], lambda v: v.__setitem__(99, 1)]):
        folder = damaged(killed, tmp_path / f"c{k}", name, change)
        assert recovery.newest(folder).facts["step"] == 2


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
    chk = wrapped(*killed_runs.made(), "disk")
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


def test_a_worker_of_a_data_loader_reads_parameters(tmp_path):
    former, optimizer = killed_runs.made()
    wrapped(former, optimizer, f"disk:{tmp_path}")
    recovery.FinishedSteps.find(optimizer).end()
    chk = wrapped(*killed_runs.made(), "disk")
    weight = chk.module.first.weight
    rows = torch.utils.data.DataLoader(
        [0, 1, 2, 3],
        batch_size=2,
        num_workers=1,
        collate_fn=lambda indices: weight.detach()[indices].clone(),
    )
    assert torch.equal(torch.cat(list(rows)), weight[:4].detach())


@contextmanager
def other_bytes(folder: Path, home: Home) -> Iterator[None]:
    """Have a bit of a home be another one in the context."""

    def flip():
        with (folder / recovery.VALUES).open("r+b") as file:
            file.seek(home.area.begin + home.offsets[-1] + 600)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))

    flip()
    yield
    flip()


@contextmanager
def short_file(folder: Path, home: Home) -> Iterator[None]:
    """Have a file end within a home in the context."""
    path = folder / recovery.VALUES
    values = path.read_bytes()
    os.truncate(path, home.area.begin + home.offsets[-1] + 512)
    yield
    path.write_bytes(values)


WRONG = {other_bytes: "came back from the second tier with other bits", short_file: "reading "}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("moment", ["forward", "backward", "step"])
def test_a_step_that_cannot_read_is_undone(moment, wrong, tmp_path):
    """The error is the disk's; with the bytes back, all goes on as if nothing had been."""
    model, optimizer = killed_runs.made()
    chk = wrapped(model, optimizer, f"disk:{tmp_path}")
    call = chk if moment == "forward" else model
    losses = train(call, model, optimizer, range(2))
    weight = model.second.weight
    if moment == "forward":
        home, act = weight.home, lambda: call(batch(2))
    else:
        loss = call(batch(2))
        losses.append(loss.item())
        loss.backward(retain_graph=moment == "backward")
        home, act = weight.grad.home, loss.backward
        if moment == "step":
            home, act = optimizer.state[weight]["exp_avg_sq"].home, optimizer.step
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = [{k: v.clone() for k, v in s.items()} for s in optimizer.state.values()]
    with wrong(tmp_path, home), pytest.raises(OSError, match=WRONG[wrong]) as caught:
        act()
    assert isinstance(caught.value, TransferError)
    assert_equal({k: v.clone() for k, v in model.state_dict().items()}, before)
    assert_equal([{k: v.clone() for k, v in s.items()} for s in optimizer.state.values()], states)
    if moment == "step":
        assert "of the optimizer again, the last finished one" in caught.value.__notes__[0]
        optimizer.step()
    optimizer.zero_grad()
    plain, _, known = plain_run(5)
    start = 3 if moment == "step" else 2
    found = train(call, model, optimizer, range(start, 5))
    assert losses[:start] + found == known
    assert_equal({"x": model.second.weight.clone()}, {"x": plain.second.weight.detach()})


@contextmanager
def small_files(nbytes: int) -> Iterator[None]:
    """Have no file of this process grow beyond a size, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk(tmp_path, monkeypatch):
    """States find no room in the first step, a gradient in a backward, a record at an end."""
    model, optimizer = killed_runs.made()
    wrapped(model, optimizer, f"disk:{tmp_path}")
    size = (tmp_path / recovery.VALUES).stat().st_size
    loss = model(batch(0))
    with small_files(size), pytest.raises(OSError, match="offloaded values need"):
        loss.backward()
    optimizer.zero_grad()
    loss = model(batch(0))
    loss.backward()
    before = {name: value.clone() for name, value in model.named_parameters()}
    size = (tmp_path / recovery.VALUES).stat().st_size
    with small_files(size), pytest.raises(OSError, match="offloaded values need"):
        optimizer.step()
    assert_equal({name: value.clone() for name, value in model.named_parameters()}, before)
    assert not optimizer.state

    def full(_):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        with pytest.raises(TransferError, match="record of a finished step could not be written"):
            optimizer.step()
    assert_equal({name: value.clone() for name, value in model.named_parameters()}, before)
    optimizer.step()
    optimizer.zero_grad()
    found = train(model, model, optimizer, range(1, 5))
    plain, _, known = plain_run(5)
    assert [loss.item(), *found] == known
    assert_equal({"x": model.first.weight.clone()}, {"x": plain.first.weight.detach()})


def test_without_a_folder_half_a_step_is_said():
    model, optimizer = killed_runs.made()
    wrapped(model, optimizer, "disk")
    model(batch(0)).backward()
    with small_files(1 << 20), pytest.raises(OSError, match="offloaded values need") as caught:
        optimizer.step()
    assert "the step of the optimizer is half done" in caught.value.__notes__[0]


def test_changes_between_steps_are_not_undone(tmp_path):
    """A step that fails goes back to what was before it, not to the step before."""
    model, optimizer = killed_runs.made()
    wrapped(model, optimizer, f"disk:{tmp_path}")
    train(model, model, optimizer, range(2))
    with torch.no_grad():
        model.first.weight.mul_(2)
        model.second.bias.zero_()
    before = {name: value.clone() for name, value in model.named_parameters()}
    model(batch(2)).backward()
    home = optimizer.state[model.second.weight]["exp_avg"].home
    with other_bytes(tmp_path, home), pytest.raises(TransferError):
        optimizer.step()
    assert_equal({name: value.clone() for name, value in model.named_parameters()}, before)


def test_what_no_record_can_hold_is_refused(tmp_path):
    class Held(nn.Linear):
        def get_extra_state(self):
            return threading.Lock if self.is_odd else {"a": 1}

        def set_extra_state(self, state):
            pass

    model = Held(64, 64)
    for model.is_odd in (True, False):
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        if model.is_odd:
            with pytest.raises(ValueError, match="cannot be recorded in the folder"):
                wrapped(model, optimizer, f"disk:{tmp_path}")
            assert list(tmp_path.iterdir()) == []
    wrapped(model, optimizer, f"disk:{tmp_path}")
    assert recovery.newest(tmp_path).facts["state"]["model"]["_extra_state"] == {"a": 1}


def test_another_optimizer_takes_over_the_record(tmp_path, monkeypatch):
    """Steps are counted on; nothing changes if it cannot be recorded, or the disk is full."""
    plain, known = killed_runs.made()
    model, optimizer = killed_runs.made()
    (tmp_path / "run").mkdir()
    chk = wrapped(model, optimizer, f"disk:{tmp_path / 'run'}")
    others = [optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (plain, model)]
    train(plain, plain, known, range(2))
    train(chk, model, optimizer, range(2))
    odd = optim.SGD([{"params": model.parameters(), "held": threading.Lock}], lr=0.1)
    with pytest.raises(ValueError, match="cannot be recorded in the folder"):
        chk.offload_state = odd

    def full(_):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        with pytest.raises(TransferError, match="record of a finished step could not be written"):
            chk.offload_state = others[1]
    assert chk.offload_state is optimizer
    train(plain, plain, known, range(2, 3))
    train(chk, model, optimizer, range(2, 3))
    chk.offload_state = others[1]
    for steps in (3, 4):
        state = recover(shutil.copytree(tmp_path / "run", tmp_path / f"copy{steps}"))
        assert state["step"] == steps
        assert_equal(state["model"], plain.state_dict())
        assert_equal(state["optimizer"], others[0].state_dict())
        train(plain, plain, others[0], range(3, 4))
        train(chk, model, others[1], range(3, 4))
    with pytest.raises(ValueError, match="no record of its steps"):
        keep(optimizer, order=torch.Generator())
    keep(others[1], order=torch.Generator())


def test_forms_and_types_come_back(tmp_path):
    """Files that go through the page cache too; a copy of a folder between steps is a folder."""
    torch.manual_seed(0)
    model = nn.Module()
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
    for k, dtype in enumerate(kinds):
        values = torch.randn(90, 70).to(dtype)
        model.register_parameter(f"p{k}", nn.Parameter(values if k % 2 else values.t()))
    model.p5 = nn.Parameter(torch.randn(8, 64, 3, 3).contiguous(memory_format=torch.channels_last))
    model.again = model.p5
    model.register_buffer("mask", torch.rand(70, 70) < 0.5)
    model.register_buffer("odd", torch.arange(6).view(2, 3).t())
    known = {name: value.clone() for name, value in model.state_dict().items()}
    for buffered in (False, True):
        folder = tmp_path / f"run{buffered}"
        folder.mkdir()
        other = copy.deepcopy(model)
        optimizer = optim.SGD(other.parameters(), lr=torch.tensor(0.5))
        wrapped(other, optimizer, DiskTier(folder, buffered=buffered))
        state = recover(shutil.copytree(folder, tmp_path / f"copy{buffered}"))
        assert_equal(dict(state["model"]), known)
        assert state["model"]["again"] is state["model"]["p5"]
        for name, value in other.named_parameters():
            assert state["model"][name].stride() == value.stride()
        assert torch.equal(state["optimizer"]["param_groups"][0]["lr"], torch.tensor(0.5))


@pytest.mark.parametrize("change", ["elsewhere", "renamed", "removed", "cut"])
def test_a_folder_is_the_one_that_was_given(change, tmp_path, monkeypatch):
    """Its names are read once; where it is gone, a step is taken back, or the rest is named."""
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    model, optimizer = killed_runs.made()
    chk = wrapped(model, optimizer, "disk:run")
    train(chk, model, optimizer, range(2))
    if change == "elsewhere":
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
    elif change == "renamed":
        folder = folder.rename(tmp_path / "new")
    else:
        for name in recovery.RECORDS if change == "cut" else []:
            os.truncate(folder / name, 0)
        shutil.rmtree(folder)
    if folder.exists():
        train(chk, model, optimizer, range(2, 3))
        assert recovery.newest(folder).facts["step"] == 3
    else:
        with pytest.raises(TransferError, match="is undone; the folder was removed") as caught:
            train(chk, model, optimizer, range(2, 3))
        assert (", but 18 small ones" in caught.value.__notes__[0]) == (change == "cut")
    plain, known, _ = plain_run(3 if folder.exists() else 2)
    if change != "cut":
        assert_equal(dict(model.named_parameters()), dict(plain.named_parameters()))
        assert_equal(optimizer.state_dict(), known.state_dict())
    recovery.FinishedSteps.find(optimizer).end()
    assert not folder.exists() or not list(folder.iterdir())


def test_a_folder_is_free_once_nobody_has_the_model(tmp_path):
    model, optimizer = killed_runs.made()
    wrapped(model, optimizer, f"disk:{tmp_path}")
    del model, optimizer
    model, optimizer = killed_runs.made()
    wrapped(model, optimizer, f"disk:{tmp_path}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rotor-step-1", "rotor-values"]


def test_copies_need_room(killed, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1 << 20))
    with pytest.raises(OSError, match="copies of the values need 2"):
        recover(killed / "forward")


@pytest.mark.parametrize(("owner", "name", "number"), [(Home, "keep", 2), (os, "fdatasync", 2)])
def test_an_interruption_leaves_one_step_or_the_other(owner, name, number, tmp_path, monkeypatch):
    """A step whose record is complete is finished; what is on the disk says the same."""
    folder = tmp_path / "run"
    folder.mkdir()
    model, optimizer = killed_runs.made()
    wrapped(model, optimizer, f"disk:{folder}")
    train(model, model, optimizer, range(2))
    model(batch(2)).backward()
    real, calls = getattr(owner, name), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == number:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    steps = 3 if owner is Home else 2
    state = recover(shutil.copytree(folder, tmp_path / "copy"))
    assert state["step"] == steps
    for key, value in model.named_parameters():
        assert torch.equal(value, state["model"][key])
    if steps == 2:
        optimizer.step()
    optimizer.zero_grad()
    assert train(model, model, optimizer, range(3, 5)) == plain_run(5)[2][3:]
    assert recover(shutil.copytree(folder, tmp_path / "later"))["step"] == 5
