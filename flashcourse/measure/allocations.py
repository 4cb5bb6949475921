"""Watching what PyTorch code does: the tensors it allocates and the operators it calls."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationWatch(TorchDispatchMode):
    """Records, while active, what operators returned, what was held at once, and what was called.

    ``with AllocationWatch() as watch: ...`` then read ``largest_shape`` and ``largest_numel`` (the
    largest tensor), ``live_numel`` (the most numbers held at once) and ``operators``. A tensor's
    size is the size of its storage, so views add nothing; storages that existed before (the
    inputs) do not count.
    """

    def __init__(self, *inputs: Any) -> None:
        """
        Args:
            inputs: anything holding tensors whose storage was there before and is not counted.
        """
        super().__init__()
        self.largest_shape: tuple[int, ...] = ()
        self.largest_numel = 0
        self.live_numel = 0
        self.operators: set[str] = set()
        self._known = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves(inputs)
            if isinstance(leaf, torch.Tensor)
        }
        # By identity: a weak reference keeps the identity of a freed storage from being reused.
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._held_numel = 0  # of all in _held, those freed since it was last tidied included

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # hiding from the compiler would import it: seconds, at the first operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators.add(str(func.overloadpacket).removeprefix("aten."))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known or storage._cdata in self._held:
            return
        numel = storage.nbytes() // max(tensor.element_size(), 1)
        if numel > self.largest_numel:
            self.largest_numel, self.largest_shape = numel, tuple(tensor.shape)
        self._held[storage._cdata] = (StorageWeakRef(storage), numel)
        self._held_numel += numel
        if self._held_numel > self.live_numel:  # perhaps a new height: forget what was freed
            self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
            self._held_numel = sum(size for _, size in self._held.values())
            self.live_numel = max(self.live_numel, self._held_numel)
