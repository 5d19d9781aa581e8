"""`python -m kielo` is `kielo`."""

import sys

from kielo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
