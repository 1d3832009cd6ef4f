"""Make the folder that SGLang serves of a converted model, as the launcher does.

Usage: serving_folder.py MODEL FOLDER HEAD_FORMAT; FOLDER exists and is empty.
"""

import sys
from pathlib import Path

from bitnet_ops.convert.obtain import obtain
from bitnet_ops.integrations.sglang.serving import write_folder

model, folder, head = sys.argv[1:]
print(write_folder(obtain(model).file, Path(folder), head))
