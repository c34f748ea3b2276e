"""What the host has: processors and memory."""
