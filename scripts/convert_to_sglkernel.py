#!/usr/bin/env python3
"""The converter of earlier SGLBITNT files under its old name: the same as `bitnet-ops convert`.

    python scripts/convert_to_sglkernel.py SRC DST

It writes the same format and reads files that the old one wrote.
"""

import sys

from bitnet_ops.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
