"""`python -m bitnet_ops`: the same as the console script `bitnet-ops`.

For where scripts are not on PATH. It must not know a subcommand.
"""

import sys

from bitnet_ops.cli import main

sys.exit(main())
