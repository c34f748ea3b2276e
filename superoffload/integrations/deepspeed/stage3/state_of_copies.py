"""DeepSpeed's inner optimizer shows state in forms that torch does not know as copies, made when they are read."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class StateOfCopies(UserDict[str, Tensor]):
    """Shows the state of a parameter that keeps some of it in other forms: each read of those makes a copy.

    It keeps no copy, also where a framework puts one back: Lightning reads and writes every entry. Its own copies and
    pickles are dictionaries of that moment, which ``torch.load`` reads.
    """

    def __init__(self, rest: dict[str, Tensor], copies: Mapping[str, Callable[[], Tensor]]) -> None:
        self._copies = copies
        super().__init__()
        self.data = {**rest, **dict.fromkeys(copies, torch.empty(0, device="cpu"))}

    def __getitem__(self, name: str) -> Tensor:
        return self._copies[name]() if name in self._copies else super().__getitem__(name)

    def __setitem__(self, name: str, value: Tensor) -> None:
        if name not in self._copies:
            self.data[name] = value

    def __repr__(self) -> str:
        return repr(dict(self))

    def __copy__(self) -> Any:
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)
