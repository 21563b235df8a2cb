"""Models that cannot have homes in a second tier are refused before anything changes."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from tiers.test_larger import assert_same, train
from torch import nn, optim

import rotor
from rotor.units import exact_bytes

LIMIT = 1 << 20


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def wrapped(model: nn.Module, optimizer: optim.Optimizer, **settings):
    given = {"mem_limit": LIMIT, "offload": "disk", "offload_state": optimizer, **settings}
    return rotor.Checkpointable(model, **given)


def assert_refused(model: nn.Module, text: str, **settings) -> None:
    """Assert that a model is refused in words, and stays as it was."""
    before = [(type(p), p.detach().clone()) for p in model.parameters()]
    with pytest.raises(ValueError, match=text):
        wrapped(model, optim.SGD(model.parameters(), lr=0.1), **settings)
    for parameter, (kind, values) in zip(model.parameters(), before, strict=True):
        assert type(parameter) is kind
        assert parameter.is_meta or torch.equal(parameter, values)


def tied(model: nn.Sequential) -> None:
    model[2].weight.data = model[0].weight.data


def viewed(model: nn.Sequential) -> None:
    model[0].register_buffer("lower", model[0].weight.data[32:])


def noted(model: nn.Sequential) -> None:
    model.columns = model[0].weight.data.t()


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (tied, "0.weight and 2.weight share memory"),
        (viewed, "share memory"),
        (noted, "columns share memory"),
        (lambda m: tied(m.to("meta")), "0.weight and 2.weight share memory"),
    ],
)
def test_parameters_that_share_memory_are_refused(share, text):
    model = layers()
    share(model)
    assert_refused(model, text)


def test_parts_of_one_memory_have_homes_each():
    """Parameters beside each other in one storage, as the flat weights of cuDNN."""
    plain, model = layers(), layers()
    flat = torch.empty(2, 64, 64)
    for part, layer in zip(flat, (model[0], model[2]), strict=True):
        layer.weight.data = part.copy_(layer.weight.detach())
    compare(plain, model, [(torch.randn(4, 64),)] * 2)


def compare(plain: nn.Module, model: nn.Module, data, **settings) -> None:
    """Assert that a wrapped model trains as the plain one."""

    def loss(call):
        return lambda x: call(x).square().mean()

    one, other = (optim.Adam(m.parameters()) for m in (plain, model))
    chk = wrapped(model, other, **settings)
    assert train(loss(chk), model, other, data) == train(loss(plain), plain, one, data)
    assert_same(plain, model, one, other)


HOLDS = {
    "loss": lambda m: m(torch.ones(1, 64)).sum(),
    "view": lambda m: m[0].weight[0],
    "frozen": lambda m: m[0].weight.requires_grad_(False)[0],
    "weak": lambda m: weakref.ref(m[0].weight),
    "step": lambda m: rotor.Checkpointable(m, mem_limit=LIMIT)(torch.ones(1, 64)).sum(),
}


@pytest.mark.parametrize("kind", sorted(HOLDS))
def test_a_parameter_that_is_held_is_refused_by_name_and_wrapped_later(kind, tmp_path):
    plain, model = layers(), layers()
    if kind == "frozen":
        plain[0].weight.requires_grad_(False)
    held = HOLDS[kind](model)
    place = {"offload": f"disk:{tmp_path}"}
    assert_refused(model, r"parameter \d.weight cannot lose its bytes", **place)
    del held
    compare(plain, model, [(torch.randn(4, 64),)] * 2, **place)


def test_old_weight_norm_is_refused():
    model = layers()
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(model[0])
    assert_refused(model, "parameter 0.weight_v cannot lose its bytes")


def test_an_error_of_the_weights_leaves_the_model_as_it_was():
    with torch.device("meta"):
        model = layers()
    model.register_parameter("real", nn.Parameter(torch.ones(2048, device="meta")))

    def weights(name):
        return torch.zeros(3) if name == "2.bias" else torch.ones(model.state_dict()[name].shape)

    assert_refused(model, "expected a tensor with values, of shape", weights=weights)
    assert all(p.is_meta for p in model.parameters())


class Recurrent(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.layer = kind(64, 64, 2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.first(x))[0]


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train(kind):
    torch.manual_seed(0)
    plain = Recurrent(kind)
    model = copy.deepcopy(plain)
    compare(plain, model, [(torch.randn(4, 8, 64),) for _ in range(3)], mem_limit=3 << 20)
    assert all(
        weight is model.layer._parameters[name]
        for weight, name in zip(
            model.layer._flat_weights, model.layer._flat_weights_names, strict=True
        )
    )


SHARES = {
    "array": lambda t: t.numpy(),
    "dlpack": torch.from_dlpack,
    "capsule": torch.utils.dlpack.to_dlpack,
    "storage": lambda t: t.storage(),
    "bytes": lambda t: t.untyped_storage().tolist(),
    "processes": lambda t: t.share_memory_(),
}


@pytest.mark.parametrize("kind", sorted(SHARES))
def test_memory_that_a_parameter_does_not_have_is_never_shared(kind):
    model = layers()
    wrapped(model, optim.SGD(model.parameters(), lr=0.1))
    text = "data" if kind in ("bytes", "capsule") else "has no memory that others could"
    with pytest.raises(RuntimeError, match=text):
        SHARES[kind](model[0].weight.detach())
    assert not model[0].weight.is_shared()


def test_elements_are_written_in_formats():
    plain, model = layers(), layers()
    optimizer = optim.Adam(model.parameters())
    chk = wrapped(model, optimizer)
    x = torch.randn(4, 64)
    for call in (plain, chk):
        call(x).sum().backward()
    for one, other in (
        (plain[0].weight, model[0].weight),
        (plain[0].weight.grad, model[0].weight.grad),
    ):
        assert (
            f"{other[0, 1]:.3f} {other.detach()[2, 3]:8.1e}"
            == f"{one[0, 1].item():.3f} {one[2, 3].item():8.1e}"
        )
        assert f"{other}" == str(one)
    optimizer.step()
    assert f"{optimizer.state[model[0].weight]['exp_avg'][0, 0]:.3f}"
    with pytest.raises(TypeError, match="unsupported format string"):
        format(model[0].weight, ".3f")


@pytest.mark.parametrize("is_function", [False, True])
def test_weights_of_a_mapping_stay_as_they_are(is_function):
    """Two models may begin with them, whose small parameters and buffers stay in memory."""
    torch.manual_seed(0)
    given = nn.Sequential(*layers(), nn.BatchNorm1d(64)).state_dict()
    before = {name: value.clone() for name, value in given.items()}
    trained = []
    for _ in range(2):
        with torch.device("meta"):
            model = nn.Sequential(*layers(), nn.BatchNorm1d(64))
        optimizer = optim.SGD(model.parameters(), 0.1)
        weights = given.__getitem__ if is_function else given
        chk = wrapped(model, optimizer, weights=weights)
        torch.manual_seed(1)
        chk(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
        trained.append(chk.module[-1].running_mean.clone())
        assert all(torch.equal(value, before[name]) for name, value in given.items())
    assert torch.equal(*trained)
    assert trained[0].any()


def test_weights_that_nothing_would_take_are_refused():
    model = layers()
    assert_refused(
        model, "0.weight, 0.bias, 2.weight has values already", weights=model.state_dict()
    )
    assert_refused(model, "all of the model have values", weights={"nothing": torch.zeros(1)})
    assert_refused(model, "all of the model have values", weights=torch.zeros)
    model.register_buffer("scale", torch.ones(1, device="meta"))
    weights = {"scale": torch.ones(1), "0.weight": torch.ones(64, 64)}
    assert_refused(model, "0.weight has values already", weights=weights)
    weights = {"scale": torch.ones(1, device="meta")}
    assert_refused(model, "on meta for scale, expected a tensor with values", weights=weights)
    model = layers().to("meta")
    assert_refused(model, "on meta for 0.weight", weights=model.state_dict())


@pytest.mark.parametrize("limit", [1, 1 << 13])
def test_a_limit_that_is_too_low_is_named_with_what_the_model_keeps(limit):
    """Also where it is less than that, and nothing is left for a step."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
    optimizer = optim.Adam(model.parameters())
    chk = rotor.Checkpointable(model, mem_limit=limit, offload="disk", offload_state=optimizer)
    with pytest.raises(rotor.InfeasibleError) as caught:
        chk(torch.ones(32, 64))
    assert f"The limit, {exact_bytes(limit)}, counts what the model keeps" in str(caught.value)
    assert str(caught.value).startswith("no plan was found that fits in ")
    assert ("fits in no bytes; " in str(caught.value)) == (limit == 1)
