"""Random tensors and calls: most are valid, the others differ from valid ones in one or two places."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

from tests.phase_one.tensors import DTYPES, FORMATS, ND, Call, Shape, Tensor, floats, strides

T = TypeVar("T")

_SIZES = (1, 1, 2, 2, 3, 3, 4, 5, 7, 8, 16)


class Draw:
    """Random choices for calls on a chip.

    Args:
        chip: The chip, as named by the host NPU.
        seed: The seed of all choices.
    """

    def __init__(self, chip: str, seed: int) -> None:
        self.chip = chip
        self.floats = floats(chip)
        self.random = random.Random(f"{chip} {seed}")

    def chance(self, probability: float) -> bool:
        """Return true with this probability."""
        return self.random.random() < probability

    def one(self, of: Sequence[T]) -> T:
        """Return one of several values."""
        return of[int(self.random.random() * len(of))]

    def size(self, zero: float = 0.03) -> int:
        """Return a size, which is zero with this probability."""
        return 0 if self.chance(zero) else self.one(_SIZES)

    def shape(self, least: int = 0, most: int = 4) -> Shape:
        """Return a shape of a rank from ``least`` to ``most``, occasionally up to 8."""
        most = 8 if self.chance(0.05) else most
        return tuple(self.size() for _ in range(self.random.randint(least, most)))

    def part(self, shape: Shape) -> Shape:
        """Return a shape that broadcasts to another."""
        shape = shape[self.random.randint(0, len(shape)) :]
        return tuple(1 if self.chance(0.3) else size for size in shape)

    def dtype(self) -> int:
        """Return a floating dtype of the chip."""
        return self.one(self.floats)

    def format(self, other: float = 0.1) -> int:
        """Return a format: ND, or with this probability any."""
        return self.one(FORMATS) if self.chance(other) else ND

    def tensor(self, shape: Shape, dtype: int, format: int | None = None) -> Tensor:
        """Return a tensor with one of many layouts in its storage, rarely outside of it."""
        view, offset, storage = strides(shape), 0, shape
        if self.chance(0.3):
            view, offset, storage = self._layout(shape)
        return Tensor(dtype, shape, view, offset, storage, self.format(0.04) if format is None else format)

    def _layout(self, shape: Shape) -> tuple[Shape, int, Shape]:
        view, offset = list(strides(shape)), 0
        kind = self.random.random()
        if kind < 0.2:  # a part of a larger storage
            offset = self.one((0, 1, 5))
        elif kind < 0.4 and shape:  # transposed
            order = self.random.sample(range(len(shape)), len(shape))
            sizes = strides(tuple(shape[axis] for axis in order))
            for position, axis in enumerate(order):
                view[axis] = sizes[position]
        elif kind < 0.6:  # with gaps
            view = [stride * self.one((1, 2, 3)) for stride in view]
            offset = self.one((0, 2))
        elif kind < 0.7 and shape:  # expanded
            view[self.random.randrange(len(shape))] = 0
        elif kind < 0.8 and shape:  # backwards
            axis = self.random.randrange(len(shape))
            offset = max(0, view[axis] * (shape[axis] - 1))
            view[axis] = -view[axis]
        elif kind < 0.9:  # strides of size 1 are arbitrary
            view = [self.one((0, 9, -3)) if size == 1 else stride for size, stride in zip(shape, view, strict=True)]
        last = offset + sum(max(0, step * (size - 1)) for size, step in zip(shape, view, strict=True))
        if self.chance(0.05):  # a storage that is too small, which only copies check
            return tuple(view), offset + self.one((0, -1, 3)), (max(1, last),)
        rest = self.one((0, 0, 1, 10))
        if self.chance(0.3) and rest == 0 and math.prod(shape) == last + 1:
            return tuple(view), offset, shape
        return tuple(view), offset, (last + 1 + rest,)

    def spoil(self, call: Call, odd: Mapping[str, Sequence[object]]) -> None:
        """Change one argument, which may make the call invalid.

        Args:
            call: The call.
            odd: Values for arguments that are not tensors.
        """
        name = self.one(list(vars(call)))
        value = getattr(call, name)
        if name in odd:
            setattr(call, name, self.one(odd[name]))
        elif isinstance(value, Tensor):
            setattr(call, name, self._spoilt(value, call))
        elif isinstance(value, bool) and self.chance(0.3):  # a null pointer for a result
            setattr(call, name, not value)

    def _spoilt(self, tensor: Tensor, call: Call) -> Tensor | None:
        kind = self.random.random()
        shape = tensor.shape
        if kind < 0.1:
            return None
        if kind < 0.27:
            return tensor.but(dtype=self.one(DTYPES) if self.chance(0.6) else self.dtype())
        if kind < 0.37:
            return tensor.but(format=self.one(FORMATS))
        if kind < 0.6 and shape:
            axis = self.random.randrange(len(shape))
            size = self.one((0, 1, 1, shape[axis] + 1, max(0, shape[axis] - 1), self.size()))
            return tensor.but(shape=shape[:axis] + (size,) + shape[axis + 1 :])
        if kind < 0.7:
            return tensor.but(shape=shape[:-1] if self.chance(0.5) else (1,) + shape)
        if kind < 0.75:
            return tensor.but(shape=self.one(((), (1,), (1, 1), (0,), shape + (1,) * max(0, 9 - len(shape)))))
        if kind < 0.8:
            return self.one([other for other in vars(call).values() if isinstance(other, Tensor)])
        view, offset, storage = self._layout(shape)
        if self.chance(0.3):
            storage = (max(1, math.prod(storage) // 2),)
        return tensor.but(shape=shape, strides=view, offset=offset, storage=storage)
