"""`python -m qkv COMMAND`: the command line where the script `qkv` is not on the path."""

import sys

from qkv.cli import main

sys.exit(main())
