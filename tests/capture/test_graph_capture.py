"""What modules may do and be called with: each trained under a limit, beside the plain model."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from graph_modules import Scaled, loss_of, step
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from versions import HANDS_OVER
from zoo.models import Function

import rotor

pytestmark = pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")


def linears(count: int = 4, width: int = 16) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(width, width) for _ in range(count)])


def chain(self, x):
    for linear in self.l:
        x = F.gelu(linear(x))
    return x


def rows(*shape: int, **kwargs: Any) -> torch.Tensor:
    return torch.randn(*(shape or (32, 16)), **kwargs)


def limits(chk, fractions):
    """Limits between the least and what is needed without recomputation."""
    with pytest.raises(rotor.InfeasibleError) as caught:
        chk.compute_sequence(1)
    least = caught.value.minimum_bytes
    chk.compute_sequence("1GiB")
    most = chk.get_expected_memory()
    return [int(least + f * max(most - least, 0)) for f in fractions]


def check(
    model,
    args=None,
    kwargs=None,
    *,
    loss=loss_of,
    context=contextlib.nullcontext,
    tolerance=0.0,
    fractions=(1.0, 0.0),
    room=300 if HANDS_OVER else 4096,
):
    """Three steps at each limit equal the plain model's; returns the last wrapper."""
    args = (rows(),) if args is None else args
    twin, start = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    chk = rotor.Checkpointable(twin, engine="graph", effort="fast")

    def in_context(which, *a, **k):
        with context():
            return which(*a, **k)

    def restore(values):
        with torch.no_grad():
            for tensor, value in zip(args, values, strict=False):
                tensor.copy_(value)

    in_context(chk.measure, *args, **(kwargs or {}))
    saved = [t.detach().clone() for t in args if isinstance(t, torch.Tensor)]
    # The least limit is that of a loss which is known.
    chk.compute_sequence("1GiB")
    step(twin, partial(in_context, chk), args, kwargs, seed=0, loss=loss)
    restore(saved)
    for limit in limits(chk, fractions):
        plain = copy.deepcopy(model)
        chk.load_state_dict(start)
        chk.compute_sequence(limit + room)
        for seed in range(2):
            saved = [t.detach().clone() for t in args if isinstance(t, torch.Tensor)]
            expected = step(plain, partial(in_context, plain), args, kwargs, seed=seed, loss=loss)
            restore(saved)
            found = step(twin, partial(in_context, chk), args, kwargs, seed=seed, loss=loss)
            if tolerance:
                assert found.is_close(expected, tolerance)
            else:
                assert expected.differences(found) == []
        assert chk.plan.measured_bytes is not None
        assert chk.plan.measured_bytes <= chk.mem_limit
    return chk


@dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple
    number: int = 3
    nothing: object = None


def test_keyword_arguments():
    def forward(self, x, *, scale, mask=None, flag=True):
        for linear in self.l:
            x = F.gelu(linear(x)) * scale if flag else linear(x)
        return x if mask is None else x * mask

    model = Function(forward, l=linears())
    check(model, (rows(),), {"scale": 2.0, "mask": torch.rand(32, 16) > 0.5})
    check(model, (rows(),), {"scale": 0.5, "flag": False})


def hidden(self, x):
    h = [x]
    for linear in self.l:
        h.append(torch.tanh(linear(h[-1])))
    return h


def test_dataclass_output():
    def forward(self, x):
        h = hidden(self, x)
        return Output(h[-1], (h[1], h[2].detach()))

    chk = check(Function(forward, l=linears()))
    output = chk(rows())
    assert isinstance(output, Output)
    assert output.number == 3
    assert output.nothing is None


def test_nested_output_with_none_and_numbers():
    def forward(self, x):
        h = hidden(self, x)
        return {"a": h[-1], "b": [h[1], None, 3, "text"], "c": {"d": h[2].argmax(-1)}}

    output = check(Function(forward, l=linears()))(rows())
    assert output["b"][1:] == [None, 3, "text"]
    assert output["c"]["d"].dtype == torch.int64


def test_outputs_that_no_loss_uses_give_no_gradient():
    model = Function(lambda self, x: tuple(hidden(self, x)[1:]), l=linears())
    chk = check(model, loss=lambda output: output[1].sum())
    chk.zero_grad()
    chk(rows())[1].sum().backward()
    assert [p.grad is None for p in chk.parameters()] == [False] * 4 + [True] * 4


