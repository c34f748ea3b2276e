"""Forwards `python -m tests.compatibility` to tests/support/compatibility.py."""

from tests.support.compatibility import main

if __name__ == "__main__":
    main()
