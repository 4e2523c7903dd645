"""`python -m jaxspec`: the command, where its script is not on the path."""

import sys

from jaxspec.cli import main

sys.exit(main())
