"""The keyword arguments of DistributedOptimizer, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecoll.torch.timeline import Timeline


@dataclass(frozen=True)
class Options:
    """The keyword arguments of DistributedOptimizer, with `verify` as a number of steps."""

    bucket_bytes: int | None = 25 << 20
    dense_below: int = 1024
    overlap: bool = True
    verify: int = 0
    timeout: float | None = None
    timeline: Timeline | None = None

    def check(self) -> None:
        """Raise unless all options are valid."""
        for name, least in (("bucket_bytes", 1), ("dense_below", 0), ("verify", 0)):
            value = getattr(self, name)
            if name != "bucket_bytes" or value is not None:
                check_integer(name, value, least)
        if not isinstance(self.overlap, bool):
            raise TypeError(f"overlap: expected True or False, got {self.overlap!r}")
        check_timeout(self.timeout)
        check_timeline(self.timeline)


def verify_steps(verify: bool | int) -> int:
    """Return the argument `verify` as a number of steps, where 0 stands for never."""
    return 100 * verify if isinstance(verify, bool) else verify


def check_integer(name: str, value: object, least: int) -> None:
    """Raise unless an option is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def check_timeout(timeout: object) -> None:
    """Raise unless a timeout is None or a positive number of seconds."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout: expected seconds or None, got {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"timeout: expected more than 0 seconds, or None to wait for ever, got {timeout}")


def check_timeline(timeline: object) -> None:
    """Raise unless a timeline is None or a Timeline."""
    if timeline is not None and not isinstance(timeline, Timeline):
        raise TypeError(f"timeline: expected a sparsecoll.torch.Timeline, got {timeline!r}")
