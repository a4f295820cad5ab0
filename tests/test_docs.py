"""The pages of docs/: their pictures are there, are PNGs and are small."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_pictures_are_there_and_small():
    page = (DOCS / "pictures.md").read_text(encoding="utf-8")
    linked = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    assert sorted(linked) == sorted(f"pictures/{path.name}" for path in (DOCS / "pictures").glob("*.png"))
    for name in linked:
        data = (DOCS / name).read_bytes()
        assert data.startswith(b"\x89PNG") and 1000 < len(data) < 100_000, name
