"""rk-GB's graphs: node by node they compute what the model does, in one cost model."""

from __future__ import annotations

import copy
import re
import types
from typing import Any

import pytest
import torch
from rkgb_cases import NAMES, ODD, Frozen, case, odd
from torch import nn

from rotor import rkgb
from rotor.graph import lower_bound, plan, simulate
from rotor.rkgb.units import _ordered

ELEMENTWISE = (nn.ReLU, nn.GELU, nn.Tanh)


def layers_of(model: nn.Module) -> set[str]:
    """Paths of the layers that are more than element-wise."""
    return {
        name
        for name, module in model.named_modules()
        if not list(module.children()) and not isinstance(module, (*ELEMENTWISE, nn.Flatten))
    }


def clones(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, list):
        return [clones(item) for item in value]
    return {key: clones(item) for key, item in value.items()} if isinstance(value, dict) else value


def tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, dict):
        return [t for value in output.values() for t in tensors(value)]
    return [t for v in output for t in tensors(v)] if isinstance(output, tuple) else [output]


def run_as_code(result: rkgb.Result, model: nn.Module, inputs: list[Any]) -> dict[str, Any]:
    """What the statements of the S graph define, run node by node."""
    sg = result.S_graph
    env = {**sg.dict_constants, "torch": torch, "self": model, **rkgb.make_inputs(model, inputs)}
    with torch.no_grad():
        for node in [sg.init_node, *sg.nodes]:
            exec(node.get_code(), env)
        exec(sg.end_code, env)
    return env


def check_step(model: nn.Module, inputs: list[Any], result: rkgb.Result) -> None:
    """S gives the outputs and buffers of the model, K its gradients too, bit by bit."""
    eager, by_code, by_step = (copy.deepcopy(model) for _ in range(3))
    given = [clones(inputs) for _ in range(3)]
    torch.manual_seed(7)
    expected = tensors(eager(*given[0]))
    torch.manual_seed(7)
    env = run_as_code(result, by_code, given[1])
    outputs = [env[name] for name in result.S_graph.direct_outputs]
    assert len(outputs) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    buffers = zip(by_code.named_buffers(), eager.buffers(), strict=True)
    assert [name for (name, a), b in buffers if not torch.equal(a, b)] == []

    differentiable = [output for output in expected if output.requires_grad]
    gradients = [torch.randn_like(output) for output in differentiable]
    torch.autograd.backward(differentiable, gradients)
    kg = result.K_graph
    env = {**kg.dict_constants, "torch": torch, "self": by_step}
    env |= rkgb.make_inputs(by_step, given[2])
    torch.manual_seed(7)
    with torch.no_grad():
        exec(kg.init_code, env)
        for node in kg.list_kcn:
            if node is kg.loss_kcn:
                env |= dict(zip(node.all_targets, gradients, strict=True))
            exec(node.get_code(), env)
        exec(kg.end_code, env)
    seen = 0
    for name, parameter in eager.named_parameters():
        if parameter.grad is not None:
            found = env[kg.gradients[f"self.get_parameter({name!r})"]]
            assert torch.equal(found, parameter.grad), name
            seen += 1
    assert seen
    for name, tensor in rkgb.make_inputs(eager, given[0]).items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            assert torch.equal(env[kg.gradients[name]], tensor.grad), name
    buffers = zip(by_step.named_buffers(), eager.buffers(), strict=True)
    assert [name for (name, a), b in buffers if not torch.equal(a, b)] == []
    changed = zip(tensors(given[1]), tensors(given[0]), strict=True)
    assert all(torch.equal(a, b) for a, b in changed if isinstance(a, torch.Tensor))


# -- programs


@pytest.mark.parametrize("name", NAMES)
def test_nodes_compute_what_the_model_does(name):
    check_step(case(name).model, case(name).inputs, case(name).result)


@pytest.mark.parametrize("name", ODD)
def test_odd_models_are_computed_too(name):
    model, inputs = odd(name)
    result = rkgb.make_all_graphs(model, inputs)
    check_step(model, inputs, result)
    kg = result.K_graph
    assert kg.simulate().time_ns == sum(op.cost_ns for op in kg.step.operations)
    assert sorted(k for node in kg.list_kcn for k in node.operations) == list(range(len(kg.step)))


