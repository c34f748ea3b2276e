"""What `superoffload bench` measures and how: contestants, interleaved timing, the machine's own limit, reports."""
