"""An exception at a line of the library, in one thread of one rank: what tests of failures inject."""

import contextlib
import sys


class Injected(Exception):
    """Raised on purpose."""


class Lines:
    """Notes the lines that a thread comes to; at one of them it raises.

    Args:
        wanted: function of a code object that returns whether its lines are noted.
        target: one of the lines that were `seen`; None, the default, only notes them.
    """

    def __init__(self, wanted, target=None):
        self.seen, self._wanted, self._target = {}, wanted, target

    def __enter__(self):
        sys.settrace(self.call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def call(self, frame, event, argument):
        """A trace function."""
        return self._line if self._wanted(frame.f_code) else None

    def _line(self, frame, event, argument):
        if event != "line":
            return self._line
        here = frame.f_code.co_qualname, frame.f_lineno
        if here not in self.seen:
            self.seen[here] = None
            if here == self._target:
                sys.settrace(None)
                raise Injected("here")
        return self._line


@contextlib.contextmanager
def traced_in_background(transport, lines):
    """Trace the thread of a communicator's nonblocking calls."""
    from sparsecoll.transport.progress import in_background

    in_background(transport, lambda: sys.settrace(lines.call)).result()
    try:
        yield
    finally:
        in_background(transport, lambda: sys.settrace(None)).result()


def spread(lines, count):
    """Some of the lines, spread evenly; all of them if `count` is None."""
    return lines if count is None else lines[:: -(-len(lines) // count)]