def test_updates_are_merged_where_their_order_allows_it():
    result = rkgb.make_all_graphs(*odd("counting"))
    sg = result.S_graph
    writers = {n.main_target: n.inplace_code.count(".copy_(") for n in sg.nodes if n.inplace_code}
    assert sum(writers.values()) == 3
    assert len(sg.nodes) > 2
    twice = rkgb.make_all_graphs(*odd("twice")).S_graph
    assert twice.end_code.count(".copy_(") == 2
    assert all("running_mean').copy_(" not in node.get_code() for node in twice.nodes)


# -- simplification


def test_resnet_has_about_a_node_for_each_layer(resnet):
    result, layers = resnet.result, layers_of(resnet.model)
    assert len(result.FB) == 178
    assert len(result.simplified) == len(result.S_graph.nodes) == 51
    assert len(layers) == 43
    modules = [node.module for node in result.S_graph.nodes]
    assert layers <= set(modules)
    assert all(modules.count(layer) == 1 for layer in layers)
    # What is left are the eight sums of the residual blocks, each with its ReLU.
    sums = [node for node in result.S_graph.nodes if node.module not in layers]
    assert [node.merged for node in sums] == [["add", "relu"]] * 8
    inner = next(node for node in result.S_graph.nodes if node.module == "layer1.0.conv2")
    assert (inner.merged, inner.layer) == (["relu", "convolution"], "Conv2d")
    assert inner.info.tsize == (2, 64, 8, 8)
    norm = next(node for node in result.S_graph.nodes if node.module == "layer1.0.bn1")
    assert norm.inplace_code.count(".copy_(") == 3
    assert "running_mean" in norm.inplace_code


@pytest.mark.parametrize(("name", "count"), [("gpt", 137), ("unet", 58), ("mlp", 7)])
def test_others_have_about_a_node_for_each_layer(name, count):
    found = case(name)
    layers = layers_of(found.model)
    assert len(found.result.S_graph.nodes) == count
    modules = [node.module for node in found.result.S_graph.nodes]
    wide = {name for name in layers if not isinstance(found.model.get_submodule(name), nn.Dropout)}
    assert all(modules.count(layer) == 1 for layer in wide)


@pytest.mark.parametrize("name", NAMES)
def test_nodes_are_linked_by_what_they_read(name):
    sg = case(name).result.S_graph
    known = {name for node in [sg.init_node, *sg.nodes] for name in node.all_targets}
    assigned = [name for node in sg.nodes for name in node.all_targets]
    assert len(assigned) == len(set(assigned))
    done = {sg.init_node}
    for number, node in enumerate(sg.nodes):
        assert node.number == number
        assert set(node.deps) <= done
        done.add(node)
        read = set(re.findall(r"__\d+_\w+", node.get_code())) & known - set(node.all_targets)
        computed = {t for t in read if t.startswith("__")}
        assert {t for names in node.deps.values() for t in names} >= computed
        assert not node.is_artefact
        for made, names in node.deps.items():
            assert made.users[node] == names
            assert names <= set(made.all_targets)
        assert {*node.tensor_targets, *node.container_targets} <= set(node.all_targets)
        assert node.main_target in node.all_targets
        assert node.get_code() == node.full_code()
        lines = [node.main_code, node.body_code, node.inplace_code]
        assert node.get_code() == "\n".join(line for line in lines if line)
    assert (
        sg.get_code().splitlines()
        == [
            line
            for node in [sg.init_node, *sg.nodes]
            for line in node.get_code().splitlines()
            if line
        ]
        + sg.end_code.splitlines()
    )


def test_constants_and_views_are_no_nodes(transformer):
    result = transformer.result
    # A Dropout that drops nothing is a copy, and a layer all the same.
    fns = [node.main_fct for node in result.S_graph.nodes if node.layer != "Dropout"]
    assert not any(re.search(r"\.(view|t|arange|reshape|_to_copy|clone)\.", fn) for fn in fns)
    assert any("aten.arange" in node.fct for node in result.D_graph.nodes)
    position = next(n for n in result.S_graph.nodes if n.module == "embed.position")
    assert position.merged == ["arange", "embedding"]
    assert position.deps == {}


# -- forward graphs


