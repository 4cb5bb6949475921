"""Watching what PyTorch code does: the tensors it allocates and the operators it calls."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationWatch(TorchDispatchMode):
    """Records, while active, the largest tensor an operator returned and the operators called.

    ``with AllocationWatch() as watch: ...`` then read ``watch.largest_shape``,
    ``watch.largest_numel`` and ``watch.operators``. Views count as the tensor they show, except
    expanded ones, which hold no memory of their own: a tensor's size is the size of its storage,
    and storages that existed before (the inputs) do not count.
    """

    def __init__(self, *inputs: Any) -> None:
        """
        Args:
            inputs: anything holding tensors whose storage was there before and is not counted.
        """
        super().__init__()
        self.largest_shape: tuple[int, ...] = ()
        self.largest_numel = 0
        self.operators: set[str] = set()
        self._known = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves(inputs)
            if isinstance(leaf, torch.Tensor)
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators.add(str(func.overloadpacket).removeprefix("aten."))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            numel = storage.nbytes() // max(leaf.element_size(), 1)
            if numel > self.largest_numel and storage._cdata not in self._known:
                self.largest_numel = numel
                self.largest_shape = tuple(leaf.shape)
        return result