def test_integer_and_boolean_inputs():
    def forward(self, tokens, mask):
        return chain(self, self.e(tokens)).masked_fill(mask[..., None], 0.0)

    model = Function(forward, e=nn.Embedding(50, 16), l=linears())
    check(model, (torch.randint(50, (4, 8)), torch.rand(4, 8) > 0.5))


def test_inputs_that_require_gradients():
    model = Function(lambda self, x, y: chain(self, x) * y, l=linears())
    check(model, (rows(requires_grad=True), rows(requires_grad=True)))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_outputs_that_alias_inputs_and_each_other(requires_grad):
    def forward(self, x):
        y = chain(self, x)
        return x.view(-1), y, y.t(), y[0], x

    model, args = Function(forward, l=linears()), (rows(requires_grad=requires_grad),)
    check(model, args, fractions=(1.0, 0.6))


def test_parameters_and_buffers_as_outputs():
    def forward(self, x):
        return self.l[0](x).relu(), self.l[0].weight, self.l[1].weight * 2, self.b

    check(Function(forward, l=linears(2), b=torch.ones(3)))


def test_tied_frozen_and_unused_parameters():
    model = Function(chain, l=linears(), unused=nn.Linear(3, 3))
    model.l[1].weight = model.l[2].weight
    model.l[3].requires_grad_(False)
    chk = check(model)
    assert chk.module.unused.weight.grad is None
    assert chk.module.l[3].weight.grad is None


def test_buffers_that_a_forward_changes():
    def forward(self, x):
        self.n.add_(1)
        self.ema.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.reassigned = self.reassigned + x.detach().mean()
        return chain(self, x) * self.n + self.ema

    buffers = {"n": torch.zeros(()), "ema": torch.zeros(16), "reassigned": torch.zeros(())}
    chk = check(Function(forward, l=linears(), **buffers))
    assert chk.module.n == 2


def test_batch_norm_in_place_dropout_and_instance_norm():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout2d(0.3),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8, affine=False),
        nn.SiLU(inplace=True),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    )
    chk = check(model, (rows(4, 3, 12, 12),))
    assert chk.module[1].num_batches_tracked == 2
    check(
        model.to(memory_format=torch.channels_last),
        (rows(4, 3, 12, 12).to(memory_format=torch.channels_last),),
    )


def test_normalized_weights():
    spectral = nn.utils.parametrizations.spectral_norm
    weight = nn.utils.parametrizations.weight_norm
    model = Function(
        chain, l=nn.ModuleList([spectral(nn.Linear(16, 16)), weight(nn.Linear(16, 16))])
    )
    check(model)


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_autocast_outside_and_inside():
    check(Function(chain, l=linears()), context=autocast, tolerance=0.02)

    def forward(self, x):
        with autocast():
            return chain(self, x)

    check(Function(forward, l=linears()), tolerance=0.02)


def test_functions_of_the_user():
    def forward(self, x):
        for linear in self.l:
            x = Scaled.apply(torch.tanh(linear(x)))
        return x

    check(Function(forward, l=linears()))


def test_checkpoint_inside():
    def forward(self, x):
        for linear in self.l:
            x = checkpoint(lambda y, f=linear: F.dropout(F.gelu(f(y)), 0.2), x, use_reentrant=False)
        return x

    check(Function(forward, l=linears()))


def test_every_kind_of_randomness():
    def forward(self, x):
        a, b, c = F.gumbel_softmax(self.l[0](x)), self.l[1](x).sigmoid(), self.l[2](x)
        return a + torch.bernoulli(b) + F.rrelu(c, training=True) + F.alpha_dropout(x, 0.2, True)

    check(Function(forward, l=linears()), fractions=(1.0, 0.3, 0.0))


