"""A conversion that waits after its first tensor, to be ended from outside: `python -c SLOW ...`.

Its arguments are those of `bitnet-ops`.
"""

SLOW = """
import sys, time
from bitnet_ops.cli import main
from bitnet_ops.convert import write
add = write.Writer.add_packed
def slow(*args, **options):
    add(*args, **options)
    print("tensor", flush=True)
    time.sleep(60)
write.Writer.add_packed = slow
sys.exit(main())
"""
