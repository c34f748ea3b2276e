"""`python -m superoffload` is the `superoffload` command."""

from superoffload.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
