"""The checkpoints of algorithmic differentiation, with each stage's own time and size.

Only activations are kept, and each ``Fe`` is followed by its ``B`` at once (by the loss and then
``B`` for the last stage): the model of Revolve, with the true times and sizes of each stage. The
dynamic program is exact in bytes and answers every budget in one solve.

References
----------
.. [1] O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal re-materialization
   strategies for heterogeneous chains: How to train deep neural networks with limited memory",
   hal-02352969.
.. [2] A. Griewank, A. Walther, "Algorithm 799: Revolve", ACM TOMS 26(1), 2000.
"""

from __future__ import annotations

from typing import ClassVar

from rotor import _core
from rotor.algorithms.curve import Curve
from rotor.algorithms.sequence import Sequence
from rotor.algorithms.utils import BuiltInAlgorithm, ProgressCallback, curve_of, priced, table_bound
from rotor.chain import Chain


class GriewankHeterogeneous(BuiltInAlgorithm):
    """The fastest schedule in which only activations are checkpoints.

    Parameters
    ----------
    max_table_bytes
        The most bytes that the solver may allocate; beyond it MemoryError. By default half of the
        available memory, and 4 GiB at most.

    Notes
    -----
    Its schedules are a subset of those of `Persistent`, so it is never faster; for comparison with
    literature on adjoints.
    """

    name: ClassVar[str] = "griewank_heterogeneous"

    def __init__(self, *, max_table_bytes: int | None = None) -> None:
        self.max_table_bytes = max_table_bytes

    def _table(self, chain: Chain, progress: ProgressCallback | None) -> _core.Table:
        kept = [i for i, flag in enumerate(chain.once[:-1]) if flag]
        if kept:
            names = [str(i) if chain.names is None else chain.names[i] for i in kept]
            raise ValueError(
                f"GriewankHeterogeneous has no schedule of this chain: it runs every stage but the "
                f"last again, and stage {', '.join(names)} may run only once. Use Persistent"
            )
        bound = table_bound(self.max_table_bytes)
        try:
            return _core.griewank_heterogeneous(chain.core, bound, progress)
        except MemoryError:
            raise MemoryError(
                f"the table of a chain of {len(chain)} stages needs more than the {bound} bytes "
                "that may be used: give more max_table_bytes, or use Persistent"
            ) from None

    def _best(
        self, chain: Chain, budget: int, mem_slots: int | None, progress: ProgressCallback | None
    ) -> Sequence:
        return priced(self._table(chain, progress).sequence(budget), chain)

    def curve(self, chain: Chain, *, progress: ProgressCallback | None = None) -> Curve:
        """Return time against memory, exactly."""
        return curve_of(self._table(chain, progress).curve())