def test_raw_lists_and_data_flow(resnet):
    b, d = resnet.result.B_graph, resnet.result.D_graph
    assert [node.target for node in b.nodes] == [node.target for node in d.nodes]
    assert [node.target for node in b.nodes if node.is_input] == d.inputs == ["input"]
    assert b.output == d.output == d.output_node.target
    env = {**b.dict_constants, "torch": torch, "self": copy.deepcopy(resnet.model)}
    env["input"] = resnet.inputs[0]
    with torch.no_grad():
        for node in b.nodes:
            exec(node.get_code(), env)
    expected = copy.deepcopy(resnet.model)(resnet.inputs[0])
    assert torch.equal(env[b.output], expected)
    for node in d.nodes:
        value = env[node.target]
        assert node.info is d.dict_info[node.target]
        assert node.main_target == node.target
        assert all(node in read.users for read in node.deps)
        if isinstance(value, torch.Tensor):
            assert (value.shape, value.dtype) == (node.info.tsize, node.info.dtype)
            owner = env.get(node.info.data_owner_name)
            if node.info.is_view and isinstance(owner, torch.Tensor):
                assert owner.data_ptr() == value.untyped_storage().data_ptr()
    assert sum(info.memsize for info in d.dict_info.values()) == sum(
        storage.bytes for storage in resnet.result.forward.storages
    )


def test_gradients_flow_from_parameters_alone():
    model, inputs = odd("frozen")
    result = rkgb.make_all_graphs(model, inputs)
    flows = {node.module: node.info.requires_grad for node in result.S_graph.nodes if node.module}
    assert flows["a"] is False
    assert flows["b"] is True
    last = next(n for n in result.S_graph.nodes if n.merged == ["argmax"])
    assert last.info.requires_grad is False


# -- forward and backward


@pytest.mark.parametrize("name", NAMES)
def test_one_cost_model(name):
    result = case(name).result
    kg, whole = result.K_graph, result.FB
    assert kg.step is whole
    program = kg.simulate()
    order = [index for node in kg.list_kcn for index in node.operations]
    assert program == simulate(whole, order)
    assert sorted(order) == list(range(len(whole)))
    once = simulate(whole, range(len(whole)))
    assert program.time_ns == once.time_ns
    assert program.peak_bytes <= once.peak_bytes * 1.01
    # The contracted graph frees what a computation reads only when it is done.
    whole_nodes = simulate(kg.graph, range(len(kg.graph)))
    assert whole_nodes.time_ns == once.time_ns
    assert program.peak_bytes <= whole_nodes.peak_bytes <= program.peak_bytes * 1.1
    assert sum(node.time for node in kg.list_kcn) == pytest.approx(once.makespan)
    exported = sum(storage.bytes for storage in kg.graph.storages)
    assert sum(node.mem for node in kg.list_kdn) == exported


def test_computations_can_be_run_again(perceptron):
    kg = perceptron.result.K_graph
    first = kg.list_kcn[0]
    at = kg.list_kcn.index(kg.loss_kcn) + 1
    again = [*kg.list_kcn[:at], first, *kg.list_kcn[at:]]
    assert kg.simulate(again).makespan == pytest.approx(kg.simulate().makespan + first.time)
    with pytest.raises(ValueError, match="was not made before it"):
        kg.simulate(kg.list_kcn[1:])
    least = simulate(kg.graph, range(len(kg.graph))).peak_bytes
    program = plan(kg.graph, least, effort="fast")
    assert program.peak_bytes <= least


def test_a_repeated_node_does_not_write_its_buffers_again(resnet):
    kg = resnet.result.K_graph
    norm = next(k for k in kg.list_kcn if k.module == "bn1")
    once = [k for k in norm.operations if kg.step.operations[k].once]
    assert once
    assert norm.inplace_code
    at = kg.list_kcn.index(kg.loss_kcn) + 1
    again = kg.simulate([*kg.list_kcn[:at], norm, *kg.list_kcn[at:]])
    assert [again.runs[k] for k in once] == [1] * len(once)
    assert all(again.runs[k] == 2 for k in norm.operations if k not in once)


