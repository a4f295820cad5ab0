"""One command, side by side with what it replaces: `python -m benchmarks NAME [--json FILE] [--quick]`."""
