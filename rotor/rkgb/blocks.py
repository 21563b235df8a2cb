"""Blocks of a simplified forward: cut at articulation points, and sorted into classes of alike."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rotor.graph.contraction import common_path
from rotor.rkgb.backward import K_C_node, K_D_node, K_graph
from rotor.rkgb.grouping import Grouped
from rotor.rkgb.simplified import SOURCES, S_graph, S_node
from rotor.rkgb.source import Trace
from rotor.rkgb.units import Part, Unit, contracted, part_of


def cut(sg: S_graph) -> list[list[int]]:
    """Return the numbers of the nodes of each block of a simplified forward, in order.

    A node ends a block where everything after it depends on what comes before it through this node
    alone. Inputs and constants exist all the time and hold no block together.
    """
    last = len(sg.nodes)
    reach = [
        max([user.number for user in node.users] + [last] * node.protected, default=node.number)
        for node in sg.nodes
    ]
    blocks: list[list[int]] = [[]]
    furthest = -1
    for node in sg.nodes:
        blocks[-1].append(node.number)
        if furthest <= node.number and node.users:
            blocks.append([])
        furthest = max(furthest, reach[node.number])
    return [block for block in blocks if block]


def block_names(sg: S_graph, blocks: Sequence[Sequence[int]]) -> list[str]:
    """Return a name for each block: the common beginning of the paths of its modules."""
    modules = [[sg.nodes[k].module for k in block] for block in blocks]
    return [common_path(filter(None, paths)) for paths in modules]


class _Anonymous:
    """Texts in which only the order of the names' first uses counts."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.known: dict[fx.Node, str] = {}

    def name(self, node: fx.Node) -> str:
        if node not in self.known:
            kind = "v" if node in self.trace.targets else "p"
            if node in self.trace.parameters:
                kind = "w"
            self.known[node] = f"{kind}{len(self.known)}"
        return self.known[node]

    def lines(self, nodes: Sequence[fx.Node]) -> list[str]:
        found = []
        for node in nodes:
            for read in node.all_input_nodes:
                if read not in self.known:
                    found.append(f"{self.name(read)}: {_shape(read.meta.get('val'))}")
            text = self.trace.expression(node, self.name)
            text = re.sub(r"\b_cst_\d+_", "_cst_", text)
            found.append(f"{self.name(node)} = {text}: {_shape(node.meta.get('val'))}")
        return found


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(_shape(item) for item in value) + ")"
    return str(value)


def anonymous(
    trace: Trace, grouped: Grouped, kg: K_graph, blocks: Sequence[Sequence[int]]
) -> list[str]:
    """Return each block as text without names: equal texts are equal work, forward and backward."""
    backward: dict[str, list[int]] = {}
    for kcn in kg.list_kcn:
        if not kcn.is_fwd:
            backward.setdefault(kcn.main_target, []).extend(kcn.operations)
    texts = []
    for block in blocks:
        writer = _Anonymous(trace)
        lines = []
        for number in block:
            lines += writer.lines(grouped.members[number])
        for number in reversed(block):
            tasks = backward.get(kg.sg.nodes[number].main_target, [])
            nodes = [trace.lowered.tasks[k].node for k in tasks]
            lines += writer.lines([node for node in nodes if node is not None])
        texts.append("\n".join(lines))
    return texts


def classes(texts: Sequence[str]) -> list[list[int]]:
    """Return the numbers of equal texts together, in the order of their first ones."""
    found: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        found.setdefault(text, []).append(number)
    return list(found.values())