@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_computations_are_planned(name):
    kg = case(name).result.K_graph
    whole = simulate(kg.graph, range(len(kg.graph)))
    gradients = sum(kdn.mem for kdn in kg.list_kdn if kdn.kdn_type == "pgrad")
    limit = gradients + (whole.peak_bytes - gradients) * 9 // 10
    # Workspaces of convolutions, which differ by processor, may leave no more to be saved.
    limit = max(limit, (lower_bound(kg.graph) + whole.peak_bytes) // 2)
    program = plan(kg.graph, limit, effort="fast")
    assert program.peak_bytes <= limit < whole.peak_bytes
    priced = kg.simulate(kg.list_kcn[k] for k in program.ops.tolist())
    assert priced.peak_bytes <= program.peak_bytes
    assert priced.time_ns <= program.time_ns


@pytest.mark.parametrize("name", NAMES)
def test_computations_and_data(name):
    result = case(name).result
    kg = result.K_graph
    assert kg.sg is result.S_graph
    assert set(kg.dict_kn) == {node.name for node in (*kg.list_kcn, *kg.list_kdn)}
    assert len(kg.dict_kn) == len(kg.list_kcn) + len(kg.list_kdn)
    forward = [node for node in kg.list_kcn if node.is_fwd and node is not kg.loss_kcn]
    nodes = [node.main_target for node in result.S_graph.nodes]
    assert [node.main_target for node in forward][-len(nodes) :] == nodes
    for kcn in kg.list_kcn:
        assert all(kcn in kdn.deps for kdn in kcn.users)
        assert all(kcn in kdn.users_real for kdn in kcn.deps_real)
        assert kcn.deps_global == kcn.deps_real
        assert kcn.users_global == kcn.users
    for kdn in kg.list_kdn:
        assert kdn.kdn_type in ("data", "grad", "phantoms", "pgrad")
        assert kdn.mem == sum(kg.step.storages[s].bytes for s in kdn.storages)
    parameters = sum(4 * p.numel() for p in case(name).model.parameters())
    given = sum(kdn.mem for kdn in kg.list_kdn if kdn.kdn_type == "pgrad")
    assert parameters <= given <= parameters + 64 * len(list(case(name).model.parameters()))
    assert kg.output_kdn_data.main_target == result.S_graph.output_node.main_target
    assert kg.loss_kcn in kg.output_kdn_data.users_real
    assert kg.loss_kcn in kg.output_kdn_grad.deps
    assert kg.input_kdn_grad is None


def test_gradients_of_inputs_are_data_of_their_own():
    kg = rkgb.make_all_graphs(*odd("twice")).K_graph
    assert kg.input_kdn_grad is not None
    assert kg.input_kdn_grad.mem >= 48
    assert [kcn.is_fwd for kcn in kg.input_kdn_grad.deps] == [False]


def test_the_backward_of_a_node_is_cut_where_another_has_to_come_between():
    def task(reads, makes):
        return types.SimpleNamespace(
            phase="backward", inputs=reads, made={(): makes}, random=False, once=False
        )

    tasks = [task([], 0), task([0], 1), task([1], 2), task([2], 3)]
    trace = types.SimpleNamespace(lowered=types.SimpleNamespace(tasks=tasks))
    units = _ordered(trace, {5: [0, 2], 7: [1, 3]})
    found = [(unit.owner, unit.operations, unit.part) for unit in units]
    assert found == [(5, [0], 0), (7, [1], 0), (5, [2], 1), (7, [3], 1)]
    whole = _ordered(trace, {5: [0, 1], 7: [2, 3]})
    assert [(unit.owner, unit.operations, unit.part) for unit in whole] == [
        (5, [0, 1], 0),
        (7, [2, 3], 0),
    ]


# -- inputs


def test_inputs_by_position_and_by_name(perceptron):
    model = Frozen()
    x, mask = torch.randn(2, 4), torch.rand(2, 4) > 0.5
    expected = {"x": x, "mask": mask}
    for given in ([x, mask], (x, mask), {"x": x, "mask": mask}):
        assert rkgb.make_inputs(model, given) == expected
    assert rkgb.make_inputs(model, x) == {"x": x}
    assert rkgb.make_inputs(model, [x], {"mask": mask}) == expected
    sizes = {
        len(rkgb.make_all_graphs(model, given).S_graph.nodes)
        for given in ([x, mask], {"x": x, "mask": mask})
    }
    assert sizes == {5}
    with pytest.raises(TypeError, match="Frozen cannot be called with these inputs: too many"):
        rkgb.make_all_graphs(model, [x, mask, x])
