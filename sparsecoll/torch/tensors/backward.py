"""A callback for the end of back-propagation, when autograd has accumulated the last gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsecoll.torch.tensors.private import backward_node, backward_number, queue_callback


def at_end_of_backward(owner: Any, call: Callable[[], None]) -> None:
    """Call a function once when the current back-propagation ends. For use in a hook on a gradient.

    Reentrant checkpointing back-propagates within back-propagation; the end is that of the outermost one.
    `backward()` raises what `call` raises.

    Args:
        owner: object for which `call` runs only once per back-propagation, however often this function is called.
    """
    task = backward_number()
    asked = owner.__dict__.setdefault("_backward_tasks", set())
    if task in asked:
        return

    def end() -> None:
        node = backward_node()
        if node is None:
            if asked:
                asked.clear()
                call()
            return
        for successor, _ in node.next_functions:  # autograd comes there next, on the outer level
            if successor is not None:
                _before(successor, lambda: at_end_of_backward(owner, call))
                return
        at_end_of_backward(owner, call)

    queue_callback(end)
    asked.add(task)


def _before(node: Any, call: Callable[[], None]) -> None:
    """Call a function once, just before autograd executes a node."""

    def hook(_: Any) -> None:
        handle.remove()
        call()

    handle = node.register_prehook(hook)