def test_hooks_of_parts_and_of_the_model():
    model = Function(chain, l=linears())
    model.l[1].register_forward_hook(lambda module, args, output: output * 2)
    model.l[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_forward_hook(lambda module, args, output: output - 1)
    check(model)


def test_hooks_of_tensors_and_parameters():
    model, x = Function(chain, l=linears()), rows()
    plain = copy.deepcopy(model)
    chk = rotor.Checkpointable(model, mem_limit="1MiB", engine="graph")
    seen = []
    for each, call in ((plain, plain), (model, chk)):
        each.l[0].weight.register_hook(lambda gradient: gradient * 3)
        y = call(x)
        y.register_hook(lambda gradient: seen.append(gradient.clone()))
        y.sum().backward()
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(plain.l[0].weight.grad, model.l[0].weight.grad)


@pytest.mark.parametrize("loss", [torch.Tensor.sum, lambda y: y[0, 0], lambda y: y.mean(0).max()])
def test_gradients_of_the_output_of_any_layout(loss):
    check(Function(chain, l=linears()), loss=loss)
    # Kernels may copy a gradient that comes in another layout; one that is expanded they do not.
    room = {} if loss is torch.Tensor.sum else {"room": 4096}
    check(Function(lambda self, x: chain(self, x).t(), l=linears()), loss=loss, **room)


def test_a_sequential_and_an_argument_called_input():
    check(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)))

    def forward(self, input):
        return chain(self, input)

    check(Function(forward, l=linears()), (), {"input": rows()})


def test_loss_inside_the_model():
    def forward(self, x, target):
        return F.mse_loss(chain(self, x), target)

    check(Function(forward, l=linears()), (rows(), rows()), loss=lambda y: y)


def test_inputs_that_the_model_changes():
    def forward(self, x, state):
        state.add_(1)
        return chain(self, x) * state

    check(Function(forward, l=linears()), (rows(), torch.zeros(16)))


def test_several_outputs_of_one_operation_and_views():
    def forward(self, x):
        q, k, v = self.q(x).chunk(3, -1)
        a, b = torch.cat([q, k * v], -1).split([12, 20], -1)
        y = a.sum(-1, keepdim=True) + b[:, :16]
        values, where = y.max(-1)
        ordered, _ = y.sort(-1)
        return ordered, values, where, y.unbind(0)[0], F.pad(y, (1, 1))

    check(Function(forward, q=nn.Linear(16, 48)))


def test_indexed_writes():
    def forward(self, x, i):
        y = self.l[0](x).clone()
        y[:, 3] = 0
        y[i] = y[i] * 2
        y.scatter_add_(0, i[:, None].expand(32, 16), self.l[1](x))
        return self.l[2](y).cumsum(0)

    check(Function(forward, l=linears()), (rows(), torch.randint(32, (32,))))


def test_complex_numbers_and_double_precision():
    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(self.l[0](x)) * (1 + 1j), n=16) + self.l[1](x)

    check(Function(forward, l=linears()))
    check(Function(chain, l=linears()).double(), (rows().double(),))


def test_a_transposed_batch_norm():
    def forward(self, x):
        return self.b(self.l[0](x).transpose(1, 2)).transpose(1, 2).relu()

    model = Function(forward, l=linears(1), b=nn.BatchNorm1d(16))
    check(model, (rows(4, 8, 16),), tolerance=1e-5)


def test_a_transformer_at_low_limits():
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.1, batch_first=True)
    chk = check(
        nn.TransformerEncoder(layer, 2), (rows(4, 12, 16),), fractions=(1.0, 0.5, 0.25, 0.0)
    )
    assert int(chk.program.runs.max()) > 1


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_non_differentiable()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def test_an_error_of_dynamos_own_is_a_refusal():
    model = Function(lambda self, x: Reversed.apply(chain(self, x)), l=linears())
    chk = rotor.Checkpointable(model, mem_limit="1GiB", engine="graph")
    with pytest.raises(rotor.CaptureError, match="capture failed in its own code"):
        chk(rows())


def test_each_backward_is_of_its_own_graph():
    def forward(self, x):
        x = chain(self, x)
        return torch.sin(x * self.more) if self.is_longer else x

    model = Function(forward, l=linears(), more=nn.Parameter(torch.randn(16)))
    chk = rotor.Checkpointable(model, mem_limit="1MiB", engine="graph")
    x = rows()

    def gradients(which):
        model.zero_grad()
        for order in (0, 1), (1, 0):
            results = []
            for model.is_longer in (False, True):
                results.append(which(x))
            # The first backward of each comes after both captures.
            for k in order:
                results[k].square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    for found, expected in zip(gradients(chk), gradients(model), strict=True):
        assert torch.equal(found, expected)
