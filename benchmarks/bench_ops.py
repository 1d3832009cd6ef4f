#!/usr/bin/env python3
"""Every op of torch.ops.bitnet against this machine's limits: `bitnet-ops bench ops` as a script.

    python benchmarks/bench_ops.py --quick --output out.json

It must not know how anything is measured (python/bitnet_ops/bench).
"""

import sys

from bitnet_ops.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
