"""`squall`, and `python -m squall`. Knows that libraries take a while to import, and that Ctrl-C may come meanwhile."""

import sys


def main() -> None:
    """The command."""
    try:
        from squall.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
