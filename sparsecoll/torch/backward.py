"""The end of a back-propagation: when autograd has accumulated the last gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable


def at_end_of_backward(owner: Any, call: Callable[[], None]) -> None:
    """Call something once when the back-propagation that is under way ends; for use in a hook of it.

    Reentrant checkpointing back-propagates within back-propagation: it ends when the outermost one does. What `call`
    raises is raised by `backward()`.

    Args:
        owner: for whom this is called once, however often it is asked for.
    """
    task = torch._C._current_graph_task_id()
    asked = owner.__dict__.setdefault("_backward_tasks", set())
    if task in asked:
        return
    asked.add(task)

    def end() -> None:
        node = torch._C._current_autograd_node()
        if node is None:
            asked.clear()
            call()
            return
        for successor, _ in node.next_functions:  # autograd comes there next, on the outer level
            if successor is not None:
                _before(successor, lambda: at_end_of_backward(owner, call))
                return
        at_end_of_backward(owner, call)

    Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]


def _before(node: Any, call: Callable[[], None]) -> None:
    """Call something once when autograd comes to a node."""

    def hook(_: Any) -> None:
        handle.remove()
        call()

    handle = node.register_prehook(hook)
