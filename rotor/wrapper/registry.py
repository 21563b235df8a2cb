"""The engines that a model is given, in the order in which they are asked."""

from __future__ import annotations

from rotor._pytorch import fsdp
from rotor.engines.chain.engine import ChainEngine
from rotor.engines.chain.sharded import find_sharding
from rotor.engines.chain.stages import is_plain_sequential
from rotor.engines.contract import Context, Engine
from rotor.engines.dynamic.engine import DynamicEngine
from rotor.engines.graph.compiled import CompiledEngine
from rotor.engines.graph.engine import GraphEngine
from rotor.engines.parts.engine import PartsEngine
from rotor.engines.parts.sharded_engine import ShardedBlocksEngine

__all__ = ["ENGINES", "engines_for"]

ENGINES = ("auto", "chain", "graph", "dynamic")
"""Values of ``engine=``."""


def engines_for(context: Context) -> list[Engine]:
    """Return the engines of a model: the first is asked, and each hands over to the next."""
    settings = context.settings
    graph = settings.graph_class or GraphEngine
    is_auto = settings.engine == "auto"
    if settings.engine == "dynamic":
        return [DynamicEngine(context)]
    if settings.backend == "inductor":
        chosen: list[Engine] = [CompiledEngine(context), graph(context)]
        return [*chosen, *_without_graph(context)] if is_auto else chosen
    if settings.engine == "graph":
        return [graph(context)]
    # Only the operations of a graph can be priced without being run.
    is_timed = isinstance(settings.profile, str) and settings.profile == "measured"
    is_chain = is_plain_sequential(settings.module) and is_timed
    if settings.engine == "chain" or (is_chain and ChainEngine.name not in settings.unsuited):
        return [ChainEngine(context)]
    sharding = find_sharding(settings.module, context.wrapper()) if fsdp.is_loaded() else None
    if sharding is not None:
        return [ShardedBlocksEngine(context, sharding)]
    return [graph(context), *_without_graph(context)]


def _without_graph(context: Context) -> list[Engine]:
    """Return the engines of models that have no single graph."""
    return [PartsEngine(context), DynamicEngine(context)]
