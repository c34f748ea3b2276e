"""A bucket goes through states in one step; this says from which to which."""

from __future__ import annotations

from enum import Enum


class BucketState(Enum):
    """Says where a bucket is in its step."""

    FILLING = "filling"
    READY = "ready"
    SPECULATED = "speculated"
    UNDONE = "undone"
    COMMITTED = "committed"
    REPLAYED = "replayed"
    STEPPED = "stepped"
    PUBLISHED = "published"
    SETTLED = "settled"
    SKIPPED = "skipped"
    ABANDONED = "abandoned"


_S = BucketState
_ENDED = (_S.COMMITTED, _S.REPLAYED, _S.STEPPED, _S.SETTLED, _S.SKIPPED, _S.ABANDONED)
NEXT = {
    _S.FILLING: {_S.READY, _S.ABANDONED},
    _S.READY: {_S.SPECULATED, _S.STEPPED, _S.PUBLISHED, _S.SKIPPED, _S.ABANDONED, _S.FILLING},
    _S.SPECULATED: {_S.COMMITTED, _S.REPLAYED, _S.SKIPPED, _S.ABANDONED, _S.UNDONE},
    _S.UNDONE: {_S.FILLING},
    _S.PUBLISHED: {_S.SETTLED},
    **{state: {_S.FILLING} for state in _ENDED},
}
