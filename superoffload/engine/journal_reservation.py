"""Says how many bytes are reserved for undo journals. The planner and doctor import this without loading torch."""

# One-byte codes leave 1.5 of them for escapes, and two-byte codes 0.5.
JOURNAL_BYTES_PER_PARAM = 2.5

# A bucket has a little more, because escapes average out less over few parameters.
_JOURNAL_BYTES_PER_BUCKET = 1024


# Between publish and settle the journal keeps the old upper halves of split masters.
_HALF_BYTES_PER_PARAM = 2


def halves_bytes(padded: int) -> int:
    """Returns the bytes in which a bucket of ``padded`` elements, alignment included, keeps its upper halves."""
    return _HALF_BYTES_PER_PARAM * padded


def reserved_bytes(numel: int) -> int:
    """Returns the bytes that the journal of a bucket of ``numel`` elements has from construction on."""
    return int(JOURNAL_BYTES_PER_PARAM * numel) + _JOURNAL_BYTES_PER_BUCKET
