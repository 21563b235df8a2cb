"""Checks within a joint graph, freed from the tokens by which AOTAutograd keeps them in order.

``torch.linalg.inv`` and its like check their results by an operation that returns nothing. It is
traced with a token, an empty tensor: each such operation takes the token of the one before, the
first takes an argument of the graph, and the graph returns the last token. PyTorch gives the graph
no tensors for these arguments. A check only has to come after the values that it reads.
"""

from __future__ import annotations

from torch import fx

from rotor._pytorch import captures
from rotor.errors import CaptureError

__all__ = ["drop_tokens"]


def drop_tokens(module: fx.GraphModule) -> list[fx.Node]:
    """Make checks in a joint graph plain operations; return the tokens that the backward is given.

    Tokens of the forward stay among the inputs, unused; None is returned for them. Raise
    CaptureError if another operation has effects that come in order.
    """
    graph = module.graph
    effects = [node for node in graph.nodes if captures.is_effect(node)]
    for node in effects:
        token, operation, *arguments = node.args
        if operation is not captures.LINALG_CHECK:
            raise CaptureError(
                f"{operation} has effects that come in order, and a plan may change the order of "
                'operations: leave the engine at "auto", or call it outside of the model'
            )
        with graph.inserting_before(node):
            check = graph.call_function(operation, tuple(arguments), node.kwargs)
        check.meta = {**node.meta, "val": None}
        for user in list(node.users):
            user.replace_all_uses_with(token)
            graph.erase_node(user)
        graph.erase_node(node)
    inputs = graph.find_nodes(op="placeholder")
    late = [node for node in inputs if captures.is_token(node, of_backward=True)]
    kept = {node for node in inputs if captures.is_token(node)}
    output = graph.output_node()
    returned: list[fx.Node | None] = list(output.args[0])  # type: ignore[arg-type]
    output.args = ([None if one in kept else one for one in returned if one not in late],)
    for node in late:
        graph.erase_node(node)
    return late
