"""Types that have keys and no length: mappings from integers, strings or tuples.

Integers are indices. Tuples count as strings, their JSON. The index of a string is its position among the keys of a
rank, and in a collective that in a table of the keys of all ranks (`collectives.keyed`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.collectives.convert.back import Back
from sparsecoll.vector import DenseVector, SparseVector

JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=int)
CLASSES: dict[str, Any] = {kind.__name__: kind for kind in (dict, Counter, OrderedDict, defaultdict)}
FACTORIES = {"int": int, "float": float, "None": None}
NUMBERS = (int, float, complex, np.number, np.bool_)
END = (1 << 63) - 1  # what an integer key is below
EXACT = 1 << 53  # magnitude up to which float64 holds every integer


def from_mapping(x: Mapping[Any, Any]) -> tuple[SparseVector, ToMapping]:
    """Return a mapping as a vector, and its Back."""
    name = type(x).__name__
    if CLASSES.get(name) is not type(x):
        raise TypeError(f"x: expected a mapping of class {', '.join(CLASSES)}, got {name}: use dict(x)")
    made_by = getattr(x, "default_factory", None)
    factory = getattr(made_by, "__name__", str(made_by))
    if isinstance(x, defaultdict) and (factory not in FACTORIES or FACTORIES[factory] is not made_by):
        raise TypeError(f"x: expected a defaultdict of int or float, got one of {factory}: use dict(x)")
    keys, (values, largest) = list(x), _numbers(list(x.values()))
    types = set(map(type, keys))
    for kind, of_keys in {str: "str", bytes: "bytes", tuple: "tuples"}.items():
        if keys and all(issubclass(one, kind) for one in types):
            vector, words = DenseVector(values).to_sparse(keep_zeros=True), _texts(keys) if kind is tuple else keys
            return vector, ToMapping(name, factory, of_keys, words, largest)
    indices = _keys(keys)
    if (least := int(indices.min(initial=0))) < 0:
        raise ValueError(f"x: expected keys of at least 0, got {least}: add a number to the keys of all ranks")
    length = int(indices.max()) + 1 if indices.size else 0
    return SparseVector.from_pairs(indices, values, length), ToMapping(name, factory, largest=largest)


def _keys(keys: list[Any]) -> NDArray[Any]:
    kinds = [one for one in set(map(type, keys)) if one is bool or not issubclass(one, (int, np.integer))]
    array = np.array(keys) if keys and not kinds else np.empty(0, np.int64)
    if array.dtype.kind == "f":  # of uint64 beside other integers
        array = np.array([int(key) for key in keys])
    if kinds or array.dtype.kind not in "iu" or array.max(initial=0) >= END:
        wrong = ([key for key in keys if type(key) in kinds] or [max(keys)])[0]
        cure = "int(key)" if isinstance(wrong, (bool, np.bool_)) else "str(key)"
        text = "x: expected keys that are integers below 2^63 - 1, all str, all bytes, or all tuples of int and str"
        raise TypeError(f"{text}, got {wrong!r}: use {cure}")
    return array


def _texts(keys: list[Any]) -> list[str]:
    """Return tuples of int and str as JSON, the same for equal tuples and for no others."""
    for one in set(map(type, itertools.chain.from_iterable(keys))):
        if not issubclass(one, (int, np.integer, str)) or one is bool:
            key = next(key for key in keys if one in map(type, key))
            raise TypeError(f"x: expected tuples of int and str as keys, got {key!r}: use str(key)")
    return list(map(JSON.encode, keys))


def _numbers(values: list[Any]) -> tuple[NDArray[Any], int]:
    """Return values as an array, and the largest magnitude of an integer among floats, 0 if there is none."""
    types = set(map(type, values))
    if types == {int}:
        with contextlib.suppress(OverflowError):
            return np.fromiter(values, np.int64, len(values)), 0
    other = next((one for one in types if not issubclass(one, NUMBERS)), None)
    array = np.array(values) if values and other is None else np.empty(0, np.int64)
    integers = [one for one in types if issubclass(one, (int, np.integer, np.bool_))]
    # NumPy makes floats of integers of which some need int64 and others uint64
    rounded = array.dtype.kind == "f" and len(integers) == len(types)
    wide = {"b": np.bool_, "f": np.float64, "c": np.complex128, "i": np.int64, "u": np.int64}.get(array.dtype.kind)
    if other or rounded or wide is None or array.dtype == np.uint64 or array.dtype.char in "gG":
        found = f"{'uint64' if rounded else array.dtype} from values such as {type(values[0]).__name__}"
        found = f"values such as {other.__name__}" if other else found
        raise TypeError(f"x: expected values of bool, int below 2^63, float or complex, got {found}: use float(value)")
    largest = 0
    if integers and array.dtype.kind in "fc":
        largest = max(abs(int(value)) for value in values if type(value) in integers)  # type: ignore[call-overload]
        if largest > EXACT:
            raise ValueError(f"x: expected no integers beyond 2^53 beside floats, got {largest}: use float(value)")
    return array.astype(wide, copy=False), largest


@dataclass(frozen=True)
class ToMapping(Back):
    """Returns a mapping, whose keys ascend if they are integers; values and these keys are Python numbers.

    Attributes:
        kind: name of the class, one of CLASSES.
        factory: name of the type of a defaultdict's missing values, one of FACTORIES.
        keys: "integers", "str", "bytes" or "tuples".
        words: the key of each index unless these are integers; the JSON of a tuple.
        largest: magnitude of an integer among floats, 0 if there is none.
    """

    kind: str
    factory: str
    keys: str = "integers"
    words: Any = ()
    largest: int = 0

    def __call__(self, y: SparseVector) -> Any:
        keys: Any = y.indices.tolist()
        if self.keys != "integers":
            keys = self.words if len(self.words) == y.nnz else map(self.words.__getitem__, keys)
        if self.keys == "tuples":
            keys = map(tuple, json.loads(f"[{','.join(keys)}]"))
        made, kind = dict(zip(keys, y.values.tolist(), strict=True)), CLASSES[self.kind]
        return made if kind is dict else kind(FACTORIES[self.factory], made) if kind is defaultdict else kind(made)

    def of_part(self, part: SparseVector) -> tuple[SparseVector, Back]:
        """Return entries whose indices are positions among their own words, and their Back."""
        if self.keys == "integers":
            return part, self
        words = [self.words[index] for index in part.indices.tolist()]
        return DenseVector(part.values).to_sparse(keep_zeros=True), replace(self, words=words)

    def fields(self) -> dict[str, Any]:
        """Return the fields, which other ranks need to make a result; keys that are bytes as Latin-1."""
        words = [key.decode("latin-1") for key in self.words] if self.keys == "bytes" else list(self.words)
        return {"kind": self.kind, "factory": self.factory, "keys": self.keys, "words": words}

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> ToMapping:
        if fields["kind"] not in CLASSES or fields["factory"] not in FACTORIES:
            raise ValueError(f"message: expected the name of a mapping, got {fields['kind']} of {fields['factory']}")
        if fields["keys"] == "bytes":
            fields = fields | {"words": [key.encode("latin-1") for key in fields["words"]]}
        return cls(**fields)

    def ordered(self, x: SparseVector) -> tuple[SparseVector, ToMapping]:
        """Return the entries of x and this object with ascending keys."""
        if self.keys == "integers":
            return x, self
        order = sorted(range(len(self.words)), key=self.words.__getitem__)
        return x.with_values(x.values[order]), replace(self, words=[self.words[position] for position in order])
