"""Forwards `python -m tests.kernel_battery` to tests/support/kernel_battery.py."""

import sys

from tests.support.kernel_battery import main

if __name__ == "__main__":
    sys.exit(main())
