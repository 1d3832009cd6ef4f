"""`python -m bitnet_ops`: the same as the console script `bitnet-ops`. It must not know more."""

import sys

from bitnet_ops.cli import main

sys.exit(main())
