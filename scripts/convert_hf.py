#!/usr/bin/env python3
"""Convert a Hugging Face checkpoint folder to SGLBITNT: the same as `bitnet-ops convert`.

    python scripts/convert_hf.py SRC DST --verify

For people who look in scripts/ first; the work is in bitnet_ops.convert.
"""

import sys

from bitnet_ops.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
