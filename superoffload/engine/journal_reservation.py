"""Says how many bytes are reserved for undo journals. The planner and doctor import this without loading torch.

All buckets share the reserved memory (csrc/runtime/journal_memory.h), so that it need not be as large as each bucket's
worst step. Steps that need more room than there is leave their last buckets out of speculation, or undo them early.
"""

# One-byte codes and as much for escapes; or the old upper halves of split masters between publish and settle.
JOURNAL_BYTES_PER_PARAM = 2.0

# What was used beyond this goes back to the system after some steps that did without: training that has settled uses
# 1.1 to 1.3.
KEPT_JOURNAL_BYTES_PER_PARAM = 1.5

# A bucket has a little more, because escapes average out less over few parameters.
_JOURNAL_BYTES_PER_BUCKET = 1024

# Offsets in shared memory are 32-bit numbers of 4-byte words. More buckets than that share several pieces.
LARGEST_JOURNAL_MEMORY = 1 << 34


def reserved_bytes(padded: int) -> int:
    """Returns the bytes that a bucket of ``padded`` elements, alignment included, adds to the journals' memory."""
    return int(JOURNAL_BYTES_PER_PARAM * padded) + _JOURNAL_BYTES_PER_BUCKET


def kept_bytes(reserved: int) -> int:
    """Returns how many of ``reserved`` bytes are kept after steps that needed fewer."""
    return int(reserved * KEPT_JOURNAL_BYTES_PER_PARAM / JOURNAL_BYTES_PER_PARAM)
