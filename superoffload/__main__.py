"""`python -m superoffload` is the `superoffload` command."""

from superoffload.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
