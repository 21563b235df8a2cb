"""What only later versions of PyTorch can do, for tests of just that."""

import pytest
import torch

from rotor._pytorch import core, pointers, regions

EXCHANGES = pointers.has_storage_swap()
"""True if storages exchange their bytes; a budget needs room for copies of what comes back else."""

HANDS_OVER = core.hands_gradients_over()
"""True if a captured backward may free the gradients of its outputs; else more is needed there."""

needs_swaps = pytest.mark.skipif(
    not EXCHANGES,
    reason="before PyTorch 2.13 what is evicted comes back as a copy: for a moment it is held "
    "twice, and views are operations",
)

needs_alike = pytest.mark.skipif(
    not regions.is_available(),
    reason="before PyTorch 2.13 no guards of a part of a graph are kept: alike layers are traced",
)

FEW_GRAPHS = regions.is_available()
"""True if one capture serves all sizes of images; PyTorch 2.11 captures a convolution for some."""

needs_threads = pytest.mark.skipif(
    torch.__version__.startswith("2.11")
    and torch.version.cuda is not None
    and not torch.cuda.is_available(),
    reason="PyTorch 2.11 for CUDA without a GPU crashes where fake tensors are made in one thread "
    "after another one",
)


def skip_third_derivatives_of_batch_norms() -> None:
    """Skip a test of what PyTorch itself refuses since 2.14."""
    if torch.__version__ >= "2.14":
        pytest.skip("PyTorch 2.14 has no third derivatives of batch norms")
