"""What `python` of conftest.py starts: a folder to run in, two files for its output, then a command as for Python."""

import os
import runpy
import sys
from pathlib import Path

os.chdir(sys.argv[1])
for number, path in enumerate(sys.argv[2:4], start=1):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, number)
    os.close(file)
sys.argv = sys.argv[4:]
if sys.argv[0] == "-m":
    del sys.argv[0]
    sys.path[0] = os.getcwd()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