def block_of_s(sg: S_graph, block: Sequence[int]) -> S_graph:
    """Return one block of a simplified forward, given by its numbers, with nodes of its own."""
    ahead = len(sg.graph) - len(sg.nodes)
    graph = part_of(sg.graph, [ahead + number for number in block], loss=False).graph
    copies = {sg.nodes[k]: replace(sg.nodes[k], number=i) for i, k in enumerate(block)}
    init = S_node(SOURCES)
    hidden: dict[str, None] = {}
    returned: dict[str, None] = {}
    for node, copy in copies.items():
        copy.deps, copy.users = {}, {}
        for made, names in node.deps.items():
            if made not in copies:
                hidden[made.main_target] = None
            copy.deps[copies.get(made, init)] = copy.deps.get(copies.get(made, init), set()) | names
        outside = [names for user, names in node.users.items() if user not in copies]
        for name in sorted({name for names in outside for name in names}):
            returned[name] = None
        if node.protected:
            own = {*node.all_targets}
            returned.update(dict.fromkeys(name for name in sg.direct_outputs if name in own))
        copy.protected = node.protected or bool(outside)
    for copy in copies.values():
        for made, names in copy.deps.items():
            made.users[copy] = names
    direct = sorted({name for names in init.users.values() for name in names})
    init.all_targets, init.tensor_targets = list(direct), list(direct)
    nodes = list(copies.values())
    last = next((node for node in reversed(nodes) if node.protected), nodes[-1])
    return S_graph(
        nodes=nodes,
        init_node=init,
        output_node=last,
        direct_inputs=direct,
        hidden_inputs=list(hidden),
        direct_outputs=list(returned) or [last.main_target],
        hidden_output=last.main_target,
        dict_info=sg.dict_info,
        dict_constants=sg.dict_constants,
        graph=graph,
    )


def block_of_k(kg: K_graph, sg: S_graph) -> K_graph:
    """Return the nodes of one block of a graph of forward and backward, as a graph of their own.

    `sg` is the block of the simplified forward.
    """
    names = {node.main_target for node in sg.nodes}
    chosen = [kcn for kcn in kg.list_kcn if kcn.main_target in names and kcn is not kg.loss_kcn]
    part = part_of(kg.step, [k for kcn in chosen for k in kcn.operations], loss=True)
    copies = {
        kcn: replace(
            kcn,
            operations=[part.operations[k] for k in kcn.operations],
            deps_real=set(),
            users=set(),
        )
        for kcn in chosen
    }
    middle = sum(op.phase == "forward" for op in part.graph.operations)
    loss = K_C_node("loss", "loss", True, operations=[middle])
    ahead = [kcn for kcn in copies.values() if kcn.is_fwd]
    order = [*ahead, loss, *(kcn for kcn in copies.values() if not kcn.is_fwd)]
    phases = [part.graph.operations[kcn.operations[0]].phase for kcn in order]
    units = [[Unit(phase, -1, kcn.operations)] for phase, kcn in zip(phases, order, strict=True)]
    labels = [kcn.name for kcn in order]
    graph = contracted(part.graph, units, labels, [kcn.module for kcn in order])
    for number, kcn in enumerate(order):
        kcn.number = number
    data = _copied_data(copies, part)
    for kdn in data.values():
        if not kdn.deps and kdn.kdn_type == "grad":
            kdn.deps.add(loss)
            loss.users.add(kdn)
            loss.all_targets += kdn.all_targets
    last = sg.output_node.main_target
    outgoing = data.setdefault(f"{last} data", K_D_node("data", last))
    outgoing.users_real.add(loss)
    loss.deps_real.add(outgoing)
    incoming = data.setdefault(f"{last} grad", K_D_node("grad", last))
    first = next(iter(sg.hidden_inputs), SOURCES)
    source = data.setdefault(f"{first} data", K_D_node("data", first))
    return K_graph(
        list_kcn=order,
        list_kdn=list(data.values()),
        loss_kcn=loss,
        input_kdn_data=source,
        input_kdn_grad=data.get(f"{first} grad"),
        output_kdn_data=outgoing,
        output_kdn_grad=incoming,
        init_code="",
        end_code="",
        gradients={
            name: target
            for name, target in kg.gradients.items()
            if any(target in kcn.all_targets for kcn in order)
        },
        dict_info=kg.dict_info,
        dict_constants=kg.dict_constants,
        sg=sg,
        graph=graph,
        step=part.graph,
    )


def _copied_data(copies: Mapping[K_C_node, K_C_node], part: Part) -> dict[str, K_D_node]:
    """Return copies, by name, of the data that computations read and make, between their copies."""
    data: dict[str, K_D_node] = {}

    def copied(kdn: K_D_node) -> K_D_node:
        own = [part.storages[s] for s in kdn.storages if s in part.storages]
        fresh = replace(kdn, deps=set(), users_real=set(), storages=own)
        return data.setdefault(kdn.name, fresh)

    for old, kcn in copies.items():
        for kdn in old.users:
            kcn.users.add(copied(kdn))
            copied(kdn).deps.add(kcn)
        for kdn in old.deps_real:
            kcn.deps_real.add(copied(kdn))
            copied(kdn).users_real.add(kcn)
    return data
