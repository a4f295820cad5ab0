"""`python -m hf_longmoe` is `hf-longmoe`."""

import sys

from hf_longmoe.cli import main

sys.exit(main())
