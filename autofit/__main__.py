"""`python -m autofit`: the command line, for an environment whose scripts are not on the path."""

from __future__ import annotations

from autofit.cli import main

if __name__ == "__main__":
    main()
